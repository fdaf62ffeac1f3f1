"""One kind of state of many Units on disk, one after the other, so that small neighbours move together.

Every Unit starts at a multiple of `QUANTUM` elements, whatever the dtype: the same element number means the same place in the
parameters, the gradients and each moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from shardwise.ticket import Ticket
from shardwise.tiers.buffers import Buffers
from shardwise.tiers.disk import ALIGNMENT, DiskFile
from shardwise.tiers.ledger import Kind, Ledger, Tier

QUANTUM = ALIGNMENT
"""Elements: whole blocks of disk in any dtype."""


def whole_quanta(numel: int) -> int:
    """The next multiple of the quantum."""
    return -(-numel // QUANTUM) * QUANTUM


class Shelf:
    """A flat vector on disk that holds one kind of state of several Units."""

    def __init__(self, disk: DiskFile, kind: Kind, dtype: torch.dtype, lengths: Mapping[int, int], ledger: Ledger) -> None:
        """`lengths` are elements by Unit, in the order in which they will lie."""
        self.dtype = dtype
        self.starts: dict[int, int] = {}
        at = 0
        for unit, numel in lengths.items():
            self.starts[unit] = at
            at += whole_quanta(numel)
        self.numel = at
        self._lengths = dict(lengths)
        self._disk = disk
        self._offset = disk.reserve(at * dtype.itemsize)
        ledger.take(Tier.DISK, kind, at * dtype.itemsize)

    def fetch(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start filling `memory`, whole quanta of elements or all bytes of them, from element `start` on."""
        return self._disk.read(memory, self._offset + start * self.dtype.itemsize)

    def evict(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start writing `memory` from element `start` on."""
        return self._disk.write(memory, self._offset + start * self.dtype.itemsize)

    @contextlib.contextmanager
    def lent(self, unit: int, buffers: Buffers, *, keeps_changes: bool, is_new: bool = False) -> Iterator[torch.Tensor]:
        """One Unit's vector in memory for a while; if it is new it starts as zeros."""
        buffer = buffers.take(whole_quanta(self._lengths[unit]) * self.dtype.itemsize)
        try:
            if is_new:
                buffer.raw.zero_()
            else:
                self.fetch(buffer.raw, self.starts[unit]).wait()
            yield buffer.as_vector(self.dtype, self._lengths[unit])
            if keeps_changes:
                self.evict(buffer.raw, self.starts[unit]).wait()
        finally:
            buffers.give(buffer)
