"""Pairwise messages: small gathers share one, and meetings are messages too."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cases import CASES, build
from shardwise.comm import Gather, World, make_transport
from shardwise.testing import RankPool, compare_with_plain


def together(seed: int) -> tuple[bool, int, int]:
    """Gather vectors of random lengths and dtypes, some into a wider dtype, one by one and together."""
    world = World.of(None, torch.device("cpu"))
    transport, _ = make_transport("pairwise", world, [], 1 << 20, 60.0)
    same = torch.Generator().manual_seed(seed)
    mine = torch.Generator().manual_seed(100 * seed + world.rank)
    pairs = []
    for tag in range(9):
        numel = int(torch.randint(1, 70, (1,), generator=same))
        stored = (torch.float32, torch.bfloat16, torch.float64)[tag % 3]
        wide = torch.float32 if stored == torch.bfloat16 and tag % 2 else stored
        shard = torch.randn(numel, generator=mine).to(stored)
        alone, joined = (torch.zeros(numel * world.world_size, dtype=wide) for _ in range(2))
        pairs.append((Gather(tag, shard, alone), Gather(tag, shard, joined)))
    for one, _ in pairs:
        transport.gather(*one).wait()
    elements = transport.counters.elements["gather"]
    for ticket in transport.gather_together([both for _, both in pairs]):
        ticket.wait()
    found = all(torch.equal(one.full, both.full) for one, both in pairs)
    result = found, elements, transport.counters.elements["gather"] - elements
    transport.close()
    return result


def test_gathers_together_are_gathers_one_by_one(pool: RankPool, pool3: RankPool) -> None:
    for ranks in (pool, pool3):
        for seed in range(4):
            for same, one_by_one, joined in ranks.run(together, seed):
                assert same and one_by_one == joined > 0


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


def messages_of_a_step() -> tuple[bool, list[int]]:
    run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=3, transport="pairwise")
    report = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=4)
    sizes: list[int] = []
    gather = run.transport.gather_together
    run.transport.gather_together = lambda gathers: sizes.append(len(gathers)) or gather(gathers)
    again = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=1)
    del run.transport.gather_together
    run.close()
    return report.is_bitwise and again.is_bitwise, sizes


def test_small_units_are_gathered_in_two_messages_a_step(pool: RankPool) -> None:
    for is_bitwise, sizes in pool.run(messages_of_a_step):
        assert is_bitwise
        assert len(sizes) <= 3 and sum(sizes) >= 6, f"blocks were not gathered together: {sizes}"
