"""CPU ranks of one host: shards in shared memory, read by whoever needs them.

A gather is a one-sided copy of the peers' shards: no handshake, because shards change only between two fences. It cannot
hang when ranks take different branches. Reductions, and gathers of memory that is not shared, hand constant-size chunks
through mailboxes on one lane, in the order in which they were started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from shardwise.comm.mailbox import SLOTS, Mailboxes
from shardwise.comm.segment import SharedSegments
from shardwise.comm.transport import Reservation, Sink, Source, Transport, copy_own, own_slice, sum_dtype
from shardwise.comm.world import World
from shardwise.observe import pause
from shardwise.ticket import Done, Lane, Ticket

MAX_CHUNK_BYTES = 1 << 20
"""A chunk that stays in the cache between being written by one core and read by another."""
_ALIGN_BYTES = 64


class SharedTransport(Transport):
    """Shared memory between the processes of one host."""

    name = "shared memory"

    def __init__(self, world: World, exchange_bytes: int, timeout_s: float) -> None:
        super().__init__(world)
        per_peer = exchange_bytes // (SLOTS * max(world.world_size - 1, 1))
        self._chunk_bytes = max(min(per_peer, MAX_CHUNK_BYTES) // 4096 * 4096, 4096)
        self._mail = Mailboxes(world, self._chunk_bytes, timeout_s)
        self._lane = Lane("shardwise-exchange")
        self._shards: dict[int, list[torch.Tensor]] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Shared memory for the shards of all Units: one segment per rank, every rank's shards mapped everywhere."""
        starts, at = [], 0
        for entry in reservations:
            starts.append(at)
            at += -(-entry.numel * entry.dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        segments = SharedSegments(self.world, at)
        self._mail.names.update({entry.tag: entry.name for entry in reservations})
        memory = []
        for entry, start in zip(reservations, starts, strict=True):
            vectors = [segments.view(r, start, entry.numel, entry.dtype) for r in range(self.world.world_size)]
            memory.append(vectors[self.world.rank])
            self._shards[entry.tag] = [
                own_slice(self.world, vector, r) if entry.is_full else vector for r, vector in enumerate(vectors)
            ]
        return memory

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        """Copy the peers' shards; memory that is not shared goes through the mailboxes instead."""
        pause("gather.start")
        self._count_gather(shard)
        shards = self._shards.get(tag)
        if shards is None or shards[self.world.rank].data_ptr() != shard.data_ptr():
            return self._lane.submit(lambda: self._exchange_shards(tag, shard, full))
        copy_own(self.world, shard, full)
        for peer in self.world.peers():
            own_slice(self.world, full, peer).copy_(shards[peer])
        return Done()

    def _exchange_shards(self, tag: int, shard: torch.Tensor, full: torch.Tensor) -> None:
        copy_own(self.world, shard, full)
        chunk = self._chunk_bytes // shard.element_size()
        for start in range(0, shard.numel(), chunk):
            part = shard[start : start + chunk]
            for peer in self.world.peers():
                self._mail.post(peer, tag, part.numel(), part.dtype, _copier(part))
            for peer in self.world.peers():
                place = own_slice(self.world, full, peer)[start : start + part.numel()]
                self._mail.read(peer, tag, part.numel(), part.dtype, place.copy_)

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Hand every peer its slice chunk by chunk; totals are formed in rank order."""
        self._count_reduce(shard_numel, wire)
        pause("reduce.start")
        return self._lane.submit(lambda: self._exchange_slices(tag, shard_numel, wire, source, sink))

    def _exchange_slices(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> None:
        if shard_numel == 0:
            return
        total = self._scratch_for(sum_dtype(wire))
        chunk = self._chunk_bytes // sum_dtype(wire).itemsize
        starts = range(0, shard_numel, chunk)
        self._post_chunk(tag, shard_numel, 0, min(chunk, shard_numel), wire, source)
        for start in starts:
            numel = min(chunk, shard_numel - start)
            if start + chunk < shard_numel:  # the next chunk is on its way while this one is summed
                self._post_chunk(tag, shard_numel, start + chunk, min(chunk, shard_numel - start - chunk), wire, source)
            self._sum_chunk(tag, shard_numel, start, total[:numel], wire, source)
            sink(start, total[:numel])

    def _post_chunk(self, tag: int, shard_numel: int, start: int, numel: int, wire: torch.dtype, source: Source) -> None:
        pause("reduce.post")
        for peer in self.world.peers():
            at = peer * shard_numel + start
            self._mail.post(peer, tag, numel, wire, functools.partial(source, at))

    def _sum_chunk(self, tag: int, shard_numel: int, start: int, total: torch.Tensor, wire: torch.dtype, source: Source) -> None:
        pause("reduce.land")
        rank, size = self.world.rank, self.world.world_size
        own = total if wire == total.dtype else self._scratch_for(wire)[: total.numel()]  # rounded like the others'
        own_start = rank * shard_numel + start
        if rank == 0 or size == 2:  # with two ranks a + b is b + a: no need to wait before adding one's own
            source(own_start, own)
            if own is not total:
                total.copy_(own)
            others = [r for r in range(size) if r != rank]
        else:
            self._mail.read(0, tag, total.numel(), wire, total.copy_)
            for peer in range(1, rank):
                self._mail.read(peer, tag, total.numel(), wire, total.add_)
            own = self._scratch_for(wire, 1)[: total.numel()]
            source(own_start, own)
            total.add_(own)
            others = list(range(rank + 1, size))
        for peer in others:
            self._mail.read(peer, tag, total.numel(), wire, total.add_)

    def _scratch_for(self, dtype: torch.dtype, which: int = 0) -> torch.Tensor:
        chunk = self._chunk_bytes // dtype.itemsize
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(2 * chunk, dtype=dtype)
        return self._scratch[dtype][which * chunk : (which + 1) * chunk]

    def fence(self) -> None:
        """Every rank has read what it needs, or written what others will read."""
        pause("fence")
        self.world.barrier()

    @property
    def exchange_bytes(self) -> int:
        """Outgoing slots and the buffers totals are formed in."""
        return self._mail.num_bytes + sum(t.numel() * t.element_size() for t in self._scratch.values())

    @property
    def planned_exchange_bytes(self) -> int:
        """The slots, and two chunks in fp32."""
        return self._mail.num_bytes + 2 * self._chunk_bytes

    def close(self) -> None:
        """End the lane; memory goes with the last reference."""
        self._lane.close()


def _copier(values: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda slot: slot.copy_(values)
