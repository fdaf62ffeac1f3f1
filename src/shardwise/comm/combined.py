"""CPU ranks on several hosts, with several ranks on each: shared memory inside a host, messages between hosts.

Every element crosses the network once per host, not once per rank. The ranks with the same place on their hosts form a rail.
Messages go along rails, and each rank passes what it receives to the other ranks of its host. Sums are formed inside each host
in rank order and then over hosts in order of their first rank, in fp32 or wider. Every rank takes part in every gather and
reduction.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.mailbox import Mailboxes, chunk_bytes_for
from shardwise.comm.meeting import Meeting
from shardwise.comm.messages import Messages, network_devices
from shardwise.comm.pairwise import broadcast_by_gloo, combine_by_gloo
from shardwise.comm.segment import PAGE_BYTES
from shardwise.comm.shared import HostShards, copier
from shardwise.comm.transport import READY, Reservation, Sink, Source, Transport, copy_own, own_slice, sum_dtype
from shardwise.comm.watch import Operation
from shardwise.comm.world import World
from shardwise.observe import pause
from shardwise.ticket import Lane, Ticket


class _HostSums:
    """Buffers for one chunk: this host's sums for the ranks of its rail, and the sums that those ranks send."""

    def __init__(self, num_hosts: int, numel: int, dtype: torch.dtype) -> None:
        self.mine = torch.empty(num_hosts, numel, dtype=dtype)
        self.theirs = torch.empty(num_hosts, numel, dtype=dtype)
        self.works: list[tuple[Any, int]] = []

    @property
    def num_bytes(self) -> int:
        return 2 * self.mine.numel() * self.mine.element_size()


