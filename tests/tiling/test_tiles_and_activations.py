"""Tiles together with every way to keep activations, with adapters, and compiled: the bits of plain training cut the same way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from test_tiles import MAX_BYTES, MODELS, VOCABULARY, WIDTH, Cut, adamw, loss_of, pair, trained
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from cases import Patched, generator, sharded
from shardwise.activations import keeping
from shardwise.testing import ParityReport, RankPool, compare_with_plain

POLICIES: dict[str, Any] = {"units": "units", "two": 2, "some": lambda name, module: name.endswith("blocks.1"), "none": None}
OFFLOADS = ("device", "host", "disk")
MIXES = [
    pytest.param(policy, offload, stage, marks=[] if (number + stage) % 6 == 0 else pytest.mark.slow)
    for number, (policy, offload) in enumerate((p, o) for p in POLICIES for o in OFFLOADS if (p, o) != ("none", "device"))
    for stage in (1, 2, 3)
]


def asked(policy: str, offload: str, directory: str, **more: Any) -> sw.Activations:
    path = {"path": directory} if offload == "disk" else {}
    return sw.Activations(checkpoint=POLICIES[policy], offload=offload, **path, **more)


def mixed(policy: str, keeps: str, directory: str, name: str, **options: Any) -> ParityReport:
    with Patched(keeping, "SMALL_BYTES", 1):
        more = {"accumulate": 2, "max_norm": 0.5}
        report, wholes, _ = trained(name, more, activations=asked(policy, keeps, directory), **options)
    assert not wholes, wholes
    return report


@pytest.mark.parametrize(("policy", "offload", "stage"), MIXES)
def test_tiles_with_every_policy(pool: RankPool, tmp_path: Any, policy: str, offload: str, stage: int) -> None:
    """The model has dropout, steps accumulate and clip; at stage 3 everything else is on disk."""
    more = {"offload": "disk"} if stage == 3 else {}
    for name in ("linear", "reentrant"):
        for report in pool.run(mixed, policy, offload, str(tmp_path), name, stage=stage, **more):
            assert report.is_bitwise, f"{name}, {policy}, {offload}, stage {stage}: {report}"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tiles_with_policies_on_four_ranks(pool4: RankPool, tmp_path: Any, stage: int) -> None:
    for policy, offload in (("units", "disk"), ("two", "host")):
        for report in pool4.run(mixed, policy, offload, str(tmp_path), "linear", stage=stage):
            assert report.is_bitwise, f"{policy}, {offload}, stage {stage}: {report}"


# -- in parts ----------------------------------------------------------------------------------------------------------


def same_loss(model: nn.Module, number: int) -> torch.Tensor:
    """Equal on all ranks: only then can they divide what they keep."""
    tokens = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def in_parts(offload: str, directory: str, stage: int) -> ParityReport:
    activations = asked("units", offload, directory, partition=dist.group.WORLD)
    with Patched(keeping, "SMALL_BYTES", 1):
        run, *both = pair("products", stage=stage, activations=activations)
        report = compare_with_plain(run, *both, same_loss, steps=3)
        run.close()
    return report


@pytest.mark.parametrize("offload", OFFLOADS)
def test_tiles_with_activations_in_parts(pool: RankPool, tmp_path: Any, offload: str) -> None:
    for stage in (1, 2, 3):
        for report in pool.run(in_parts, offload, str(tmp_path), stage):
            assert report.is_bitwise, f"{offload}, stage {stage}: {report}"


# -- adapters ----------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen tiled layer beside a trained product of two thin matrices, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 3 * WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(3, WIDTH) / 5), nn.Parameter(torch.randn(3 * WIDTH, 3) / 5)
        self.back = nn.Linear(3 * WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.back(torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t()))
        return out


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False
        self.blocks = nn.ModuleList(Adapter() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.is_cut:
                with Cut():
                    x = x + block(x)
            else:
                x = x + block(x)
        return x.square().mean()


def adapted(**options: Any) -> tuple[ParityReport, int]:
    torch.manual_seed(0)
    model = Adapted()
    plain = copy.deepcopy(model)
    optimizers = [adamw([p for p in m.parameters() if p.requires_grad]) for m in (model, plain)]
    run = sharded(model, optimizers[0], tiling=MAX_BYTES, **options)
    plain.is_cut = True

    def loss(module: nn.Module, number: int) -> torch.Tensor:
        value: torch.Tensor = module(torch.randn(3, 5, WIDTH, generator=generator(number)))
        return value

    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=3, max_norm=0.5)
    num_tiles = sum("[" in unit for unit in run.units)
    run.close()
    return report, num_tiles


@pytest.mark.parametrize("offload", [None, "disk"])
def test_adapters_beside_tiles(pool: RankPool, offload: str | None) -> None:
    for stage in (1, 3) if offload is None else (3,):
        for activations in (None, "units"):
            for report, num_tiles in pool.run(adapted, stage=stage, offload=offload, activations=activations):
                assert num_tiles >= 6 and report.is_bitwise, f"stage {stage}, {offload}, {activations}: {report}"


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(way: str, is_before: bool, transport: str) -> tuple[float, float, int]:
    """(largest difference of losses, of values, number of whole copies) between a compiled tiled model and a plain one."""
    dynamo.reset()
    torch.manual_seed(0)
    model = MODELS["conv1d"]()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    called: Any = model

    def compile_it() -> Any:
        if way == "model":
            return torch.compile(model, backend="eager")
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    if is_before:
        called = compile_it()
    run = sharded(model, optimizers[0], stage=3, transport=transport, tiling=MAX_BYTES)
    if not is_before:
        called = compile_it()
    losses = 0.0
    for number in range(3):
        loss, expected = loss_of(called, number), loss_of(plain, number)
        losses = max(losses, (loss - expected).abs().item())
        loss.backward()
        expected.backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()  # type: ignore[operator]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = dict(plain.named_parameters())
    values = max((value - theirs[name].detach()).abs().max().item() for name, value in run.iter_masters())
    wholes = sum(run._runtime.tiles.gathered_whole.values())
    run.close()
    return losses, values, wholes


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("way", ["model", "blocks"])
def test_compiled_models_with_tiles(pool: RankPool, way: str, is_before: bool, transport: str) -> None:
    for losses, values, wholes in pool.run(compiled, way, is_before, transport):
        assert losses < 1e-5 and values < 1e-5 and wholes == 0, (losses, values, wholes)
