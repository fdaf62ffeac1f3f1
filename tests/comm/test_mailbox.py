"""Mailboxes: any sequence of chunks of any sizes arrives in order, and a chunk of another operation is refused."""

from __future__ import annotations

import random

import pytest
import torch

from shardwise.comm.mailbox import SLOTS, Mailboxes, chunk_bytes_for
from shardwise.comm.segment import PAGE_BYTES
from shardwise.comm.watch import Watch
from shardwise.comm.world import World
from shardwise.errors import TransportError
from shardwise.testing import RankPool


def mailboxes(timeout_s: float = 60.0) -> Mailboxes:
    world = World.of(None, torch.device("cpu"))
    watch = Watch(world, timeout_s)
    watch.share(world)
    return Mailboxes(world, 2 * PAGE_BYTES, watch)


def exchange(seed: int) -> bool:
    mail = mailboxes()
    rng = random.Random(seed)
    me, peer = mail.host.rank, 1 - mail.host.rank
    limit = mail.slot_bytes // 4
    is_equal = True
    for _ in range(60):
        operation = mail._watch.begin("exchange", "reduce", rng.randint(0, 5))
        sizes = [rng.randint(1, limit) for _ in range(rng.randint(1, SLOTS))]  # no more are posted before they are read
        values = [[torch.rand(n, generator=torch.Generator().manual_seed(seed + n + rank)) for n in sizes] for rank in (0, 1)]
        for chunk in values[me]:
            mail.post(peer, operation, chunk.numel(), chunk.dtype, lambda slot, chunk=chunk: slot.copy_(chunk))
        for chunk in values[peer]:
            found: list[torch.Tensor] = []
            mail.read(peer, operation, chunk.numel(), chunk.dtype, lambda slot, found=found: found.append(slot.clone()))
            is_equal &= torch.equal(found[0], chunk)
    return is_equal


@pytest.mark.parametrize("seed", range(3))
def test_chunks_arrive_in_order_and_whole(pool: RankPool, seed: int) -> None:
    assert pool.run(exchange, seed) == [True, True]


def disagree() -> str:
    mail = mailboxes()
    me, peer = mail.host.rank, 1 - mail.host.rank
    operation = mail._watch.begin("exchange", "reduce", me)  # another Unit on each rank
    mail.post(peer, operation, 1, torch.float32, lambda slot: slot.fill_(1.0))
    try:
        mail.read(peer, operation, 1, torch.float32, lambda slot: None)
    except TransportError as error:
        return str(error)
    return "nothing"


def test_a_chunk_of_another_operation_is_refused(pool: RankPool) -> None:
    for text in pool.run(disagree):
        assert "they disagree" in text


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("limit_bytes", [0, 1, 4096, 100_000, 1 << 22, 1 << 30])
def test_all_slots_together_stay_within_the_limit(limit_bytes: int, world_size: int) -> None:
    chunk = chunk_bytes_for(limit_bytes, world_size)
    assert chunk >= PAGE_BYTES and chunk % PAGE_BYTES == 0
    assert chunk == PAGE_BYTES or chunk * SLOTS * max(world_size - 1, 1) <= limit_bytes
