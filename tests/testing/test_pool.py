"""The rank pool itself: a rank that raises, ends or hangs is a failure, with every rank's account."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from cases import CASES, rank
from shardwise.testing import RankError, RankPool


def raises_on(bad: int) -> str:
    if dist.get_rank() == bad:
        raise ValueError("from this rank")
    return "fine"


def hangs_on(bad: int) -> str:
    if dist.get_rank() == bad:
        _sleeps_here()
    return "fine"


def _sleeps_here() -> None:
    time.sleep(60)


def ends_on(bad: int) -> str:
    if dist.get_rank() == bad:
        os._exit(3)
    return "fine"


def test_failures_are_told_with_every_ranks_account() -> None:
    with RankPool(2) as own:
        assert own.run(raises_on, 7) == ["fine", "fine"]
        with pytest.raises(RankError, match=r"(?s)rank 0 finished.*rank 1 raised.*from this rank"):
            own.run(raises_on, 1)
        assert own.run(raises_on, 7) == ["fine", "fine"], "the pool must start again"
        with pytest.raises(RankError, match=r"(?s)rank 0 did not answer; its stack:.*_sleeps_here"):
            own.run(hangs_on, 0, timeout_s=3)
        with pytest.raises(RankError, match=r"rank 1 ended"):
            own.run(ends_on, 1)


def killed_peer() -> str:
    torch.manual_seed(0)
    model = CASES["gpt"].build()
    sw.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    loss = CASES["gpt"].loss(model, 0)
    if rank() == 1:
        os._exit(9)
    loss.backward()
    return "ran"


def test_a_peer_that_ended_is_named_instead_of_waited_for() -> None:
    later = r"(this run has failed and accepts no more work\. )?"  # if another thread of the rank has found out before
    told = rf"(?s)TransportError: {later}rank 0 waited .* for rank 1 .* of Unit .*has ended|Connection closed by peer"
    with RankPool(2) as own, pytest.raises(RankError, match=told):
        own.run(killed_peer, timeout_s=60)


def sub_mesh() -> tuple[int, list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    with pytest.raises(sw.errors.ConfigError, match=r"dimension .replicas. is not known"):
        sw.shard(nn.Linear(2, 2), stage=3, mesh=mesh)
    torch.manual_seed(0)
    model = CASES["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sw.shard(model, optimizer, stage=3, mesh=mesh["shards"])
    group = dist.get_rank() // 2
    model(torch.full((2, 13), float(group + 1))).backward()
    optimizer.step()
    found = run.master("layers.0.weight").flatten()[:3].tolist()
    run.close()
    return run._runtime.world.world_size, found


def test_one_dimension_of_a_mesh(pool4: RankPool) -> None:
    answers = pool4.run(sub_mesh)
    assert [size for size, _ in answers] == [2, 2, 2, 2]
    assert answers[0] == answers[1] and answers[2] == answers[3], "ranks of one shard group agree"
    assert answers[0] != answers[2], "groups with other data differ"


def buffers() -> tuple[float, float]:
    torch.manual_seed(0)
    model = CASES["conv"].build()
    with torch.no_grad():
        model.stages[0][1].running_mean.fill_(1.0 + rank())
    run = sw.shard(model, stage=2)
    at_start = float(model.stages[0][1].running_mean[0])
    CASES["conv"].loss(model, 0)
    later = float(model.stages[0][1].running_mean[0])
    run.close()
    return at_start, later


def test_buffers_start_as_rank_zeros_and_then_are_each_ranks_own(pool: RankPool) -> None:
    first, second = pool.run(buffers)
    assert first[0] == second[0] == 1.0
    assert first[1] != second[1]


def odd_buffers() -> list[bool]:
    model = nn.Linear(2, 2)
    values = [
        torch.full((3,), rank() + 1, dtype=torch.int16),
        torch.full((2, 3), float(rank())).t(),
        torch.tensor(rank() == 0),
        torch.full((2,), complex(rank(), 1)),
    ]
    for number, value in enumerate(values):
        model.register_buffer(f"b{number}", value)
    run = sw.shard(model, stage=1)
    run.close()
    return [bool((model.b0 == 1).all()), bool((model.b1 == 0).all()), bool(model.b2), bool((model.b3 == 1j).all())]


def test_buffers_of_any_dtype(pool: RankPool) -> None:
    for answers in pool.run(odd_buffers):
        assert all(answers), answers


def test_differences_are_told_in_units_of_the_last_place() -> None:
    from shardwise.testing.parity import _Comparison

    comparison = _Comparison()
    one = torch.ones(1)
    comparison.add("q", 0, one * 1000 + 2**-13, one * 1000)  # two ulps, the larger difference
    comparison.add("q", 1, one * 1e-6 * (1 + 2**-20), one * 1e-6)  # eight ulps or so, the smaller one
    report = comparison.report(2)
    assert report.largest == pytest.approx(2**-13)
    assert 7 <= report.largest_ulps <= 17
    assert not report.is_bitwise
