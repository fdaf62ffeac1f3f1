"""Elements sent per rank and step: exactly 2, 2 and 3 Psi (N-1)/N for stages 1, 2 and 3, padding counted.

At stage 3 it is 2 Psi over shared memory, because backward reads the shards where they are."""

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


@pytest.mark.parametrize("transport", ["shared", "copied", "pairwise", "reference"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counted_traffic_is_the_papers(pool: RankPool, stage: int, transport: str) -> None:
    factor = 3 if stage == 3 and transport != "shared" else 2
    for case in ("gpt", "conv"):
        for found in pool.run(traffic, stage, case, transport):
            share = (found["world"] - 1) / found["world"]
            assert found["sent"] == factor * found["psi_padded"] * share
            assert found["bytes"] == 4 * found["sent"]
            assert found["psi"] <= found["psi_padded"] < 1.2 * found["psi"] + 1000


def test_three_ranks(pool3: RankPool) -> None:
    for stage, transport, factor in ((1, "auto", 2), (2, "auto", 2), (3, "auto", 2), (3, "copied", 3)):
        for found in pool3.run(traffic, stage, "gpt", transport):
            assert found["sent"] == factor * found["psi_padded"] * 2 // 3


@pytest.mark.parametrize(("transport", "num_gathers"), [("shared", 1), ("copied", 2)])
def test_frozen_parameters_are_never_reduced(pool: RankPool, transport: str, num_gathers: int) -> None:
    for found in pool.run(traffic, 3, "frozen", transport):
        assert found["sent"] == ((num_gathers + 1) * found["psi_padded"] + num_gathers * found["psi_frozen"]) / 2


def sixteen_bit(stage: int) -> tuple[int, int]:
    run, model, _, _, _ = build("gpt", "adamw", stage=stage, precision="bf16")
    CASES["gpt"].loss(model, 0).backward()
    counters = run.transport.counters
    run.close()
    return counters.bytes["gather"], counters.elements["gather"]


def test_sixteen_bit_shards_travel_in_sixteen_bits(pool: RankPool) -> None:
    for num_bytes, elements in pool.run(sixteen_bit, 3):
        assert num_bytes == 2 * elements
