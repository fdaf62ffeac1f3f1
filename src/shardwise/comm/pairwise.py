"""CPU ranks on gloo: gather and reduce by point-to-point messages, about five times faster than gloo's own collectives.

Gathers run on one Lane (a background thread), reductions on another, each in the order in which they were started.
Reductions use two sets of constant-size exchange buffers: while one set is being sent, the other is summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.messages import Messages, network_devices
from shardwise.comm.transport import (
    READY,
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
from shardwise.ticket import Lane, Ticket

_GRAIN = 256  # chunk lengths are multiples of this many elements
_MOST_RANKS_BY_MESSAGES = 8  # that agree by messages
_MAX_TAG = 1 << 30


class _ExchangeSet:
    """Send and receive buffers for one chunk to and from every peer, and this rank's own contribution."""

    def __init__(self, world: World, numel: int, wire: torch.dtype) -> None:
        self.send = {peer: torch.empty(numel, dtype=wire) for peer in world.peers()}
        self.receive = {peer: torch.empty(numel, dtype=wire) for peer in world.peers()}
        self.own = torch.empty(numel, dtype=wire)
        self.total = torch.empty(numel, dtype=sum_dtype(wire))
        self.works: list[tuple[Any, int]] = []

    @property
    def num_bytes(self) -> int:
        tensors = [*self.send.values(), *self.receive.values(), self.own, self.total]
        return sum(t.numel() * t.element_size() for t in tensors)


