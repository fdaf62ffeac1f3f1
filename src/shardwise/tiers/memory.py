"""The memory of a gathered Unit: the storage object stays for life, its pages are returned when the Unit is freed.

On CPU a buffer is a private anonymous mapping, aligned to huge pages and advised to use them; discarding it tells
the kernel to drop the pages (`docs/lab-log.md` compares this with resizing a storage). On an accelerator
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
    """Memory of a full vector, which is claimed and discarded while the storage object stays the same."""

    tensor: torch.Tensor

    @abstractmethod
    def claim(self) -> None:
        """Make the memory usable; its contents are undefined until written."""

    @abstractmethod
    def discard(self, *, is_quiet: bool = True) -> None:
        """Return the memory. The tensor must not be read until the next claim and write.

        `is_quiet=False`: an operation that failed may still be writing to the memory, so it must not be reused.
        """

    @abstractmethod
    def is_untouched(self) -> bool:
        """Whether nothing was written since the last discard, as far as this buffer can tell."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it uses while claimed."""
        return self.tensor.numel() * self.tensor.element_size()


class MappedBuffer(FullBuffer):
    """A private anonymous mapping. Discarded pages read as zeros, so reading them cannot crash the process."""

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
        self._extents: list[int] | None = None  # while claimed: lengths of its ranges of huge pages, one per origin

    def claim(self) -> None:
        """Move spare pages here; the kernel allocates the remaining pages when they are written."""
        if self._spare is not None and self._extents is None:
            whole = whole_huge_pages(self._length)
            came = self._spare.lend(self.tensor.data_ptr(), whole)
            moved = sum(came)
            self._extents = came
            if moved < whole:
                # Earlier moves may have left several mappings here, which older kernels cannot move in one call.
                map_over(self.tensor.data_ptr() + moved, whole - moved)
                self._map.madvise(mmap.MADV_HUGEPAGE, self._start + moved, whole - moved)
                self._extents = [*came, whole - moved]

    def discard(self, *, is_quiet: bool = True) -> None:
        """Park the pages for the next buffer, or return them to the kernel. The next read sees zeros either way."""
        kept = 0
        if self._spare is not None and self._extents is not None:
            if is_quiet:
                kept = self._spare.park(self.tensor.data_ptr(), self._extents)
            self._extents = None
        self._map.madvise(mmap.MADV_DONTNEED, self._start + kept, self._length - kept)

    def is_untouched(self) -> bool:
        """Discarded pages read as zeros until they are written."""
        step = HUGE_PAGE_BYTES // self.tensor.element_size()
        for number, part in enumerate(self.tensor.split(step)):
            was_written = bool(part.any())
            length = -(-part.numel() * part.element_size() // mmap.PAGESIZE) * mmap.PAGESIZE
            if was_written:
                return False
            # Reading may have allocated a page: return it before the next range is read.
            self._map.madvise(mmap.MADV_DONTNEED, self._start + number * HUGE_PAGE_BYTES, length)
        return True


class OverlaidBuffer(FullBuffer):
    """Ranges of shared files, mapped one after the other as one vector: reading it reads the shards, and nothing is copied.

    The mapping is private (copy-on-write): a page that is written becomes this process's own copy, so a write does not reach the
    shards, and `discard` drops the copy. Pages that were not written always show the current contents of the files (Linux).
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], length: int, dtype: torch.dtype, numel: int) -> None:
        """`ranges` are (file, start in bytes), `length` bytes each, all multiples of a page; the vector has `numel` elements."""
        self._length = len(ranges) * length
        self._map = mmap.mmap(-1, self._length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=numel)
        self._address = self.tensor.data_ptr()
        for number, (file, start) in enumerate(ranges):
            map_over(self._address + number * length, length, file, start)

    @property
    def num_bytes(self) -> int:
        """Zero: the memory belongs to the shards."""
        return 0

    def claim(self) -> None:
        """Nothing to do: the mapping always shows the shards."""

    def discard(self, *, is_quiet: bool = True) -> None:
        """Drop pages that were written. There rarely are any, and checking costs a tenth of faulting in all pages again."""
        if not self.is_untouched():
            self._map.madvise(mmap.MADV_DONTNEED)

    def is_untouched(self) -> bool:
        """Whether no page was written. If the kernel does not tell, pages count as written."""
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
# page of a file. A page is this process's own copy if it is in memory or swapped out, and not a page of a file.
_NOT_OWN = bytes(top for top in range(256) if not top & 0xC0 or top & 0x20)


@functools.lru_cache(maxsize=1)  # by process: a forked child must open its own file
def _pagemap(pid: int) -> int | None:
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def can_tell_own_pages() -> bool:
    """Whether the kernel tells which pages are this process's own copies: if not, writes to an overlay go unnoticed."""
    return _pagemap(os.getpid()) is not None


class FixedBuffer(FullBuffer):
    """Memory that is never discarded: the full vector of a Unit whose parameters are always full."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def claim(self) -> None:
        """Nothing to do: the memory is always usable."""

    def discard(self, *, is_quiet: bool = True) -> None:
        """Always raises: a fixed buffer is never discarded."""
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
        """Always True: a storage without bytes cannot be written."""
        return True


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the same memory with its own storage object, so that saving or sharing the view does not include its base.

    On CPU only; on other devices the view itself is returned.
    """
    num_bytes = view.numel() * view.element_size()
    if view.device.type != "cpu" or num_bytes == 0:
        return view
    memory = (ctypes.c_char * num_bytes).from_address(view.data_ptr())
    memory.owner = view  # type: ignore[attr-defined]  # torch keeps `memory` alive, which keeps the view's storage alive
    return torch.frombuffer(memory, dtype=view.dtype).as_strided(view.shape, view.stride())


def make_full_buffer(numel: int, dtype: torch.dtype, device: torch.device, spare: SparePages | None = None) -> FullBuffer:
    """Make the kind of buffer that suits a device."""
    if device.type == "cpu":
        return MappedBuffer(numel, dtype, spare)
    return ResizedBuffer(numel, dtype, device)
