"""Agreements between few ranks by messages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm import World, make_transport
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
