"""CUDA ranks: NCCL's own collectives, kept thin. Written against torch's documentation; not yet run on a GPU.

Operations are issued on the current stream; `Work.wait()` makes the current stream wait, not the host. Buffers that
an operation uses are held by its Ticket until then, so the caching allocator cannot hand them out earlier.

A gather whose shard is still on its way up from another tier is issued by a Lane, on a stream and in a process group of its own:
the host waits for the shard there, and the order in which ranks issue the other operations stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.comm.transport import READY, Reservation, Sink, Source, Transport, sum_dtype
from shardwise.ticket import Deferred, Lane, Ticket


class NcclTransport(Transport):
    """all_gather_into_tensor and reduce_scatter_tensor, asynchronous."""

    name = "nccl"
    _gather_lane: Lane

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Device memory; shards that live away need a second process group, made by all ranks together."""
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
        queued = torch.cuda.current_stream(self.world.device).record_event()  # `full` may be used after what is queued now
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
        """End the thread, if there is one."""
        if hasattr(self, "_gather_lane"):
            self._gather_lane.close()

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Start a reduce-scatter in the wire dtype; sums are formed by NCCL in that dtype."""
        full = torch.empty(shard_numel * self.world.world_size, dtype=wire, device=self.world.device)
        source(0, full)
        total = torch.empty(shard_numel, dtype=wire, device=self.world.device)
        work = dist.reduce_scatter_tensor(total, full, group=self.world.group, async_op=True)
        self._count_reduce(shard_numel, wire)

        def finish() -> None:
            nonlocal full
            work.wait()
            del full  # the operation is ordered before anything the current stream does from here on
            sink(0, total.to(sum_dtype(wire)))

        return Deferred(finish, work.is_completed)
