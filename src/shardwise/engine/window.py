"""A few Units gathered on touch, written back and freed when others are touched: for code that is not a forward pass.

Used while a model is constructed and while a state dict is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.partition import Unit


class Window:
    """Keeps the most recently touched Units gathered, at most `max_units` of them."""

    def __init__(
        self, gather: Callable[[Unit], None], release: Callable[[Unit], None], max_units: int = 1
    ) -> None:
        self._gather = gather
        self._release = release
        self._max_units = max_units
        self._open: list[Unit] = []

    def touch(self, unit: Unit) -> None:
        """Gather `unit`, after writing back and freeing the ones touched longest ago."""
        while len(self._open) >= self._max_units:
            self._release(self._open.pop(0))
        self._gather(unit)
        self._open.append(unit)

    def close(self) -> None:
        """Write back and free everything."""
        while self._open:
            self._release(self._open.pop(0))
