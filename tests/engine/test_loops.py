"""Every graph and loop of the table, at every stage and in both ways through backward, has the bits of plain training."""

from __future__ import annotations

import copy

import pytest
import torch

from cases import sharded
from loops import LOOPS
from shardwise.testing import ParityReport, RankPool, compare_with_plain

WAYS = [(0, "auto"), (1, "auto"), pytest.param(2, "auto", marks=pytest.mark.slow), (3, "shared"), (3, "copied")]


def loop(name: str, stage: int, transport: str, accumulate: int, joins: str) -> ParityReport:
    make, loss = LOOPS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=stage, transport=transport, joins=joins)
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=4, accumulate=accumulate)
    run.close()
    return report


@pytest.mark.parametrize(("stage", "transport"), WAYS)
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_loops_that_users_write(pool: RankPool, name: str, stage: int, transport: str) -> None:
    for accumulate, joins in ((1, "none"), (2, "some"), (1, "all")) if stage == 3 else ((1, "all"), (2, "none")):
        for report in pool.run(loop, name, stage, transport, accumulate, joins):
            assert report.is_bitwise, f"{name}, stage {stage}, {transport}, accumulate {accumulate}, joins {joins}: {report}"
