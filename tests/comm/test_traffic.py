"""Elements sent per rank and step: exactly 2, 2 and 3 Psi (N-1)/N for stages 1, 2 and 3, padding counted."""

from __future__ import annotations

import pytest
import torch

from cases import CASES, build
from shardwise.testing import RankPool


def traffic(stage: int, case: str, transport: str, steps: int = 2) -> dict[str, int]:
    run, model, opt, _, _ = build(case, "adamw", stage=stage, transport=transport)
    for number in range(steps):
        run.transport.counters.reset()
        CASES[case].loss(model, number).backward()
        opt.step()
        opt.zero_grad()
    counters = run.transport.counters
    units = run._runtime.units
    found = {
        "sent": counters.total_elements(),
        "bytes": sum(counters.bytes.values()),
        "psi_padded": sum(u.layout.numel for u in units if u.is_trainable),
        "psi_frozen": sum(u.layout.numel for u in units if not u.is_trainable),
        "psi": sum(p.numel() for p in model.parameters()),
        "world": torch.distributed.get_world_size(),
    }
    run.close()
    return found


@pytest.mark.parametrize("transport", ["auto", "pairwise", "reference"])
@pytest.mark.parametrize(("stage", "factor"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_counted_traffic_is_the_papers(pool: RankPool, stage: int, factor: int, transport: str) -> None:
    for case in ("gpt", "conv"):
        for found in pool.run(traffic, stage, case, transport):
            share = (found["world"] - 1) / found["world"]
            assert found["sent"] == factor * found["psi_padded"] * share
            assert found["bytes"] == 4 * found["sent"]
            assert found["psi"] <= found["psi_padded"] < 1.2 * found["psi"] + 1000


def test_three_ranks(pool3: RankPool) -> None:
    for stage, factor in ((1, 2), (2, 2), (3, 3)):
        for found in pool3.run(traffic, stage, "gpt", "auto"):
            assert found["sent"] == factor * found["psi_padded"] * 2 // 3


def test_frozen_parameters_are_never_reduced(pool: RankPool) -> None:
    for found in pool.run(traffic, 3, "frozen", "auto"):
        # Adapters: gather, gather, reduce. Frozen base: gather twice, never reduced.
        assert found["sent"] == (3 * found["psi_padded"] + 2 * found["psi_frozen"]) / 2


def sixteen_bit(stage: int) -> tuple[int, int]:
    run, model, _, _, _ = build("gpt", "adamw", stage=stage, precision="bf16")
    CASES["gpt"].loss(model, 0).backward()
    counters = run.transport.counters
    run.close()
    return counters.bytes["gather"], counters.elements["gather"]


def test_sixteen_bit_shards_travel_in_sixteen_bits(pool: RankPool) -> None:
    for num_bytes, elements in pool.run(sixteen_bit, 3):
        assert num_bytes == 2 * elements
