"""Whole state dicts: only what is trained, if asked, and an error instead of a hang if one rank asks alone."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases import CASES, as_hosts, build, sharded
from shardwise.errors import ConfigError, RanksDifferError, TransportError
from shardwise.testing import RankPool


class Adapted(nn.Module):
    """A frozen base with a buffer, and two tied adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12).requires_grad_(False)
        self.norm = nn.BatchNorm1d(12).requires_grad_(False)
        self.first = nn.Linear(12, 12, bias=False)
        self.second = nn.Linear(12, 12, bias=False)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(self.norm(self.base(x)))) * self.gain).square().mean()


def adapters(stage: int) -> tuple[bool, bool, bool, list[str], str]:
    torch.default_generator.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    run = sharded(model, optimizer, stage=stage, transport="pairwise")
    model(torch.ones(4, 12)).backward()
    optimizer.step()
    run.transport.counters.reset()
    small = run.full_state_dict(trainable_only=True, rank0_only=False)
    sent = run.transport.counters.elements.get("gather", 0)
    whole = run.full_state_dict(rank0_only=False)
    everything = run.transport.counters.elements.get("gather", 0) - sent
    alike = all(torch.equal(value, whole[name]) for name, value in small.items())
    is_tied = small["first.weight"] is small["second.weight"]
    on_others = run.full_state_dict(trainable_only=True)
    model.base.requires_grad_(dist.get_rank() == 0)
    try:
        run.full_state_dict(trainable_only=True)
        text = "nothing"
    except RanksDifferError as error:
        text = str(error)
    run.close()
    return alike and is_tied, bool(on_others) == (dist.get_rank() == 0), sent < everything, sorted(small), text


@pytest.mark.parametrize("stage", [1, 3])
def test_only_what_is_trained(pool: RankPool, stage: int) -> None:
    for alike, first_only, sends_less, names, text in pool.run(adapters, stage):
        assert alike and first_only and sends_less
        assert names == ["first.weight", "gain", "second.weight"]
        assert re.search("parameter 'base.(weight|bias)' requires grad on some ranks only", text)


CALLS: dict[str, Callable[[Any], Any]] = {
    "full_state_dict": lambda run: run.full_state_dict(),
    "full_optimizer_state_dict": lambda run: run.full_optimizer_state_dict(),
    "state_dict": lambda run: run.state_dict(),
    "load_state_dict": lambda run: run.load_state_dict({}),
    "load": lambda run: run.load("nowhere"),
}


def alone(transport: str, call: str, told: Path) -> str:
    """Rank 0 calls alone; the others do nothing until it has ended. They meet at a file: the failed call may use any group."""
    with as_hosts(2) if transport == "combined" else contextlib.nullcontext():
        run, model, optimizer, _, _ = build("mlp", "adamw", stage=3, transport=transport, timeout_s=1.0)
    CASES["mlp"].loss(model, 0).backward()
    optimizer.step()
    text = ""
    if dist.get_rank() == 0:
        try:
            CALLS[call](run)
            text = "nothing"
        except TransportError as error:
            text = str(error)
        told.touch()
    while not told.exists():
        time.sleep(0.05)
    with contextlib.suppress(TransportError):
        run.close()
    return text


@pytest.mark.parametrize(
    ("transport", "call"),
    [
        *(pytest.param("shared", call, marks=pytest.mark.slow) for call in ("full_optimizer_state_dict", "state_dict")),
        *((name, "full_state_dict") for name in ("shared", "pairwise", "combined")),
        *(("shared", call) for call in ("load", "load_state_dict")),
    ],
)
def test_a_rank_that_asks_alone_is_told_whom_it_waited_for(transport: str, call: str, tmp_path: Path) -> None:
    with RankPool(4 if transport == "combined" else 2) as ranks:  # its connections are lost
        text, *_ = ranks.run(alone, transport, call, tmp_path / "told")
    assert text.startswith(f"run.{call}() failed; all ranks must call it.")
    assert re.search(r"rank 0 waited [\d.]+ s for .* in combine \d+ at step 1, longer than timeout_s=1", text), text


def test_an_optimizer_state_dict_needs_an_optimizer() -> None:
    run = sharded(nn.Linear(4, 4), stage=3)
    with pytest.raises(ConfigError, match="needs the optimizer that was given to shard"):
        run.full_optimizer_state_dict()
    run.close()
