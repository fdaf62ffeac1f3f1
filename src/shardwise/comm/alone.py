"""The transport for a world of one rank: the same code path as with several, without peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm.transport import READY, Reservation, Sink, Source, Transport, copy_own, sum_dtype
from shardwise.comm.world import World
from shardwise.ticket import Deferred, Done, Ticket


class AloneTransport(Transport):
    """Copies between shard and full vector through one constant-size buffer."""

    name = "alone"

    def __init__(self, world: World, exchange_bytes: int, timeout_s: float) -> None:
        super().__init__(world, timeout_s)
        self._limit_bytes = exchange_bytes
        self._largest_shard_numel = 1 << 62
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Allocate ordinary memory, and limit the exchange buffer to what the largest Unit needs."""
        self._largest_shard_numel = max((r.shard_numel(1) for r in reservations), default=self._largest_shard_numel)
        return super().reserve(reservations)

    def _chunk(self, dtype: torch.dtype) -> int:
        return max(min(self._limit_bytes // dtype.itemsize, self._largest_shard_numel), 1)

    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """Copy the shard, unless it is in the full vector already."""
        self._count_gather(shard)
        if ready is READY:
            copy_own(self.world, shard, full)
            return READY

        def finish() -> None:
            ready.wait()
            copy_own(self.world, shard, full)

        return Deferred(finish)

    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Write the gradient straight into the place that `sink` offers, else pass it on chunk by chunk."""
        dtype = sum_dtype(wire)
        self._count_reduce(shard_numel, wire)
        place = sink.place(0, shard_numel)
        if place is not None and place.dtype == dtype == wire:
            source(0, place)
            sink(0, place)
            return Done()
        chunk = self._chunk(dtype)
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(chunk, dtype=dtype, device=self.world.device)
        buffer = self._buffers[dtype]
        for start in range(0, shard_numel, chunk):
            part = buffer[: min(chunk, shard_numel - start)]
            source(start, part)
            sink(start, part)
        return Done()

    @property
    def exchange_bytes(self) -> int:
        """Bytes of the chunk buffers, one per dtype in use."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    @property
    def planned_exchange_bytes(self) -> int:
        """Bytes of one chunk buffer in fp32."""
        return self._chunk(torch.float32) * 4
