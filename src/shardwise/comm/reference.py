"""A slow transport that only uses torch's collectives. Tests compare the other transports with it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm.transport import READY, Sink, Source, Transport, own_slice, sum_dtype
from shardwise.ticket import Done, Ticket


class ReferenceTransport(Transport):
    """Blocking all-gather and all-reduce on whole vectors."""

    name = "reference"

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """One blocking all-gather, then a cast."""
        ready.wait()
        parts = [torch.empty_like(shard) for _ in range(self.world.world_size)]
        dist.all_gather(parts, shard.contiguous(), group=self.world.group)
        for rank, part in enumerate(parts):
            own_slice(self.world, full, rank).copy_(part)
        self._count_gather(shard)
        return Done()

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """One blocking all-reduce of the gradient, rounded to the wire dtype; this rank keeps its slice."""
        full = torch.empty(shard_numel * self.world.world_size, dtype=wire, device=self.world.device)
        source(0, full)
        total = full.to(sum_dtype(wire))
        dist.all_reduce(total, group=self.world.group)
        sink(0, own_slice(self.world, total))
        self._count_reduce(shard_numel, wire)
        return Done()
