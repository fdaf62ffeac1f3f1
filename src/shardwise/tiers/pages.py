"""Moves the pages of a freed Unit to the next Unit that is gathered: new pages from the kernel would have to be cleared first.

A freed Unit's pages are parked at a separate address, and are moved to the address of the next Unit to be gathered (`mremap` with
MREMAP_DONTUNMAP, Linux 5.7). The addresses of tensors do not change. A freed Unit reads as zeros, as if its pages had been
returned to the kernel. Where the kernel refuses the move, pages are returned and allocated anew.
"""

from __future__ import annotations

import ctypes
import functools
import mmap

from shardwise.tiers.ledger import Kind, Ledger, Tier

HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MOVE_PAGES = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP


def whole_huge_pages(num_bytes: int) -> int:
    """`num_bytes` rounded down to whole huge pages."""
    return num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


class SparePages:
    """The pages of the Unit that was freed last, until the next one is gathered."""

    def __init__(self, capacity: int, ledger: Ledger) -> None:
        """At most `capacity` bytes of host memory are parked."""
        self._capacity = whole_huge_pages(capacity)
        self._ledger = ledger
        self._extents: list[int] = []  # lengths of the parked ranges in order; each has one origin
        self._map: mmap.mmap | None = None
        self._start = 0
        ledger.reclaim_with(self.drop)

    @property
    def num_bytes(self) -> int:
        """Bytes parked now."""
        return sum(self._extents)

    def lend(self, address: int, length: int) -> list[int]:
        """Move parked pages to an empty range of whole huge pages; return the lengths moved, from the start of the range on."""
        came: list[int] = []
        while self._extents and sum(came) < length:
            part = min(self._extents[-1], length - sum(came))
            if not move_pages(self._start + self.num_bytes - part, address + sum(came), part):
                self.drop()
                break
            self._extents[-1] -= part
            if not self._extents[-1]:
                self._extents.pop()
            came.append(part)
        self._ledger.release(Tier.HOST, Kind.BUFFER, sum(came))
        return came

    def park(self, address: int, extents: list[int]) -> int:
        """Park the pages of a range that is no longer used; return how many bytes were parked, from its start on."""
        self.drop()
        for extent in extents:
            at = self.num_bytes
            room = min(self._capacity - at, self._ledger.room(Tier.HOST))
            part = min(extent, whole_huge_pages(max(room, 0)))
            if not part or not self._has_place() or not move_pages(address + at, self._start + at, part):
                break
            self._extents.append(part)
            self._ledger.reserve(Tier.HOST, Kind.BUFFER, part)
            if part < extent:
                break
        return self.num_bytes

    def drop(self) -> None:
        """Return all parked pages to the kernel."""
        if self._extents:
            assert self._map is not None
            self._map.madvise(mmap.MADV_DONTNEED, self._start - _address_of(self._map), self.num_bytes)
            self._ledger.release(Tier.HOST, Kind.BUFFER, self.num_bytes)
            self._extents.clear()

    def _has_place(self) -> bool:
        """Reserve addresses on first use; return whether there are any."""
        if self._map is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            try:
                self._map = mmap.mmap(-1, self._capacity + HUGE_PAGE_BYTES, flags=flags)
            except OSError:
                self._capacity = 0
                return False
            address = _address_of(self._map)
            self._start = address + -address % HUGE_PAGE_BYTES
        return True


def move_pages(origin: int, target: int, length: int) -> bool:
    """Move the pages of an anonymous range to another address; both ranges stay mapped. Return whether it worked."""
    libc = _libc()
    if libc.mremap(origin, length, length, _MOVE_PAGES, target) == target:
        return True
    map_over(target, length)  # the kernel may have unmapped the target before it refused
    return False


def map_over(address: int, length: int, file: int = -1, start: int = 0) -> None:
    """Map a file, or empty memory, over part of an existing mapping: Python's mmap cannot map at a given address."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if file < 0 else 0)
    if _libc().mmap(address, length, protection, flags, file, start) != address:
        raise OSError(ctypes.get_errno(), "part of a mapping cannot be replaced")


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return libc
