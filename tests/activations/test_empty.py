"""Batches of any size: lengths that differ between ranks and steps, and ranks without samples, which take part; nothing hangs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from cases import Patched, generator, rank, sharded
from shardwise.activations import keeping as keeping_module
from shardwise.testing import ParityReport, RankPool, compare_with_plain
from shardwise.testing.models import GPT, GPTConfig
from shardwise.tiers import Kind, Tier

SIZES = [(2, 16), (0, 9), (3, 5), (0, 7), (1, 11), (2, 1)]
"""Batch and length; every rank begins at another one."""


def varied_loss(model: nn.Module, number: int) -> torch.Tensor:
    """A rank's loss at a micro-step: 0 for an empty batch. In every sixth, number 5, no rank has samples."""
    batch, length = SIZES[(number + rank()) % len(SIZES)] if number % 6 != 5 else (0, 4 + rank())
    return model(torch.randint(0, 61, (batch, length), generator=generator(number))).square().sum()


def varied(
    policy: Any, offload: str, directory: str, stage: int, transport: str, states: str | None, more: dict[str, Any]
) -> tuple[ParityReport, int]:
    """Compare with plain training; also how many bytes are still counted as activations at the end."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=61, context=16, layers=3, heads=2, hidden=32))
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    path = {"path": directory} if offload == "disk" and states is None else {}
    activations = sw.Activations(checkpoint=policy, offload=offload, **path)
    with Patched(keeping_module, "SMALL_BYTES", 1):
        run = sharded(model, optimizers[0], stage=stage, transport=transport, activations=activations, offload=states)
        report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], varied_loss, steps=7, **more)
    left = sum(run.ledger.now(tier, Kind.ACTIVATION) for tier in Tier)
    run.close()
    return report, left


SETTINGS = [("units", "device"), ("units", "host"), ("units", "disk"), (2, "device"), (2, "disk"), (None, "host"), (None, "disk")]
WAYS = [(1, "auto", None), (2, "auto", None), (3, "shared", None), (3, "pairwise", None), (3, "shared", "disk")]


def check(pool: RankPool, directory: Any, way: tuple[int, str, str | None], settings: list[tuple[Any, str]]) -> None:
    for number, (policy, offload) in enumerate(settings):
        more: dict[str, Any] = {"accumulate": 2, "max_norm": 0.5} if number % 2 else {}
        for report, left in pool.run(varied, policy, offload, str(directory), *way, more):
            assert report.is_bitwise, f"{way}, {policy}, {offload}: {report}"
            assert left == 0


@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_other_lengths_and_without_samples_take_part(pool: RankPool, tmp_path: Any, way: Any) -> None:
    check(pool, tmp_path, way, SETTINGS[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [*WAYS, (2, "pairwise", None), (3, "copied", None), (3, "copied", "disk"), (3, "pairwise", "disk")]
)
def test_other_lengths_with_every_policy(pool: RankPool, pool4: RankPool, tmp_path: Any, way: Any) -> None:
    check(pool, tmp_path, way, SETTINGS)
    check(pool4, tmp_path, way, SETTINGS)
