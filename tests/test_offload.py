"""States on host and disk: the same bits as in memory, at every stage, wherever they live."""

from __future__ import annotations

from typing import Any

import pytest

import shardwise as sw
from cases import parity
from shardwise.testing import ParityReport, RankPool

TIERS = ("device", "host", "disk")


def placements(stage: int) -> list[dict[str, str]]:
    """Every placement that makes sense: below stage 3 parameters are whole and stay where they are."""
    return [
        {"params": params, "grads": grads, "optimizer": optimizer}
        for params in (TIERS if stage == 3 else ("device",))
        for grads in TIERS
        for optimizer in TIERS
    ]


def some(stage: int, places: list[dict[str, str]], name: str = "gpt", steps: int = 3, **options: Any) -> dict[str, ParityReport]:
    """Runs on a rank: parity for several placements, with and without accumulation and clipping."""
    found = {}
    for place in places:
        for accumulate in (1, 4):
            for max_norm in (None, 0.05):
                offload = sw.Offload(**place, step_bytes=1 << 16)
                key = f"{name} stage {stage} {place} accumulate {accumulate} clip {max_norm}"
                found[key] = parity(
                    name, stage=stage, steps=steps, accumulate=accumulate, max_norm=max_norm, offload=offload, **options
                )
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_placement_gives_the_bits_of_plain_training(pool: RankPool, stage: int) -> None:
    for rank, reports in enumerate(pool.run(some, stage, placements(stage))):
        assert len(reports) == 4 * len(placements(stage))
        for what, report in reports.items():
            assert report.is_bitwise, f"{what} rank {rank}: {report}"
