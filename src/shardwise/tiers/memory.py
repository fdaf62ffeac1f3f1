"""The memory of a gathered Unit: one storage object for life, pages that really go away.

On CPU a buffer is a private anonymous mapping, aligned to huge pages and advised to use them; discarding it tells
the kernel to drop the pages (`docs/lab-log.md` has the figures against resizing a storage). On an accelerator
the storage is resized, which returns the block to torch's caching allocator. The accelerator path follows torch's
documentation and has not been run on a GPU.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod

import torch

from shardwise.errors import LifecycleError

HUGE_PAGE_BYTES = 2 << 20


class FullBuffer(ABC):
    """Memory for `numel` elements whose contents come and go while the storage object stays."""

    tensor: torch.Tensor

    @abstractmethod
    def claim(self) -> None:
        """Make the memory usable; its contents are undefined until written."""

    @abstractmethod
    def discard(self) -> None:
        """Give the memory back. The tensor must not be read until the next claim and write."""

    @abstractmethod
    def is_untouched(self) -> bool:
        """Whether nothing was written since the last discard, as far as the memory can tell."""

    @property
    def num_bytes(self) -> int:
        """Size when claimed."""
        return self.tensor.numel() * self.tensor.element_size()


class MappedBuffer(FullBuffer):
    """A private anonymous mapping; discarded pages read as zero, so nothing here can crash the interpreter."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        size = max(numel * dtype.itemsize, 1)
        # Room to start on a huge-page boundary: the kernel only backs aligned 2 MiB ranges with huge pages.
        self._map = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._start = -address % HUGE_PAGE_BYTES
        self._length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            # Whole huge pages only: a tail of small pages keeps resident bytes close to the size asked for.
            self._map.madvise(mmap.MADV_HUGEPAGE, self._start, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        if numel:
            self.tensor = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._start)
        else:
            self.tensor = torch.empty(0, dtype=dtype)

    def claim(self) -> None:
        """Pages appear as they are written."""

    def discard(self) -> None:
        """Drop the pages; private anonymous memory, so the next read sees zeros."""
        self._map.madvise(mmap.MADV_DONTNEED, self._start, self._length)

    def is_untouched(self) -> bool:
        """Discarded pages read as zero until someone writes."""
        step = HUGE_PAGE_BYTES // self.tensor.element_size()
        for number, part in enumerate(self.tensor.split(step)):
            was_written = bool(part.any())
            length = -(-part.numel() * part.element_size() // mmap.PAGESIZE) * mmap.PAGESIZE
            if was_written:
                return False
            # Looking may have given the range a page: hand it back before the next one is looked at.
            self._map.madvise(mmap.MADV_DONTNEED, self._start + number * HUGE_PAGE_BYTES, length)
        return True


class FixedBuffer(FullBuffer):
    """Memory that is there for life: the full vector of a Unit whose parameters are always whole."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def claim(self) -> None:
        """It is always usable."""

    def discard(self) -> None:
        """It never goes away."""
        raise LifecycleError("a full vector that is kept for life was discarded: a broken invariant.")

    def is_untouched(self) -> bool:
        """It is never discarded, so it never is."""
        return False


class ResizedBuffer(FullBuffer):
    """Accelerator memory through torch's caching allocator. Not run on a GPU yet."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._size = self.tensor.untyped_storage().nbytes()
        self.discard()

    def claim(self) -> None:
        """Take a block from the caching allocator, in stream order."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != self._size:
            storage.resize_(self._size)

    def discard(self) -> None:
        """Return the block to the caching allocator, in stream order."""
        self.tensor.untyped_storage().resize_(0)

    def is_untouched(self) -> bool:
        """A storage without bytes cannot be written."""
        return True


def make_full_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> FullBuffer:
    """The right kind of buffer for a device."""
    if device.type == "cpu":
        return MappedBuffer(numel, dtype)
    return ResizedBuffer(numel, dtype, device)
