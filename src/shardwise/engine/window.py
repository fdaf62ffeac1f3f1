"""Gathers Units that are touched outside a forward pass; writes them back and frees them when others are touched.

Used while a model is constructed and while a state dict is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.partition import Unit

ROOM_BYTES = 32 << 20
"""Units stay gathered up to this many bytes in total. One operation may exceed it, if it needs more."""


class Window:
    """Keeps the Units gathered last, within `ROOM_BYTES`."""

    def __init__(self, gather: Callable[[Unit], None], release: Callable[[Unit], None]) -> None:
        self._gather = gather
        self._release = release
        self._open: list[Unit] = []

    def touch(self, units: Sequence[Unit]) -> None:
        """Gather all of `units` together, after writing back and freeing those gathered longest ago."""
        missing = [unit for unit in dict.fromkeys(units) if unit not in self._open]
        needed = sum(unit.full_bytes for unit in missing)
        while self._open and sum(u.full_bytes for u in self._open) + needed > ROOM_BYTES:
            oldest = next((unit for unit in self._open if unit not in units), None)
            if oldest is None:
                break  # one operation needs them all
            self._open.remove(oldest)
            self._release(oldest)
        for unit in missing:
            self._gather(unit)
            self._open.append(unit)

    def close(self) -> None:
        """Write back and free everything."""
        while self._open:
            self._release(self._open.pop(0))
