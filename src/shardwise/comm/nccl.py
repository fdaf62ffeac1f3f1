"""CUDA ranks: NCCL's own collectives, kept thin. Written against torch's documentation; not yet run on a GPU.

Operations are issued on the current stream; `Work.wait()` makes the current stream wait, not the host. Until then a Ticket
keeps the buffers of its operation alive, so that the caching allocator does not reuse them.

A gather whose shard is still being fetched from another tier is issued by a Lane, on its own stream and in its own process group:
only the Lane's thread waits for the shard, and the order in which ranks issue the other operations does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.transport import READY, Reservation, Sink, Source, Transport, sum_dtype
from shardwise.comm.world import World
from shardwise.ticket import Deferred, Lane, Ticket


class NcclTransport(Transport):
    """all_gather_into_tensor and reduce_scatter_tensor, asynchronous."""

    name = "nccl"
    _gather_lane: Lane

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Allocate device memory. Offloaded shards need a second process group, which all ranks make together."""
        if any(entry.is_offloaded for entry in reservations):
            self._gather_group = self.world.new_group()
            self._gather_lane = Lane("shardwise-gather")
            self._gather_stream = torch.cuda.Stream(self.world.device)
        return super().reserve(reservations)

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """Start an all-gather in the stored dtype; widen on arrival if the full vector is wider."""
        if ready is not READY:
            return self._gather_when(ready, shard, full)
        wire = full if full.dtype == shard.dtype else torch.empty(full.shape, dtype=shard.dtype, device=full.device)
        work = dist.all_gather_into_tensor(wire, shard, group=self.world.group, async_op=True)
        self._count_gather(shard)

        def finish() -> None:
            work.wait()
            if wire is not full:
                full.copy_(wire)

        return Deferred(finish, work.is_completed)

    def _gather_when(self, ready: Ticket, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        self._count_gather(shard)
        queued = torch.cuda.current_stream(self.world.device).record_event()  # the work queued now may still use `full`
        stream = self._gather_stream

        def work() -> None:
            ready.wait()
            with torch.cuda.stream(stream):
                stream.wait_event(queued)
                wire = full if full.dtype == shard.dtype else torch.empty(full.shape, dtype=shard.dtype, device=full.device)
                dist.all_gather_into_tensor(wire, shard, group=self._gather_group)
                if wire is not full:
                    full.copy_(wire)
            stream.synchronize()

        return self._gather_lane.submit(work)

    def close(self) -> None:
        """End the Lane, if there is one."""
        if hasattr(self, "_gather_lane"):
            self._gather_lane.close()

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Start a reduce-scatter in the wire dtype; sums are formed by NCCL in that dtype."""
        full = torch.empty(shard_numel * self.world.world_size, dtype=wire, device=self.world.device)
        source(0, full)
        total = torch.empty(shard_numel, dtype=wire, device=self.world.device)
        work = self._sum_across(dist.reduce_scatter_tensor(total, full, group=self.world.group, async_op=True), total)
        self._count_reduce(shard_numel, wire)

        def finish() -> None:
            nonlocal full
            work.wait()
            del full  # safe: later work on the current stream comes after the operation
            sink(0, total.to(sum_dtype(wire)))

        return Deferred(finish, work.is_completed)

    def _sum_across(self, work: Any, total: torch.Tensor) -> Any:
        """Go on with the sums that `work` forms, if there are replicas; returns what to wait for."""
        return work


class ReplicatedNcclTransport(NcclTransport):
    """Hybrid sharding: what NcclTransport does inside a replica, and an all-reduce of every shard across replicas.

    The all-reduce is issued at once, so that all ranks issue all operations in the same order, and on a stream of its own: that
    stream waits for the sums inside, not the one that computes.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        assert world.across is not None
        super().__init__(world.inside, timeout_s)
        self._everyone, self._across = world, world.across
        self._inside = NcclTransport(world.inside, timeout_s)
        self._stream = torch.cuda.Stream(world.device)

    @property
    def inside(self) -> Transport:
        """The ranks that shard."""
        return self._inside

    def _sum_across(self, work: Any, total: torch.Tensor) -> Any:
        with torch.cuda.stream(self._stream):
            work.wait()
            replicas = self._across.world_size
            self.counters.count("across reduce", total.numel() * (replicas - 1) // replicas, total.element_size())
            self.counters.count("across gather", total.numel() * (replicas - 1) // replicas, total.element_size())
            return dist.all_reduce(total, group=self._across.group, async_op=True)

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Over all ranks."""
        return self._everyone.all_reduce(values, op)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """From the first rank of all."""
        return self._everyone.broadcast(values)
