"""Checkpoints divided among the ranks of a group that compute the same activations: 1/m of the bytes, the same bits."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from cases import Patched
from shardwise.activations import apply
from shardwise.activations import keeping as keeping_module
from shardwise.errors import RanksDifferError
from shardwise.testing import RankPool
from shardwise.tiers import Kind, Ledger, Mover, Tier


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feed(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def parallel(mesh: DeviceMesh, width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(width, depth)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def divided(offload: str, directory: str, shape: tuple[int, int, int], checkpoint: Any) -> tuple[bool, float, int]:
    """Train a tensor-parallel model of torch's with divided checkpoints and without; (same bits, bytes / formula, left)."""
    tokens, width, depth = shape
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    models = [parallel(mesh, width, depth) for _ in range(2)]
    ledger = Ledger()
    device = torch.device("cpu")
    asked = sw.Activations(
        checkpoint=checkpoint, offload=offload, partition=mesh.get_group(), **({"path": directory} if offload == "disk" else {})
    )
    offloading = types.SimpleNamespace(mover=Mover(device, ledger), disk=None, asked=sw.Offload())
    runtime: Any = types.SimpleNamespace(offload=offloading, ledger=ledger, world=types.SimpleNamespace(device=device), units=())
    keeping = apply(models[0], runtime, asked, [f"blocks.{n}" for n in range(depth)])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    kept = 0.0
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)
            loss = model(torch.randn(2, tokens, width))
            if model is models[0]:
                tier = Tier.DISK if offload == "disk" else Tier.HOST
                interval = checkpoint if isinstance(checkpoint, int) else 1
                kept = ledger.now(tier, Kind.ACTIVATION) / (4 * 2 * tokens * width * -(-depth // interval) / size)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    same = all(
        torch.equal(a.to_local() if hasattr(a, "to_local") else a, b.to_local() if hasattr(b, "to_local") else b)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )
    left = sum(ledger.now(tier, Kind.ACTIVATION) for tier in Tier)
    keeping.close()
    return same, kept, left


@pytest.mark.parametrize("offload", ["device", "host", "disk"])
@pytest.mark.parametrize("checkpoint", ["units", pytest.param(2, marks=pytest.mark.slow)])
def test_each_rank_keeps_its_part(pool: RankPool, tmp_path: Any, offload: str, checkpoint: Any) -> None:
    for shape in ((64, 128, 4), (128, 96, 3), (96, 160, 5)):
        for same, kept, left in pool.run(divided, offload, str(tmp_path), shape, checkpoint):
            assert same and left == 0
            assert kept == pytest.approx(1, rel=0.02), (shape, kept)


def test_four_ranks_keep_a_quarter_each(pool4: RankPool, tmp_path: Any) -> None:
    for same, kept, left in pool4.run(divided, "disk", str(tmp_path), (128, 128, 3), "units"):
        assert same and left == 0 and kept == pytest.approx(1, rel=0.02)


def unequal(directory: str) -> str:
    """Sharded with `sw.shard`, each rank a world of its own; inputs differ, although the caller said that they do not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("tensor", "shard"))
    torch.manual_seed(0)
    model = Stack(16, 2)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Patched(keeping_module, "SMALL_BYTES", 1):
        asked = sw.Activations(partition=mesh["tensor"].get_group())
        run = sw.shard(model, optimizer, stage=2, mesh=mesh["shard"], activations=asked)
        for net in (model, plain):
            torch.manual_seed(1)
            net(torch.randn(4, 16)).backward()
        grads = dict(run.iter_grads())
        assert all(torch.equal(param.grad, grads[name]) for name, param in plain.named_parameters())
        run.close()
        asked = sw.Activations(partition=mesh["tensor"].get_group())
        other = sw.shard(plain, stage=2, mesh=mesh["shard"], activations=asked)
        torch.manual_seed(dist.get_rank())
        try:
            plain(torch.randn(4, 16))
        except RanksDifferError as error:
            return str(error)
        finally:
            other.close()
    return "not refused"


def test_ranks_with_other_inputs_are_refused(pool: RankPool, tmp_path: Any) -> None:
    for text in pool.run(unequal, str(tmp_path)):
        assert "different inputs of module 'blocks.0'" in text
