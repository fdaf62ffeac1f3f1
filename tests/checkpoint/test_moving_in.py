"""Jobs move in from plain torch and out again: model and optimizer files of a plain job, sharded training, plain files again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from cases import generator, sharded
from shardwise.testing import RankPool
from shardwise.testing.parity import in_rank_order

Options = dict[str, Any]


class Traveller(nn.Module):
    """Tied, frozen and transposed parameters; all sizes are multiples of 16, so that torch's fused kernel has no tails to round."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.still = nn.Linear(16, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(32, 16).t() * 0.2)
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.still(self.embed(tokens[:, :-1]))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = (x @ self.mix).view(*x.shape[:-1], 2, 16).sum(-2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(torch.randint(0, 48, (2, 9), generator=generator(number)))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.5),
}
DISK = sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)
PLACES: dict[str, Options] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "transport": "pairwise"},
    "stage 3": {"stage": 3},
    "disk": {"stage": 3, "offload": DISK},
}


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer with two groups whose order is not the model's."""
    torch.default_generator.manual_seed(seed)
    model = Traveller()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return model, KINDS[kind]([{"params": vectors, "lr": 3e-3}, {"params": list(reversed(matrices)), "weight_decay": 0.02}])


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Plain steps with gradients averaged over ranks; like autograd's own they have the strides of their parameter."""
    for number in range(first, last):
        loss_of(model, number).backward()
        for param in (p for p in model.parameters() if p.grad is not None):
            parts = [torch.empty(param.shape) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, param.grad.contiguous())
            param.grad.copy_(in_rank_order(parts) / len(parts))
        optimizer.step()
        optimizer.zero_grad()


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two nested values differ, in types, dtypes, strides or bits."""
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and found.shape == expected.shape
        return [] if same and found.stride() == expected.stride() and torch.equal(found, expected) else [where]
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{where}: {sorted(map(str, expected))}"]
        return [text for key in expected for text in differences(found[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, (list, tuple)):
        if type(found) is not type(expected) or len(found) != len(expected):
            return [where]
        return [text for n, pair in enumerate(zip(found, expected, strict=True)) for text in differences(*pair, f"{where}.{n}")]
    return [] if type(found) is type(expected) and found == expected else [where]


def largest(found: Any, expected: Any) -> float:
    """The largest difference of any element of nested values."""
    if isinstance(expected, torch.Tensor):
        return float((found - expected).abs().max()) if expected.is_floating_point() and expected.numel() else 0.0
    pairs = expected.items() if isinstance(expected, dict) else enumerate(expected) if isinstance(expected, list) else ()
    return max((largest(found[key], value) for key, value in pairs), default=0.0)


def write(directory: str, name: str, model: Any, optimizer: Any) -> None:
    if dist.get_rank() == 0:
        torch.save(model, f"{directory}/{name}-model.pt")
        torch.save(optimizer, f"{directory}/{name}-optimizer.pt")
    dist.barrier()


def read(directory: str, name: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and optimizer with what the files contain."""
    model, optimizer = make(kind, seed)
    model.load_state_dict(torch.load(f"{directory}/{name}-model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(f"{directory}/{name}-optimizer.pt", weights_only=True))
    return model, optimizer


def journey(directory: str, kind: str, options: Options) -> tuple[list[str], float]:
    """Three steps plainly, three sharded, three plainly: what differs from nine plain steps, and by how much."""
    model, optimizer = make(kind, seed=0)
    plainly(model, optimizer, 0, 3)
    write(directory, "before", model.state_dict(), optimizer.state_dict())
    plain, plain_optimizer = read(directory, "before", kind, seed=2)
    before = optimizer.state_dict()

    moved, moved_optimizer = read(directory, "before", kind, seed=1)
    run = sharded(moved, moved_optimizer, **options)
    wrong = differences(run.full_optimizer_state_dict(), before if dist.get_rank() == 0 else {}, "when moved in")
    for number in range(3, 6):
        loss_of(moved, number).backward()
        moved_optimizer.step()
        moved_optimizer.zero_grad()
    write(directory, "after", run.full_state_dict(), run.full_optimizer_state_dict())
    run.close()

    back, back_optimizer = read(directory, "after", kind, seed=3)
    plainly(back, back_optimizer, 6, 9)
    plainly(plain, plain_optimizer, 3, 9)
    found = {"model": dict(back.state_dict()), "optimizer": back_optimizer.state_dict()}
    expected = {"model": dict(plain.state_dict()), "optimizer": plain_optimizer.state_dict()}
    return wrong + differences(found, expected), largest(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_moves_in_and_out_to_the_last_bit(pool: RankPool, tmp_path: Path, kind: str) -> None:
    for name, options in PLACES.items():
        (tmp_path / name).mkdir()
        for wrong, off_by in pool.run(journey, str(tmp_path / name), kind, options):
            if kind == "fused" and name == "disk":  # the native Adam: its square root is not torch's (docs/numerics.md)
                assert off_by <= 1e-5 and not [where for where in wrong if "when moved in" in where], wrong
            else:
                assert not wrong, f"{name}: {wrong}"
