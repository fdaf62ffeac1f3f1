"""The order in which Units were gathered, forward and backward."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The two passes of a step; each has its own order."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Trace:
    """What the last complete passes gathered, and what the pass that runs now has gathered so far."""

    def __init__(self) -> None:
        self._known: dict[Phase, tuple[int, ...]] = {Phase.FORWARD: (), Phase.BACKWARD: ()}
        self._now: dict[Phase, list[int]] = {Phase.FORWARD: [], Phase.BACKWARD: []}

    def begin(self, phase: Phase) -> None:
        """A pass begins."""
        self._now[phase] = []

    def add(self, phase: Phase, unit: int) -> None:
        """The pass gathered a Unit."""
        self._now[phase].append(unit)

    def end(self, phase: Phase) -> bool:
        """The pass is complete: it is what the next one is expected to do. Returns whether that is news."""
        found = tuple(self._now[phase])
        is_new = found != self._known[phase]
        self._known[phase] = found
        return is_new

    def order(self) -> tuple[tuple[int, ...], int]:
        """A whole step's Units in order, and where its backward begins."""
        forward = self._known[Phase.FORWARD]
        return forward + self._known[Phase.BACKWARD], len(forward)
