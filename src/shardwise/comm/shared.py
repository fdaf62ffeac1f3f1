"""CPU ranks of one host: shards are in shared memory, and every rank reads the other ranks' shards directly.

A full vector in the stored dtype is a mapping of the ranks' own shards: gathering it copies nothing. Other full vectors are
filled by one-sided copies. Neither needs a handshake, because shards change only between two fences, and neither
can hang when ranks take different branches. Reductions, and gathers of memory that is not shared, pass constant-size chunks
through mailboxes on one Lane, in the order in which they were started. Where shards are on disk, gathers have their own
mailboxes and Lane: every rank reads its own shard and passes it to the others. The first time ranks gather different Units they
leave these mailboxes for good. From then on every rank reads all shards itself, from the other ranks' files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.comm.mailbox import Mailboxes, PartedError, chunk_bytes_for
from shardwise.comm.meeting import Meeting
from shardwise.comm.segment import PAGE_BYTES, SharedSegments
from shardwise.comm.transport import (
    READY,
    PeerShards,
    Reservation,
    Sink,
    Source,
    Transport,
    combined,
    copy_own,
    own_slice,
    sum_dtype,
)
from shardwise.comm.watch import Operation
from shardwise.comm.world import World
from shardwise.observe import pause
from shardwise.ticket import Done, Lane, Ticket
from shardwise.tiers import FullBuffer, can_tell_own_pages

MAX_OVERLAYS = 16_384
"""Most mappings used for overlays. Linux allows a process 65,530 mappings by default."""


class HostShards:
    """The shards of one host's ranks, in memory that these ranks share. `world` is all ranks, `host` those of this host."""

    def __init__(self, world: World, host: World) -> None:
        self._world = world
        self._host = host
        self._segments: SharedSegments | None = None
        self._shards: dict[int, list[torch.Tensor]] = {}
        self._places: dict[int, list[tuple[int, int]]] = {}  # (segment, start in bytes) of every rank's vector

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Allocate one segment per rank; every rank maps all of them."""
        ranks = range(self._host.world_size)
        ends = [0 for _ in ranks]  # bytes of each segment that are taken
        for entry in sorted(reservations, key=self._is_joint):
            num_bytes = entry.memory_numel * entry.dtype.itemsize
            if self._is_joint(entry):  # side by side in one segment
                segment = min(ranks, key=ends.__getitem__)
                self._places[entry.tag] = [(segment, ends[segment] + rank * num_bytes) for rank in ranks]
                ends[segment] += _whole_pages(len(ranks) * num_bytes)
            else:  # each rank's in its own segment, at the same place
                self._places[entry.tag] = [(rank, ends[rank]) for rank in ranks]
                ends = [end + _whole_pages(num_bytes) for end in ends]
        self._segments = SharedSegments(self._host, max(ends), keeps_files=True)
        memory = []
        for entry in reservations:
            vectors = [self._segments.view(*place, entry.memory_numel, entry.dtype) for place in self._places[entry.tag]]
            memory.append(vectors[self._host.rank])
            self._shards[entry.tag] = [
                own_slice(self._world, vector, rank) if entry.is_full else vector
                for rank, vector in zip(self._host.ranks, vectors, strict=True)
            ]
        return memory

    def _is_joint(self, entry: Reservation) -> bool:
        """Whether to put the ranks' shards side by side: they are not whole pages, but all together can be mapped as one."""
        is_whole = entry.memory_numel * entry.dtype.itemsize % PAGE_BYTES == 0
        return not entry.is_full and not is_whole and self._host.world_size == self._world.world_size

    def overlay(self, tag: int, memory: torch.Tensor) -> FullBuffer | None:
        """Map all ranks' shards of one Unit as one vector; None if they are not all on this host."""
        assert self._segments is not None
        length = memory.numel() * memory.element_size()
        is_too_many = len(self._places) * self._host.world_size > MAX_OVERLAYS
        if is_too_many or length == 0 or self._host.world_size < self._world.world_size:
            return None
        if not can_tell_own_pages():  # writes by user code would go unnoticed
            return None
        places = self._places[tag]
        if length % PAGE_BYTES:
            places, length = places[:1], _whole_pages(length * len(places))
        try:
            return self._segments.overlay(places, length, memory.dtype, memory.numel() * self._host.world_size)
        except OSError:  # no mappings are left: only this rank copies instead
            return None

    def holds(self, tag: int, shard: torch.Tensor) -> bool:
        """Whether `shard` is the one in shared memory, not another vector of the same Unit."""
        shards = self._shards.get(tag)
        return shards is not None and shards[self._host.rank].data_ptr() == shard.data_ptr()

    def copy_into(self, full: torch.Tensor, tag: int) -> None:
        """Copy the shards of this host's ranks into the full vector."""
        for local, rank in enumerate(self._host.ranks):
            place, shard = own_slice(self._world, full, rank), self._shards[tag][local]
            if place.data_ptr() != shard.data_ptr():
                place.copy_(shard)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class SharedTransport(Transport):
    """Shared memory between the processes of one host."""

    name = "shared memory"
    is_one_host = True

    def __init__(self, world: World, exchange_bytes: int, timeout_s: float) -> None:
        super().__init__(world, timeout_s)
        self.watch.share(world)
        self._chunk_bytes = chunk_bytes_for(exchange_bytes, world.world_size)
        self._mail = Mailboxes(world, self._chunk_bytes, self.watch)
        self._meeting = Meeting(world, self.watch)
        self._shards = HostShards(world, world)
        self._lane = Lane("shardwise-exchange", self.interrupt)
        self._gather_mail: Mailboxes | None = None  # only if shards are offloaded: their gathers have their own Lane
        self._gather_lane = Lane("shardwise-gather", self.interrupt)
        self._peer_shards: PeerShards | None = None
        self._overlays: set[int] = set()
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Allocate shared memory for the shards of all Units."""
        if any(entry.is_offloaded for entry in reservations):
            self._gather_mail = Mailboxes(self.world, self._chunk_bytes, self.watch)
        return self._shards.reserve(reservations)

    def read_peers_with(self, reader: PeerShards) -> None:
        """Ranks that gather different Units will leave the mailboxes and use `reader`."""
        if self._gather_mail is not None:
            self._peer_shards = reader
            self._gather_mail.may_part = True

    def overlay(self, tag: int, memory: torch.Tensor) -> FullBuffer | None:
        """Map the ranks' shards as one full vector."""
        found = self._shards.overlay(tag, memory)
        if found is not None:
            self._overlays.add(found.tensor.data_ptr())
        return found

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """Copy the shards, unless `full` is an overlay. Shards that are not in shared memory go through the mailboxes."""
        pause("gather.start")
        self._count_gather(shard)
        if not self._shards.holds(tag, shard):
            if ready is READY or self._gather_mail is None:
                operation = self.watch.begin("exchange", "gather", tag)
                return self._lane.submit(lambda: self._gather_from_memory(operation, shard, full))
            operation, mail = self.watch.begin("prefetch", "gather", tag), self._gather_mail
            return self._gather_lane.submit(lambda: self._gather_from_disk(operation, mail, shard, full, ready))
        if full.data_ptr() not in self._overlays:
            self._shards.copy_into(full, tag)
        return Done()

    def _gather_from_memory(self, operation: Operation, shard: torch.Tensor, full: torch.Tensor) -> None:
        with self.watch.during(operation):
            copy_own(self.world, shard, full)
            self._exchange_shards(operation, self._mail, shard, full)

    def _gather_from_disk(
        self, operation: Operation, mail: Mailboxes, shard: torch.Tensor, full: torch.Tensor, ready: Ticket
    ) -> None:
        with self.watch.during(operation):
            ready.wait()
            copy_own(self.world, shard, full)
            if not mail.have_parted:
                try:
                    self._exchange_shards(operation, mail, shard, full)
                    return
                except PartedError:
                    pass  # another rank gathers another Unit
            assert self._peer_shards is not None
            for peer in self.world.peers():
                self._peer_shards(operation.tag, peer, own_slice(self.world, full, peer))

    def _exchange_shards(self, operation: Operation, mail: Mailboxes, shard: torch.Tensor, full: torch.Tensor) -> None:
        chunk = self._chunk_bytes // shard.element_size()
        for start in range(0, shard.numel(), chunk):
            part = shard[start : start + chunk]
            for peer in self.world.peers():
                mail.post(peer, operation, part.numel(), part.dtype, copier(part))
            for peer in self.world.peers():
                place = own_slice(self.world, full, peer)[start : start + part.numel()]
                mail.read(peer, operation, part.numel(), part.dtype, place.copy_)

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Send every peer its slice chunk by chunk; sums are formed in rank order."""
        self._count_reduce(shard_numel, wire)
        pause("reduce.start")
        operation = self.watch.begin("exchange", "reduce", tag)
        return self._lane.submit(lambda: self._exchange_slices(operation, shard_numel, wire, source, sink))

    def _exchange_slices(self, operation: Operation, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> None:
        with self.watch.during(operation):
            total = self._scratch_for(sum_dtype(wire))
            chunk = self._chunk_bytes // sum_dtype(wire).itemsize
            for start in range(-chunk, shard_numel, chunk):
                after = start + chunk
                if after < shard_numel:  # post the next chunk before this one is summed
                    self._post_chunk(operation, shard_numel, after, min(chunk, shard_numel - after), wire, source)
                if start >= 0:
                    numel = min(chunk, shard_numel - start)
                    place = sink.place(start, numel)
                    landed = total[:numel] if place is None or place.dtype != total.dtype else place
                    self._sum_chunk(operation, shard_numel, start, landed, wire, source)
                    sink(start, landed)

    def _post_chunk(
        self, operation: Operation, shard_numel: int, start: int, numel: int, wire: torch.dtype, source: Source
    ) -> None:
        pause("reduce.post")
        for peer in self.world.peers():
            self._mail.post(peer, operation, numel, wire, functools.partial(source, peer * shard_numel + start))

    def _sum_chunk(
        self, operation: Operation, shard_numel: int, start: int, total: torch.Tensor, wire: torch.dtype, source: Source
    ) -> None:
        pause("reduce.land")
        rank, size = self.world.rank, self.world.world_size
        own_start = rank * shard_numel + start
        mine = source.view(own_start, total.numel()) if wire == total.dtype else None
        if size == 2 and mine is not None and mine.dtype == wire:
            self._mail.read(1 - rank, operation, total.numel(), wire, lambda theirs: torch.add(mine, theirs, out=total))
            return
        own = self._scratch_for(wire, 1)[: total.numel()]  # rounded as the other ranks' parts are
        for turn in range(size):
            add = total.copy_ if turn == 0 else total.add_
            if turn == rank:
                source(own_start, own)
                add(own)
            else:
                self._mail.read(turn, operation, total.numel(), wire, add)

    def _scratch_for(self, dtype: torch.dtype, which: int = 0) -> torch.Tensor:
        chunk = self._chunk_bytes // dtype.itemsize
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(2 * chunk, dtype=dtype)
        return self._scratch[dtype][which * chunk : (which + 1) * chunk]

    def fence(self) -> None:
        """Wait until every rank has read what it needs, or written what others will read."""
        pause("fence")
        self._meeting.fence(self.watch.begin("meeting", "fence"))

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Every rank reads all values and reduces them in rank order."""
        pause("combine")
        return combined(self._meeting.collect(self.watch.begin("meeting", "combine"), values), op)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values, read from shared memory."""
        return self._meeting.collect(self.watch.begin("meeting", "combine"), values)[0]

    @property
    def exchange_bytes(self) -> int:
        """Bytes of the outgoing slots and of the buffers in which sums are formed."""
        return self._slot_bytes + sum(t.numel() * t.element_size() for t in self._scratch.values())

    @property
    def planned_exchange_bytes(self) -> int:
        """Bytes of the slots and of two chunks in fp32."""
        return self._slot_bytes + 2 * self._chunk_bytes

    @property
    def _slot_bytes(self) -> int:
        return self._mail.num_bytes + (0 if self._gather_mail is None else self._gather_mail.num_bytes)

    @property
    def allows_different_units(self) -> bool:
        """True if shards are in memory, or if they are on disk and the other ranks' files could be opened."""
        return self._gather_mail is None or self._gather_mail.may_part

    @property
    def note(self) -> str:
        """Also says whether ranks have left the mailboxes for gathers."""
        if self._gather_mail is not None and self._gather_mail.have_parted:
            return "ranks have gathered different Units from disk: since then each reads all shards itself"
        return super().note

    def close(self) -> None:
        """End the Lanes. Memory is freed with its last reference."""
        self._lane.close()
        self._gather_lane.close()


def copier(values: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Return a function that copies `values` into a slot."""
    return lambda slot: slot.copy_(values)
