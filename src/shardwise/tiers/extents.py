"""Which ranges of a linear space are free? Pure arithmetic, used by `DiskFile` and `Shelf`."""

from __future__ import annotations

import bisect

from shardwise.errors import LifecycleError


class Extents:
    """Sorted free ranges; adjacent ones are merged. `reserve` uses the first that is long enough."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (start, length)

    @property
    def free(self) -> int:
        """Total length of all free ranges."""
        return sum(length for _, length in self._free)

    def reserve(self, length: int) -> int | None:
        """Reserve a range and return its start; None if no free range is long enough."""
        for position, (start, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[position]
                else:
                    self._free[position] = (start + length, free - length)
                return start
        return None

    def release(self, start: int, length: int) -> None:
        """Make a range free again and merge it with adjacent free ranges."""
        if not length:
            return
        at = bisect.bisect_left(self._free, (start, 0))
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        if (before is not None and before[0] + before[1] > start) or (after is not None and start + length > after[0]):
            raise LifecycleError(f"{length} elements from {start} on were released twice: a broken invariant.")
        if after is not None and start + length == after[0]:
            length += after[1]
            del self._free[at]
        if before is not None and before[0] + before[1] == start:
            self._free[at - 1] = (before[0], before[1] + length)
        else:
            self._free.insert(at, (start, length))
