"""CUDA ranks: NCCL's own collectives, kept thin. Written against torch's documentation; not yet run on a GPU.

Operations are issued on the current stream; `Work.wait()` makes the current stream wait, not the host. Buffers that
an operation uses are held by its Ticket until then, so the caching allocator cannot hand them out earlier.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm.transport import READY, Sink, Source, Transport, sum_dtype
from shardwise.ticket import Deferred, Ticket


class NcclTransport(Transport):
    """all_gather_into_tensor and reduce_scatter_tensor, asynchronous."""

    name = "nccl"

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """Start an all-gather in the stored dtype; widen on arrival if the full vector is wider."""
        ready.wait()
        wire = full if full.dtype == shard.dtype else torch.empty(full.shape, dtype=shard.dtype, device=full.device)
        work = dist.all_gather_into_tensor(wire, shard, group=self.world.group, async_op=True)
        self._count_gather(shard)

        def finish() -> None:
            work.wait()
            if wire is not full:
                full.copy_(wire)

        return Deferred(finish)

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

        return Deferred(finish)
