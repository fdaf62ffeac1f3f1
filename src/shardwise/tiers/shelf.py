"""Offloaded states: one kind of state of many Units, one after the other, so that small neighbours are moved together.

Every Unit starts at a multiple of `QUANTUM` elements, whatever the dtype. So an element has the same number on the shelves of
parameters, gradients and moments.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

from shardwise.errors import LifecycleError, MemoryBudgetError
from shardwise.ticket import Chain, Returning, Ticket
from shardwise.tiers.disk import ALIGNMENT, DiskFile
from shardwise.tiers.extents import Extents
from shardwise.tiers.ledger import Kind, Ledger, Tier
from shardwise.tiers.mover import Mover

QUANTUM = ALIGNMENT
"""Number of elements; in any dtype these are whole disk blocks."""


def is_aligned(memory: torch.Tensor) -> bool:
    """Whether memory is whole, aligned blocks, so that the disk can read straight into it."""
    return memory.data_ptr() % ALIGNMENT == 0 and memory.numel() * memory.element_size() % ALIGNMENT == 0


def whole_quanta(numel: int) -> int:
    """`numel` rounded up to a multiple of QUANTUM."""
    return -(-numel // QUANTUM) * QUANTUM


class Shelf(ABC):
    """A flat vector on a tier below the device that holds one kind of state of several Units.

    `fetch` and `evict` move whole quanta, from element `start` on; `memory` may be elements or their bytes.
    """

    vector: torch.Tensor | None = None
    """The whole flat vector if it is in host memory, else None."""

    def __init__(self, dtype: torch.dtype, lengths: Mapping[int, int], mover: Mover) -> None:
        """`lengths` maps Units to numbers of elements, in the order in which they are stored."""
        self.dtype = dtype
        self.starts: dict[int, int] = {}
        at = 0
        for unit, numel in lengths.items():
            self.starts[unit] = at
            at += whole_quanta(numel)
        self.numel = at
        self._lengths = dict(lengths)
        self._extents = Extents()
        self._mover = mover

    def reserve(self, unit: int, numel: int) -> int:
        """Reserve, for a Unit, a range that others have released; return its first element."""
        if unit in self.starts:
            raise LifecycleError(f"Unit {unit} has a range on this shelf already: a broken invariant.")
        start = self._extents.reserve(whole_quanta(numel))
        if start is None:
            raise MemoryBudgetError(
                f"{numel} elements do not fit on this shelf: of {self.numel}, {self._extents.free} are free, in pieces. Release "
                "more of it first."
            )
        try:
            self._allocate(start, whole_quanta(numel))
        except BaseException:
            self._extents.release(start, whole_quanta(numel))
            raise
        self.starts[unit], self._lengths[unit] = start, numel
        return start

    def release(self, unit: int) -> None:
        """Release a Unit's range. Its contents are lost, and other Units may reserve it.

        Every fetch and evict of the range must have been waited for.
        """
        start, numel = self.starts.pop(unit), whole_quanta(self._lengths.pop(unit))
        self._extents.release(start, numel)
        self._free(start, numel)

    @abstractmethod
    def _allocate(self, start: int, numel: int) -> None:
        """Allocate the memory of a range again."""

    @abstractmethod
    def _free(self, start: int, numel: int) -> None:
        """Free the memory of a range, if the tier can."""

    @abstractmethod
    def fetch(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start copying to device memory."""

    @abstractmethod
    def evict(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start copying from device memory, which must not change before the Ticket is waited for."""

    @contextlib.contextmanager
    def borrowed(self, unit: int, *, keeps_changes: bool, is_new: bool = False) -> Iterator[torch.Tensor]:
        """Borrow one Unit's vector in device memory, fetched, or zeros if `is_new`; evict it at the end if `keeps_changes`."""
        buffers = self._mover.device_buffers
        buffer = buffers.borrow(whole_quanta(self._lengths[unit]) * self.dtype.itemsize)
        with buffers.returned(buffer):
            if is_new:
                buffer.raw.zero_()
            else:
                self.fetch(buffer.raw, self.starts[unit]).wait()
            yield buffer.as_vector(self.dtype, self._lengths[unit])
            if keeps_changes:
                self.evict(buffer.raw, self.starts[unit]).wait()


class HostShelf(Shelf):
    """A shelf in host memory, for a device that has its own memory."""

    vector: torch.Tensor

    def __init__(self, kind: Kind, dtype: torch.dtype, lengths: Mapping[int, int], ledger: Ledger, mover: Mover) -> None:
        super().__init__(dtype, lengths, mover)
        num_bytes = self.numel * dtype.itemsize
        ledger.reserve(Tier.HOST, kind, num_bytes)
        self.vector = mover.host_memory(num_bytes)[:num_bytes].view(dtype)

    def _allocate(self, start: int, numel: int) -> None:
        """Nothing to do: the vector keeps its memory."""

    def _free(self, start: int, numel: int) -> None:
        """Nothing to do: the vector keeps its memory."""

    def fetch(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start a copy from host to device memory."""
        target = memory.view(self.dtype)
        return self._mover.copy_up(target, self.vector[start : start + target.numel()])

    def evict(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start a copy from device to host memory."""
        source = memory.view(self.dtype)
        return self._mover.copy_down(self.vector[start : start + source.numel()], source)


class DiskShelf(Shelf):
    """A shelf in a range of the rank's file."""

    def __init__(
        self, disk: DiskFile, kind: Kind, dtype: torch.dtype, lengths: Mapping[int, int], ledger: Ledger, mover: Mover
    ) -> None:
        super().__init__(dtype, lengths, mover)
        self._disk = disk
        self._kind, self._ledger = kind, ledger
        self._offset = disk.reserve(self.numel * dtype.itemsize)
        ledger.reserve(Tier.DISK, kind, self.numel * dtype.itemsize)

    def _allocate(self, start: int, numel: int) -> None:
        """Allocate the blocks again, so that a full disk is noticed now."""
        self._disk.allocate(self._offset + start * self.dtype.itemsize, numel * self.dtype.itemsize)
        self._ledger.reserve(Tier.DISK, self._kind, numel * self.dtype.itemsize)

    def _free(self, start: int, numel: int) -> None:
        """Return the blocks to the file system."""
        self._disk.punch(self._offset + start * self.dtype.itemsize, numel * self.dtype.itemsize)
        self._ledger.release(Tier.DISK, self._kind, numel * self.dtype.itemsize)

    def read(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start reading into aligned host memory."""
        return self._disk.read(memory, self._offset + start * self.dtype.itemsize)

    def read_peer(self, rank: int, unit: int, place: torch.Tensor) -> None:
        """Read another rank's vector of a Unit from that rank's file into `place`; block until it is read."""
        at = self._offset + self.starts[unit] * self.dtype.itemsize
        if place.dtype == self.dtype and is_aligned(place):
            self._disk.read_peer(rank, place, at).wait()
            return
        buffers = self._mover.buffers
        buffer = buffers.borrow(whole_quanta(place.numel()) * self.dtype.itemsize)
        with buffers.returned(buffer):
            self._disk.read_peer(rank, buffer.raw, at).wait()
            place.copy_(buffer.as_vector(self.dtype, place.numel()))

    def write(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start writing from aligned host memory."""
        return self._disk.write(memory, self._offset + start * self.dtype.itemsize)

    def fetch(self, memory: torch.Tensor, start: int) -> Ticket:
        """Read; if device and host are two memories, read into a host buffer and copy up."""
        if not self._mover.is_apart:
            return self.read(memory, start)
        target = memory.view(torch.uint8)
        buffer = self._mover.buffers.borrow(target.numel())
        copied = self._mover.copy_up(target, buffer.raw[: target.numel()], after=self.read(buffer.raw, start))
        return Returning(copied, lambda: self._mover.buffers.give_back(buffer))

    def evict(self, memory: torch.Tensor, start: int) -> Ticket:
        """Write; if device and host are two memories, copy down to a host buffer first."""
        if not self._mover.is_apart:
            return self.write(memory, start)
        source = memory.view(torch.uint8)
        buffer = self._mover.buffers.borrow(source.numel())
        writes: list[Ticket] = []
        copied = self._mover.copy_down(buffer.raw, source, then=lambda: writes.append(self.write(buffer.raw, start)))
        return Returning(Chain(copied, writes), lambda: self._mover.buffers.give_back(buffer))
