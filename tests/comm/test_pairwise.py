"""Agreements between few ranks by messages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm import World, make_transport
from shardwise.errors import TransportError
from shardwise.testing import RankPool


def meetings() -> list[bool]:
    world = World.of(None, torch.device("cpu"))
    transport, _ = make_transport("pairwise", world, [], 1 << 20, 60.0)
    found = []
    for dtype in (torch.uint8, torch.int64, torch.float64):
        rows = [torch.arange(5).mul(rank + 1).remainder(7).to(dtype) for rank in range(world.world_size)]
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
            want = torch.stack(rows).amax(0) if op == dist.ReduceOp.MAX else torch.stack(rows).sum(0).to(dtype)
            found.append(torch.equal(transport.all_reduce(rows[world.rank].clone(), op), want))
    transport.close()
    return found


def test_meetings_reduce_over_all_ranks(pool: RankPool, pool3: RankPool) -> None:
    for ranks in (pool, pool3):
        assert all(all(found) for found in ranks.run(meetings))


def disagreement() -> str:
    world = World.of(None, torch.device("cpu"))
    transport, _ = make_transport("pairwise", world, [], 1 << 20, 2.0)
    try:
        transport.all_reduce(torch.ones(3 if world.rank == 0 else 8, dtype=torch.float64), dist.ReduceOp.MAX)
        return "nothing"
    except TransportError as error:
        return str(error)


def test_ranks_that_agree_on_different_things_fail_by_name() -> None:
    with RankPool(2, timeout_s=60) as ranks:  # its own: a failed exchange closes connections
        for text in ranks.run(disagreement):
            assert "in combine 0" in text, text


def a_silent_error() -> tuple[dict[int, str], bool]:
    def attempt() -> None:
        if dist.get_rank() == 1:
            raise OSError

    outcome = World.of(None, torch.device("cpu")).try_together(attempt, OSError)
    return dict(outcome.problems), outcome.problem is not None


def test_an_error_without_a_text_is_an_error_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(a_silent_error) == [({1: ""}, False), ({1: ""}, True)]