class PairwiseTransport(Transport):
    """Batched isend/irecv between every pair of ranks."""

    name = "pairwise"
    gathers_ahead = True

    def __init__(self, world: World, exchange_bytes: int, timeout_s: float) -> None:
        super().__init__(world, timeout_s)
        devices = network_devices()
        self._gather_messages = Messages(world, devices)
        self._reduce_messages = Messages(world, devices)
        self._meeting_messages = Messages(world, devices)
        self._gather_lane = Lane("shardwise-gather", self.interrupt)
        self._lane = Lane("shardwise-reduce", self.interrupt)
        self._limit_bytes = exchange_bytes
        self._largest_shard_numel = 1 << 62
        self._sets: dict[torch.dtype, tuple[_ExchangeSet, _ExchangeSet]] = {}

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Allocate ordinary memory, and limit the exchange buffers to what the largest Unit needs."""
        size = self.world.world_size
        self._largest_shard_numel = max((r.shard_numel(size) for r in reservations), default=self._largest_shard_numel)
        return super().reserve(reservations)

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """Send the shard to every peer and receive theirs straight into `full`, or into a buffer if the dtypes differ."""
        pause("gather.start")
        self._count_gather(shard)
        operation = self.watch.begin("prefetch", "gather", tag)
        return self._gather_lane.submit(lambda: self._exchange_shards(operation, shard.contiguous(), full, ready))

    def _exchange_shards(self, operation: Operation, shard: torch.Tensor, full: torch.Tensor, ready: Ticket) -> None:
        with self.watch.during(operation):
            ready.wait()
            for landing, place in self._send_and_receive(operation, shard, full):
                if landing is not place:
                    place.copy_(landing)

    def _send_and_receive(
        self, operation: Operation, shard: torch.Tensor, full: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        is_narrow = full.dtype != shard.dtype
        places = {peer: own_slice(self.world, full, peer) for peer in self.world.peers()}
        landings = {peer: torch.empty_like(shard) if is_narrow else place for peer, place in places.items()}
        works = _swap(self._gather_messages, shard, landings, operation.tag)
        copy_own(self.world, shard, full)
        pause("gather.wait")
        self.watch.wait_all(works, operation)
        return [(landings[peer], place) for peer, place in places.items()]

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Exchange slices chunk by chunk on the reduce Lane; sums are formed in rank order."""
        self._count_reduce(shard_numel, wire)
        pause("reduce.start")
        operation = self.watch.begin("exchange", "reduce", tag)
        return self._lane.submit(lambda: self._exchange(operation, shard_numel, wire, source, sink))

    def _exchange(self, operation: Operation, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> None:
        with self.watch.during(operation):
            self._exchange_chunks(operation, shard_numel, wire, source, sink)

    def _exchange_chunks(self, operation: Operation, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> None:
        sets = self._exchange_sets(wire)
        chunk = sets[0].own.numel()
        flying: tuple[_ExchangeSet, int, int] | None = None
        for number, start in enumerate(range(0, shard_numel, chunk)):
            numel = min(chunk, shard_numel - start)
            buffers = sets[number % 2]
            self._post(buffers, operation.tag, shard_numel, start, numel, source)
            if flying is not None:
                self._land(*flying, operation, sink)
            flying = (buffers, start, numel)
        if flying is not None:
            self._land(*flying, operation, sink)

    def _post(self, buffers: _ExchangeSet, tag: int, shard_numel: int, start: int, numel: int, source: Source) -> None:
        pause("reduce.post")
        buffers.works = [
            (self._reduce_messages.receive(buffers.receive[peer][:numel], peer, tag), peer) for peer in self.world.peers()
        ]
        for peer in self.world.peers():
            out = buffers.send[peer][:numel]
            source(peer * shard_numel + start, out)
            buffers.works.append((self._reduce_messages.send(out, peer, tag), peer))
        source(self.world.rank * shard_numel + start, buffers.own[:numel])

    def _land(self, buffers: _ExchangeSet, start: int, numel: int, operation: Operation, sink: Sink) -> None:
        pause("reduce.land")
        self.watch.wait_all(buffers.works, operation)
        parts = {**buffers.receive, self.world.rank: buffers.own}
        total = buffers.total[:numel].copy_(parts[0][:numel])
        for rank in range(1, self.world.world_size):  # in rank order, whichever rank sums
            total.add_(parts[rank][:numel])
        sink(start, total)

    def _exchange_sets(self, wire: torch.dtype) -> tuple[_ExchangeSet, _ExchangeSet]:
        if wire not in self._sets:
            numel = self._chunk(wire)
            self._sets[wire] = (_ExchangeSet(self.world, numel, wire), _ExchangeSet(self.world, numel, wire))
        return self._sets[wire]

    def _per_element_bytes(self, wire: torch.dtype) -> int:
        return 2 * ((2 * self.world.world_size - 1) * wire.itemsize + sum_dtype(wire).itemsize)

    def _chunk(self, wire: torch.dtype) -> int:
        numel = min(self._limit_bytes // self._per_element_bytes(wire), self._largest_shard_numel)
        return max(-(-numel // _GRAIN) * _GRAIN, _GRAIN)

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Exchange the values by messages. Every rank sends to every other one, so many ranks use gloo's all-reduce."""
        if self.world.world_size > _MOST_RANKS_BY_MESSAGES:
            return combine_by_gloo(self, values, op)
        pause("combine")
        operation = self.watch.begin("meeting", "combine")
        rows = torch.empty(self.world.world_size, values.numel(), dtype=values.dtype)
        rows[self.world.rank] = values
        # The tag says how many values: ranks that disagree wait for each other and fail, instead of reading half a message.
        works = _swap(self._meeting_messages, values, {peer: rows[peer] for peer in self.world.peers()}, values.nbytes % _MAX_TAG)
        self.watch.wait_all(works, operation)
        return combined(rows, op)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Use gloo's broadcast."""
        return broadcast_by_gloo(self, values)

    @property
    def planned_exchange_bytes(self) -> int:
        """Bytes of both sets if gradients are sent in fp32."""
        return self._chunk(torch.float32) * self._per_element_bytes(torch.float32)

    @property
    def exchange_bytes(self) -> int:
        """Bytes of both sets, for each wire dtype in use."""
        return sum(s.num_bytes for pair in self._sets.values() for s in pair)

    def interrupt(self) -> None:
        """Make waits for messages raise too."""
        super().interrupt()
        self._gather_messages.interrupt()
        self._reduce_messages.interrupt()
        self._meeting_messages.interrupt()

    def close(self) -> None:
        """End the Lanes."""
        self._gather_lane.close()
        self._lane.close()


def _swap(messages: Messages, values: torch.Tensor, landings: Mapping[int, torch.Tensor], tag: int) -> list[tuple[Any, int]]:
    """Start to send `values` to every peer and to receive what it sends into its landing; returns what to wait for."""
    works = [(messages.receive(landing, peer, tag), peer) for peer, landing in landings.items()]
    return works + [(messages.send(values, peer, tag), peer) for peer in landings]


def combine_by_gloo(transport: Transport, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Gloo's all-reduce, with a timeout and a named operation in the error. Bitwise the same on every rank."""
    pause("combine")
    operation = transport.watch.begin("meeting", "combine")
    work = dist.all_reduce(values, op=op, group=transport.world.group, async_op=True)
    transport.watch.wait_all([(work, -1)], operation)
    return values


def broadcast_by_gloo(transport: Transport, values: torch.Tensor) -> torch.Tensor:
    """Gloo's broadcast from rank 0, with a timeout and a named operation in the error."""
    operation = transport.watch.begin("meeting", "combine")
    work = dist.broadcast(values, group_src=0, group=transport.world.group, async_op=True)
    transport.watch.wait_all([(work, 0)], operation)
    return values
