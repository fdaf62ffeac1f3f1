"""Ranges of a space that grows in slabs and is used again and again: for things that come and go within a step.

When nothing is left in it, several slabs become one that is as long as the most that was ever in use. So after a step or two a
loop whose sizes repeat has one slab, and allocates nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from shardwise.tiers.disk import aligned
from shardwise.tiers.extents import Extents

LEAST_BYTES = 1 << 22
"""A slab is at least this long, unless the space has a budget."""
_T = TypeVar("_T")


class Room(NamedTuple, Generic[_T]):
    """A reserved range: `num_bytes` from `start` on of a slab."""

    slab: _T
    start: int
    num_bytes: int


class Arena(Generic[_T]):
    """Reserves ranges of whole blocks. Safe for several threads."""

    def __init__(self, grow: Callable[[int], _T], shrink: Callable[[_T, int], None], least_bytes: int = LEAST_BYTES) -> None:
        """`grow(num_bytes)` makes a slab of at least `least_bytes`; `shrink(slab, num_bytes)` gives one back."""
        self._grow, self._shrink, self._least_bytes = grow, shrink, least_bytes
        self._slabs: list[tuple[_T, int, Extents]] = []
        self._used = self._peak = 0
        self._lock = threading.RLock()  # reentrant: a range may be released by the garbage collector at any moment

    @property
    def num_bytes(self) -> int:
        """Length of all slabs."""
        return sum(length for _, length, _ in self._slabs)

    def reserve(self, num_bytes: int) -> Room[_T]:
        """Reserve a range, in a new slab if none has room."""
        length = aligned(num_bytes)
        with self._lock:
            if not self._used and (len(self._slabs) > 1 or self.num_bytes < self._peak):
                self._become_one()
            found = self._find(length)
            if found is None:
                self._add(max(length, self._least_bytes))
                found = self._find(length)
            assert found is not None
            self._used += length
            self._peak = max(self._peak, self._used)
            return Room(*found, num_bytes)

    def _find(self, length: int) -> tuple[_T, int] | None:
        for slab, _, extents in self._slabs:
            start = extents.reserve(length)
            if start is not None:
                return slab, start
        return None

    def release(self, room: Room[_T]) -> None:
        """Give a range back."""
        with self._lock:
            extents = next(extents for slab, _, extents in self._slabs if slab is room.slab)
            extents.release(room.start, aligned(room.num_bytes))
            self._used -= aligned(room.num_bytes)

    def drop_idle(self) -> None:
        """Give all slabs back if nothing is in them."""
        with self._lock:
            if not self._used:
                self._give_back()

    def close(self) -> None:
        """Forget all slabs, and what is still reserved in them."""
        with self._lock:
            self._slabs.clear()

    def _add(self, num_bytes: int) -> None:
        slab = self._grow(num_bytes)
        extents = Extents()
        extents.release(0, num_bytes)
        self._slabs.append((slab, num_bytes, extents))

    def _give_back(self) -> None:
        while self._slabs:
            slab, length, _ = self._slabs.pop()
            self._shrink(slab, length)

    def _become_one(self) -> None:
        self._give_back()
        self._add(max(self._peak, self._least_bytes))
