"""The memory of a gathered Unit: one storage object for life, pages that really go away.

On CPU a buffer is a private anonymous mapping, aligned to huge pages and advised to use them; discarding it tells
the kernel to drop the pages (`docs/lab-log.md` has the figures against resizing a storage). On an accelerator
the storage is resized, which returns the block to torch's caching allocator. The accelerator path follows torch's
documentation and has not been run on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from shardwise.errors import LifecycleError
from shardwise.tiers.pages import HUGE_PAGE_BYTES, SparePages, map_over, whole_huge_pages


class FullBuffer(ABC):
    """Memory for `numel` elements whose contents come and go while the storage object stays."""

    tensor: torch.Tensor

    @abstractmethod
    def claim(self) -> None:
        """Make the memory usable; its contents are undefined until written."""

    @abstractmethod
    def discard(self, *, is_quiet: bool = True) -> None:
        """Give the memory back. The tensor must not be read until the next claim and write.

        Not quiet: something that failed may still be writing to it.
        """

    @abstractmethod
    def is_untouched(self) -> bool:
        """Whether nothing was written since the last discard, as far as the memory can tell."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes when claimed."""
        return self.tensor.numel() * self.tensor.element_size()


class MappedBuffer(FullBuffer):
    """A private anonymous mapping; discarded pages read as zero, so nothing here can crash the interpreter."""

    def __init__(self, numel: int, dtype: torch.dtype, spare: SparePages | None = None) -> None:
        size = max(numel * dtype.itemsize, 1)
        # Room to start on a huge-page boundary: the kernel only backs aligned 2 MiB ranges with huge pages.
        self._map = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._start = -address % HUGE_PAGE_BYTES
        self._length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            # Whole huge pages only: a tail of small pages keeps resident bytes close to the size asked for.
            self._map.madvise(mmap.MADV_HUGEPAGE, self._start, whole_huge_pages(size))
        if numel:
            self.tensor = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._start)
        else:
            self.tensor = torch.empty(0, dtype=dtype)
        self._spare = spare if size >= HUGE_PAGE_BYTES else None
        self._extents: list[int] | None = None  # lengths of the whole huge pages, by where they came from, while claimed

    def claim(self) -> None:
        """Spare pages are moved here; what they do not fill appears as it is written."""
        if self._spare is not None and self._extents is None:
            whole = whole_huge_pages(self._length)
            came = self._spare.lend(self.tensor.data_ptr(), whole)
            moved = sum(came)
            self._extents = came
            if moved < whole:
                # What is left of earlier moves may be several mappings, which older kernels do not move as one.
                map_over(self.tensor.data_ptr() + moved, whole - moved)
                self._map.madvise(mmap.MADV_HUGEPAGE, self._start + moved, whole - moved)
                self._extents = [*came, whole - moved]

    def discard(self, *, is_quiet: bool = True) -> None:
        """Leave the pages to the next buffer or drop them; private anonymous memory, so the next read sees zeros."""
        kept = 0
        if self._spare is not None and self._extents is not None:
            if is_quiet:
                kept = self._spare.park(self.tensor.data_ptr(), self._extents)
            self._extents = None
        self._map.madvise(mmap.MADV_DONTNEED, self._start + kept, self._length - kept)

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


class OverlaidBuffer(FullBuffer):
    """Ranges of shared files seen as one vector: reading it reads the shards where they lie, and nothing is copied.

    The mapping is private: a page that is written to becomes this process's own, so a write never reaches the shards by itself,
    and discarding drops it. Pages that were not written always show the files' present contents (Linux).
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], length: int, dtype: torch.dtype) -> None:
        """`ranges` are (file, start in bytes), `length` bytes each, all multiples of a page."""
        self._length = len(ranges) * length
        self._map = mmap.mmap(-1, self._length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._map, dtype=dtype)
        self._address = self.tensor.data_ptr()
        for number, (file, start) in enumerate(ranges):
            map_over(self._address + number * length, length, file, start)

    @property
    def num_bytes(self) -> int:
        """None of its own."""
        return 0

    def claim(self) -> None:
        """It always shows the shards."""

    def discard(self, *, is_quiet: bool = True) -> None:
        """Drop pages that were written; there rarely are any, and looking costs a tenth of finding all pages again."""
        if not self.is_untouched():
            self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def can_tell(self) -> bool:
        """Whether the kernel says which pages are this process's own."""
        return _pagemap(os.getpid()) is not None

    def is_untouched(self) -> bool:
        """Whether no page is this process's own; unknown counts as written."""
        num_pages = self._length // mmap.PAGESIZE
        file = _pagemap(os.getpid())
        if file is None:
            return False
        try:
            entries = os.pread(file, 8 * num_pages, self._address // mmap.PAGESIZE * 8)
        except OSError:
            return False
        tops = entries[7::8]
        return len(tops) == num_pages and not tops.translate(None, _NOT_OWN)


# The top byte of a page's entry in /proc/self/pagemap (the kernel's admin guide): 0x80 in memory, 0x40 swapped out, 0x20 the
# page of a file. A page is this process's own if it is somewhere and not a file's.
_NOT_OWN = bytes(top for top in range(256) if not top & 0xC0 or top & 0x20)


@functools.lru_cache(maxsize=1)  # a forked child asks about its own pages
def _pagemap(pid: int) -> int | None:
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


class FixedBuffer(FullBuffer):
    """Memory that is there for life: the full vector of a Unit whose parameters are always whole."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def claim(self) -> None:
        """It is always usable."""

    def discard(self, *, is_quiet: bool = True) -> None:
        """It never goes away."""
        raise LifecycleError("a full vector that is kept for life was discarded: a broken invariant.")

    def is_untouched(self) -> bool:
        """Always False: a fixed buffer is never discarded."""
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

    def discard(self, *, is_quiet: bool = True) -> None:
        """Return the block to the caching allocator, in stream order."""
        self.tensor.untyped_storage().resize_(0)

    def is_untouched(self) -> bool:
        """A storage without bytes cannot be written."""
        return True


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory behind a storage object of its own, so that saving or sharing the tensor takes no more than itself.

    On CPU only; elsewhere the view itself.
    """
    num_bytes = view.numel() * view.element_size()
    if view.device.type != "cpu" or num_bytes == 0:
        return view
    memory = (ctypes.c_char * num_bytes).from_address(view.data_ptr())
    memory.owner = view  # type: ignore[attr-defined]  # torch keeps `memory`, and that keeps the view's own storage
    return torch.frombuffer(memory, dtype=view.dtype).as_strided(view.shape, view.stride())


def make_full_buffer(numel: int, dtype: torch.dtype, device: torch.device, spare: SparePages | None = None) -> FullBuffer:
    """The right kind of buffer for a device."""
    if device.type == "cpu":
        return MappedBuffer(numel, dtype, spare)
    return ResizedBuffer(numel, dtype, device)