class CombinedTransport(Transport):
    """Both levels: mailboxes between the ranks of a host, point-to-point messages along rails."""

    name = "combined (shared memory in hosts, pairwise between them)"
    gathers_ahead = True

    def __init__(self, world: World, hosts: Sequence[Sequence[int]], exchange_bytes: int, timeout_s: float) -> None:
        super().__init__(world, timeout_s)
        self._hosts = hosts  # ranks of each host
        self._at = next(number for number, ranks in enumerate(hosts) if world.rank in ranks)
        # All ranks make these together, so they come before anything that may fail on one host only.
        devices = network_devices()
        self._gather_messages = Messages(world, devices)
        self._reduce_messages = Messages(world, devices)
        self._host = world.part(list(hosts[self._at]))
        self._local = self._host.rank
        self.watch.share(self._host)
        # A quarter of `exchange_bytes` for each of two sets of mailboxes and two sets of sums (two vectors per host).
        self._chunk_bytes = min(
            chunk_bytes_for(exchange_bytes // 4, self._host.world_size),
            max(exchange_bytes // (8 * len(hosts)) // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES),
        )
        self._gather_mail = Mailboxes(self._host, self._chunk_bytes, self.watch)
        self._reduce_mail = Mailboxes(self._host, self._chunk_bytes, self.watch)
        self._meeting = Meeting(self._host, self.watch)
        self._shards = HostShards(world, self._host)
        self._gather_lane = Lane("shardwise-gather", self.interrupt)
        self._reduce_lane = Lane("shardwise-reduce", self.interrupt)
        self._sums: dict[torch.dtype, tuple[_HostSums, _HostSums]] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Allocate memory that the ranks of this host share."""
        return self._shards.reserve(reservations)

    def _mates(self) -> Iterator[tuple[int, int]]:
        """(host, rank) of the other ranks of this rail, starting with the next host."""
        for step in range(1, len(self._hosts)):
            host = (self._at + step) % len(self._hosts)
            yield host, self._hosts[host][self._local]

    # -- gather -----------------------------------------------------------------------------------------------

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """Exchange shards along the rail and pass them on inside the host, on the gather Lane."""
        pause("gather.start")
        self._count_gather(shard)
        operation = self.watch.begin("prefetch", "gather", tag)
        return self._gather_lane.submit(lambda: self._gather(operation, shard.contiguous(), full, ready))

    def _gather(self, operation: Operation, shard: torch.Tensor, full: torch.Tensor, ready: Ticket) -> None:
        with self.watch.during(operation):
            ready.wait()
            landings: dict[int, torch.Tensor] = {}
            works: list[tuple[Any, int]] = []
            for _, mate in self._mates():
                place = own_slice(self.world, full, mate)
                landings[mate] = torch.empty_like(shard) if full.dtype != shard.dtype else place
                works.append((self._gather_messages.receive(landings[mate], mate, operation.tag), mate))
                works.append((self._gather_messages.send(shard, mate, operation.tag), mate))
            if self._shards.holds(operation.tag, shard):
                self._shards.copy_into(full, operation.tag)
            else:
                copy_own(self.world, shard, full)
                self._hand_on(operation, shard, full, self._at)
            pause("gather.wait")
            self.watch.wait_all(works, operation)
            for _, mate in self._mates():
                if landings[mate].data_ptr() != own_slice(self.world, full, mate).data_ptr():
                    own_slice(self.world, full, mate).copy_(landings[mate])
            for host in range(len(self._hosts)):  # the same order on every rank of the host
                if host != self._at:
                    self._hand_on(operation, landings[self._hosts[host][self._local]], full, host)

    def _hand_on(self, operation: Operation, part: torch.Tensor, full: torch.Tensor, host: int) -> None:
        """Send a shard of a rank of `host` to the other ranks of this host, and receive the shards that they have."""
        chunk = self._chunk_bytes // part.element_size()
        for start in range(0, part.numel(), chunk):
            piece = part[start : start + chunk]
            for peer in self._host.peers():
                self._gather_mail.post(peer, operation, piece.numel(), piece.dtype, copier(piece))
            for peer in self._host.peers():
                place = own_slice(self.world, full, self._hosts[host][peer])[start : start + chunk]
                self._gather_mail.read(peer, operation, piece.numel(), piece.dtype, place.copy_)

    # -- reduce -----------------------------------------------------------------------------------------------

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Sum inside the host for every rank of the rail, then over hosts. While one chunk is sent, the next one is summed."""
        self._count_reduce(shard_numel, wire)
        pause("reduce.start")
        operation = self.watch.begin("exchange", "reduce", tag)
        return self._reduce_lane.submit(lambda: self._reduce(operation, shard_numel, wire, source, sink))

    def _reduce(self, operation: Operation, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> None:
        with self.watch.during(operation):
            sets = self._sums_for(sum_dtype(wire))
            chunk = sets[0].mine.shape[1]
            for number, start in enumerate(range(0, shard_numel + chunk, chunk)):
                if start < shard_numel:
                    numel = min(chunk, shard_numel - start)
                    self._send_sums(operation, sets[number % 2], shard_numel, start, numel, wire, source)
                if number:
                    before = start - chunk
                    self._land_sums(operation, sets[(number - 1) % 2], before, min(chunk, shard_numel - before), sink)

    def _send_sums(
        self,
        operation: Operation,
        sums: _HostSums,
        shard_numel: int,
        start: int,
        numel: int,
        wire: torch.dtype,
        source: Source,
    ) -> None:
        pause("reduce.post")
        sums.works = [
            (self._reduce_messages.receive(sums.theirs[host, :numel], mate, operation.tag), mate) for host, mate in self._mates()
        ]
        for host, ranks in enumerate(self._hosts):
            for peer in self._host.peers():
                fill = functools.partial(source, ranks[peer] * shard_numel + start)
                self._reduce_mail.post(peer, operation, numel, wire, fill)
            total = sums.mine[host, :numel]
            own = self._scratch_for(wire)[:numel]
            for local in range(self._host.world_size):
                add = total.copy_ if local == 0 else total.add_
                if local == self._local:
                    source(ranks[local] * shard_numel + start, own)
                    add(own)
                else:
                    self._reduce_mail.read(local, operation, numel, wire, add)
            if host != self._at:
                mate = ranks[self._local]
                work = self._reduce_messages.send(total, mate, operation.tag)
                sums.works.append((work, mate))

    def _land_sums(self, operation: Operation, sums: _HostSums, start: int, numel: int, sink: Sink) -> None:
        pause("reduce.land")
        self.watch.wait_all(sums.works, operation)
        parts = [(sums.mine if host == self._at else sums.theirs)[host, :numel] for host in range(len(self._hosts))]
        total = sums.theirs[self._at, :numel].copy_(parts[0])  # no other host writes to this row
        for part in parts[1:]:
            total.add_(part)
        sink(start, total)

    def _sums_for(self, dtype: torch.dtype) -> tuple[_HostSums, _HostSums]:
        if dtype not in self._sums:
            numel = self._chunk_bytes // dtype.itemsize
            self._sums[dtype] = (_HostSums(len(self._hosts), numel, dtype), _HostSums(len(self._hosts), numel, dtype))
        return self._sums[dtype]

    def _scratch_for(self, wire: torch.dtype) -> torch.Tensor:
        if wire not in self._scratch:
            self._scratch[wire] = torch.empty(self._chunk_bytes // sum_dtype(wire).itemsize, dtype=wire)
        return self._scratch[wire]

    # -- the rest ---------------------------------------------------------------------------------------------

    def fence(self) -> None:
        """Wait for the ranks of this host: only they read each other's shards directly."""
        pause("fence")
        self._meeting.fence(self.watch.begin("meeting", "fence"))

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Use gloo's all-reduce: the values are small."""
        return combine_by_gloo(self, values, op)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Use gloo's broadcast."""
        return broadcast_by_gloo(self, values)

    @property
    def exchange_bytes(self) -> int:
        """Bytes of mailboxes, host sums and one chunk of scratch memory."""
        sums = sum(s.num_bytes for pair in self._sums.values() for s in pair)
        scratch = sum(t.numel() * t.element_size() for t in self._scratch.values())
        return self._gather_mail.num_bytes + self._reduce_mail.num_bytes + sums + scratch

    @property
    def planned_exchange_bytes(self) -> int:
        """The same bytes if gradients are sent in fp32."""
        mail = self._gather_mail.num_bytes + self._reduce_mail.num_bytes
        return mail + (4 * len(self._hosts) + 1) * self._chunk_bytes

    def interrupt(self) -> None:
        """Make waits for messages raise too."""
        super().interrupt()
        self._gather_messages.interrupt()
        self._reduce_messages.interrupt()

    def close(self) -> None:
        """End the Lanes. Memory is freed with its last reference."""
        self._gather_lane.close()
        self._reduce_lane.close()
