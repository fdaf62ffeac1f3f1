"""Hybrid sharding: one transport inside each group of ranks that shards, and another across the groups, which hold replicas.

Parameters are gathered inside only. Gradients are summed inside first, so that each rank has the sums of its shard; then the
ranks that hold the same shard sum these, in order of the groups, and every rank sends 2 (R - 1) / R of a shard for R replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.comm.transport import READY, PeerShards, Reservation, Sink, Source, Transport, own_slice
from shardwise.comm.world import World
from shardwise.errors import TransportError
from shardwise.ticket import Lane, Ticket
from shardwise.tiers import FullBuffer

_Result = TypeVar("_Result")


class ReplicatedTransport(Transport):
    """Shards inside a group of ranks, replicates across groups."""

    def __init__(self, world: World, inside: Transport, across: Transport, chunk_bytes: int) -> None:
        """`chunk_bytes`: the most that is summed across at once."""
        super().__init__(world, inside.watch.timeout_s)
        self._inside, self._across = inside, across
        self.watch = inside.watch
        across.watch.join(inside.watch)
        self.counters = inside.counters
        across.counters = inside.counters.under("across ")
        self._chunk_bytes = chunk_bytes // 2  # padding and sums of a part
        self._padded: dict[torch.dtype, torch.Tensor] = {}
        # Alone inside, a reduction would run in the caller's thread, and wait there for ranks that come later.
        self._lane = Lane("shardwise-across", self.interrupt) if inside.world.world_size == 1 else None

    def know(self, tag: int, name: str, parameters: Sequence[str]) -> None:
        """Set the names that error messages of both use."""
        self._inside.know(tag, name, parameters)
        self._across.know(tag, name, parameters)

    @property
    def name(self) -> str:  # type: ignore[override]
        """What both are."""
        return f"{self._inside.name} inside, {self._across.name} across {self._across.world.world_size} replicas"

    @property
    def inside(self) -> Transport:
        """The transport between the ranks that shard."""
        return self._inside

    @property
    def gathers_ahead(self) -> bool:  # type: ignore[override]
        """As inside: parameters are gathered there."""
        return self._inside.gathers_ahead

    @property
    def is_one_host(self) -> bool:  # type: ignore[override]
        """Whether the ranks that shard are processes of one host."""
        return self._inside.is_one_host

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Allocate memory where the ranks that shard reach it best."""
        return self._inside.reserve(reservations)

    def overlay(self, tag: int, memory: torch.Tensor) -> FullBuffer | None:
        """Map the shards of this replica."""
        return self._inside.overlay(tag, memory)

    def read_peers_with(self, reader: PeerShards) -> None:
        """As inside."""
        self._inside.read_peers_with(reader)

    def fence(self) -> None:
        """Wait for the ranks of this replica: only they read each other's shards."""
        self._inside.fence()

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """Gather inside."""
        return self._inside.gather(tag, shard, full, ready)

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Sum inside; every chunk of sums is summed across before `sink` gets it."""
        if self._lane is None:
            return self._inside.reduce(tag, shard_numel, wire, source, _SumAcross(self, tag, sink))
        onward = _SumAcross(self, tag, sink, wire)
        return self._lane.submit(lambda: self._inside.reduce(tag, shard_numel, wire, source, onward).wait())

    def sum_across(self, tag: int, values: torch.Tensor) -> None:
        """Sum `values` over all replicas in place: each rank sums one part, then all exchange the parts."""
        size = self._across.world.world_size
        chunk = max(self._chunk_bytes // values.element_size() // size * size, size)
        for part in values.split(chunk):
            self._across_or_fail(functools.partial(self._sum_across, tag, part))

    def _sum_across(self, tag: int, values: torch.Tensor) -> None:
        size = self._across.world.world_size
        numel = -(-values.numel() // size)
        whole = values if numel * size == values.numel() else self._padding(values, numel * size)
        summed = torch.empty_like(own_slice(self._across.world, whole))
        self._across.reduce(tag, numel, values.dtype, _Slices(whole), _Into(summed)).wait()
        self._across.gather(tag, summed, whole).wait()
        if whole is not values:
            values.copy_(whole[: values.numel()])

    def _padding(self, values: torch.Tensor, numel: int) -> torch.Tensor:
        if values.dtype not in self._padded or self._padded[values.dtype].numel() < numel:
            self._padded[values.dtype] = torch.zeros(numel, dtype=values.dtype, device=values.device)
        whole = self._padded[values.dtype][:numel]
        whole[: values.numel()] = values
        whole[values.numel() :] = 0
        return whole

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Over all ranks: inside, then across."""
        return self._across_or_fail(lambda: self._across.all_reduce(self._inside.all_reduce(values, op), op))

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """From the first rank of the first replica: across, then inside."""
        return self._inside.broadcast(self._across_or_fail(lambda: self._across.broadcast(values)))

    def _across_or_fail(self, attempt: Callable[[], _Result]) -> _Result:
        """Run an operation with the other replicas. If it fails, the ranks of this replica must not wait for this one."""
        self._across.watch.step = self._inside.watch.step
        try:
            return attempt()
        except (TransportError, RuntimeError) as error:
            self._inside.watch.fail(str(error))
            self._inside.interrupt()
            raise

    @property
    def exchange_bytes(self) -> int:
        """Bytes of the buffers of both."""
        padded = sum(t.numel() * t.element_size() for t in self._padded.values())
        return self._inside.exchange_bytes + self._across.exchange_bytes + padded

    @property
    def planned_exchange_bytes(self) -> int:
        """Bytes of the buffers of both, and of a chunk of sums on its way between them."""
        return 2 * self._inside.planned_exchange_bytes + self._across.planned_exchange_bytes

    @property
    def allows_different_units(self) -> bool:
        """As inside."""
        return self._inside.allows_different_units

    @property
    def note(self) -> str:
        """As inside."""
        return self._inside.note

    def interrupt(self) -> None:
        """Make waits of both raise."""
        self._inside.interrupt()
        self._across.interrupt()

    def close(self) -> None:
        """End the threads of both."""
        if self._lane is not None:
            self._lane.close()
        self._inside.close()
        self._across.close()


class _SumAcross:
    """Takes the sums inside a replica, chunk by chunk, and hands the sums over all replicas on."""

    def __init__(self, transport: ReplicatedTransport, tag: int, sink: Sink, wire: torch.dtype | None = None) -> None:
        """`wire`: the dtype to round to before sums are formed, if they are not sums yet."""
        self._transport, self._tag, self._sink, self._wire = transport, tag, sink, wire

    def place(self, start: int, numel: int) -> torch.Tensor | None:
        return self._sink.place(start, numel)

    def __call__(self, start: int, total: torch.Tensor) -> None:
        if self._wire is not None and self._wire != total.dtype:
            total.copy_(total.to(self._wire))
        self._transport.sum_across(self._tag, total)
        self._sink(start, total)


class _Slices:
    """A vector as the source of a reduction."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __call__(self, start: int, out: torch.Tensor) -> None:
        out.copy_(self._values[start : start + out.numel()])

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        return self._values[start : start + numel]


class _Into:
    """A vector as the sink of a reduction."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def place(self, start: int, numel: int) -> torch.Tensor | None:
        return self._values[start : start + numel]

    def __call__(self, start: int, total: torch.Tensor) -> None:
        place = self._values[start : start + total.numel()]
        if place.data_ptr() != total.data_ptr():
            place.copy_(total)
