"""One iterator over everything that must survive: every element of every kind exactly once, whatever the placement."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch

import shardwise as sw
from cases import CASES, build
from shardwise.testing import RankPool

Found = dict[tuple[str, str], list[tuple[int, torch.Tensor]]]


def survivors(stage: int, options: dict[str, Any], optimizer: str) -> tuple[Found, dict[tuple[str, str], float], dict[str, Any]]:
    """This rank's ranges and counters after three steps, and the whole masters."""
    run, model, opt, _, _ = build("frozen", optimizer, stage=stage, **options)
    for number in range(3):
        CASES["frozen"].loss(model, number).backward()
        opt.step()
        opt.zero_grad()
    found: Found = defaultdict(list)
    for name, kind, start, values in run._survivors.ranges():
        found[name, kind].append((start, values.detach().clone()))
    counters = {(name, kind): float(value) for name, kind, value in run._survivors.counters()}
    masters = {name: value.reshape(-1).clone() for name, value in run.iter_masters()}
    run.close()
    return dict(found), counters, masters


def joined(ranks: list[Found]) -> dict[tuple[str, str], torch.Tensor]:
    """The ranges of all ranks put together; refuses gaps and overlaps."""
    everything: Found = defaultdict(list)
    for found in ranks:
        for key, parts in found.items():
            everything[key] += parts
    whole = {}
    for key, parts in everything.items():
        at = 0
        for start, values in sorted(parts, key=lambda part: part[0]):
            assert start == at, f"{key}: a range begins at {start}, {at} was expected"
            at += values.numel()
        whole[key] = torch.cat([values for _, values in sorted(parts, key=lambda part: part[0])])
    return whole


PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "host": {"offload": sw.Offload(optimizer="host")},
    "disk, small portions": {"offload": sw.Offload(optimizer="disk", grads="disk", step_bytes=1 << 16)},
    "disk, large portions": {"offload": sw.Offload(optimizer="disk", grads="disk", step_bytes=1 << 22)},
}


@pytest.mark.parametrize(("stage", "optimizer"), list(itertools.product((1, 2, 3), ("adamw", "sgd"))))
def test_every_element_once_and_the_same_wherever_it_lives(pool: RankPool, stage: int, optimizer: str) -> None:
    expected, counters = None, None
    for place, options in PLACES.items():
        ranks = pool.run(survivors, stage, options, optimizer)
        whole = joined([rank[0] for rank in ranks])
        for name, master in ranks[0][2].items():
            kind = "master" if (name, "master") in whole else "value"
            assert torch.equal(whole[name, kind], master), (place, name)
        kinds = {kind for _, kind in whole}
        assert kinds == {"value", "master", *({"exp_avg", "exp_avg_sq"} if optimizer == "adamw" else {"momentum_buffer"})}, place
        for name, kind in whole:
            assert whole[name, kind].numel() == ranks[0][2][name].numel(), (place, name, kind)
        steps = {key: value for rank in ranks for key, value in rank[1].items()}
        assert set(steps.values()) <= {3.0}
        if place == "host":
            continue  # Adam runs in another kernel there, with its own rounding
        if expected is None:
            expected, counters = whole, steps
        assert whole.keys() == expected.keys() and steps == counters, "keys do not depend on the placement or step_bytes"


def test_a_stage_that_replicates_reads_each_element_once(pool: RankPool) -> None:
    ranks = pool.run(survivors, 0, {}, "adamw")
    whole = joined([rank[0] for rank in ranks])
    for name, master in ranks[0][2].items():
        kind = "master" if (name, "master") in whole else "value"
        assert torch.equal(whole[name, kind], master)
    assert {kind for _, kind in whole} == {"value", "master", "exp_avg", "exp_avg_sq"}
