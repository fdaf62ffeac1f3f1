"""One kind of state of many Units away from the device, one after the other, so that small neighbours move together.

Every Unit starts at a multiple of `QUANTUM` elements, whatever the dtype: the same element number means the same place in the
parameters, the gradients and each moment.
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
"""Elements: whole blocks of disk in any dtype."""


def is_aligned(memory: torch.Tensor) -> bool:
    """Whether memory is whole blocks, so that a disk can read straight into it."""
    return memory.data_ptr() % ALIGNMENT == 0 and memory.numel() * memory.element_size() % ALIGNMENT == 0


def whole_quanta(numel: int) -> int:
    """The next multiple of the quantum."""
    return -(-numel // QUANTUM) * QUANTUM


class Shelf(ABC):
    """A flat vector on a tier below the device that holds one kind of state of several Units.

    `fetch` and `evict` move whole quanta of elements, or all bytes of them, from element `start` on.
    """

    vector: torch.Tensor | None = None
    """The whole of it, if it is in host memory."""

    def __init__(self, dtype: torch.dtype, lengths: Mapping[int, int], mover: Mover) -> None:
        """`lengths` are elements by Unit, in the order in which they will lie."""
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
        """Give a Unit a range that others have released, and return its first element."""
        if unit in self.starts:
            raise LifecycleError(f"Unit {unit} has a range on this shelf already: a broken invariant.")
        start = self._extents.reserve(whole_quanta(numel))
        if start is None:
            raise MemoryBudgetError(
                f"{numel} elements do not fit on this shelf: of {self.numel}, {self._extents.free} are free, in pieces. Release "
                "more of it first."
            )
        self._allocate(start, whole_quanta(numel))
        self.starts[unit], self._lengths[unit] = start, numel
        return start

    def release(self, unit: int) -> None:
        """Give a Unit's range back: its bytes are gone, and others may have it."""
        start, numel = self.starts.pop(unit), whole_quanta(self._lengths.pop(unit))
        self._extents.release(start, numel)
        self._free(start, numel)

    @abstractmethod
    def _allocate(self, start: int, numel: int) -> None:
        """Have memory behind a range again."""

    @abstractmethod
    def _free(self, start: int, numel: int) -> None:
        """Give the memory behind a range back, as far as the tier can."""

    @abstractmethod
    def fetch(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start filling device memory."""

    @abstractmethod
    def evict(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start writing from device memory, which must not change before the Ticket is waited for."""

    @contextlib.contextmanager
    def borrowed(self, unit: int, *, keeps_changes: bool, is_new: bool = False) -> Iterator[torch.Tensor]:
        """One Unit's vector in device memory for a while; if it is new it starts as zeros."""
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
    """In host memory, beside a device that has its own."""

    vector: torch.Tensor

    def __init__(self, kind: Kind, dtype: torch.dtype, lengths: Mapping[int, int], ledger: Ledger, mover: Mover) -> None:
        super().__init__(dtype, lengths, mover)
        num_bytes = self.numel * dtype.itemsize
        ledger.reserve(Tier.HOST, kind, num_bytes)
        self.vector = mover.host_memory(num_bytes)[:num_bytes].view(dtype)

    def _allocate(self, start: int, numel: int) -> None:
        """The vector keeps its memory."""

    def _free(self, start: int, numel: int) -> None:
        """The vector keeps its memory."""

    def fetch(self, memory: torch.Tensor, start: int) -> Ticket:
        """Copy up."""
        target = memory.view(self.dtype)
        return self._mover.copy_up(target, self.vector[start : start + target.numel()])

    def evict(self, memory: torch.Tensor, start: int) -> Ticket:
        """Copy down."""
        source = memory.view(self.dtype)
        return self._mover.copy_down(self.vector[start : start + source.numel()], source)


class DiskShelf(Shelf):
    """A range of the rank's file."""

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
        """The file system gets the blocks."""
        self._disk.punch(self._offset + start * self.dtype.itemsize, numel * self.dtype.itemsize)
        self._ledger.release(Tier.DISK, self._kind, numel * self.dtype.itemsize)

    def read(self, memory: torch.Tensor, start: int) -> Ticket:
        """Start filling aligned host memory."""
        return self._disk.read(memory, self._offset + start * self.dtype.itemsize)

    def read_peer(self, rank: int, unit: int, place: torch.Tensor) -> None:
        """Fill `place` with another rank's vector of a Unit, from that rank's file; returns when it is there."""
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
        """Start writing aligned host memory."""
        return self._disk.write(memory, self._offset + start * self.dtype.itemsize)

    def fetch(self, memory: torch.Tensor, start: int) -> Ticket:
        """Read, and copy up where device memory is not the host's."""
        if not self._mover.is_apart:
            return self.read(memory, start)
        target = memory.view(torch.uint8)
        buffer = self._mover.buffers.borrow(target.numel())
        copied = self._mover.copy_up(target, buffer.raw[: target.numel()], after=self.read(buffer.raw, start))
        return Returning(copied, lambda: self._mover.buffers.give_back(buffer))

    def evict(self, memory: torch.Tensor, start: int) -> Ticket:
        """Copy down where device memory is not the host's, and write."""
        if not self._mover.is_apart:
            return self.write(memory, start)
        source = memory.view(torch.uint8)
        buffer = self._mover.buffers.borrow(source.numel())
        writes: list[Ticket] = []
        copied = self._mover.copy_down(buffer.raw, source, then=lambda: writes.append(self.write(buffer.raw, start)))
        return Returning(Chain(copied, writes), lambda: self._mover.buffers.give_back(buffer))
