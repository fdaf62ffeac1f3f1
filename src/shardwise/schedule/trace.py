"""The moves of a step in their order, forward and backward."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Phase(enum.Enum):
    """The two passes of a step; each has its own order."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Move(NamedTuple):
    """Bytes that are brought to where they are used: what, from where, to where, how many."""

    what: int
    """A Unit's number."""
    source: str
    """'shards' if ranks hold them, else the tier that shards are fetched from first."""
    target: str
    num_bytes: int
    """What it takes where it arrives."""


class Trace:
    """What the last complete passes moved, and what the pass that runs now has moved so far."""

    def __init__(self) -> None:
        self._known: dict[Phase, tuple[Move, ...]] = {Phase.FORWARD: (), Phase.BACKWARD: ()}
        self._now: dict[Phase, list[Move]] = {Phase.FORWARD: [], Phase.BACKWARD: []}

    def begin(self, phase: Phase) -> None:
        """A pass begins."""
        self._now[phase] = []

    def add(self, phase: Phase, move: Move) -> None:
        """The pass needed a move."""
        self._now[phase].append(move)

    def end(self, phase: Phase) -> bool:
        """The pass is complete: it is what the next one is expected to do. Returns whether that is news."""
        found = tuple(self._now[phase])
        is_new = found != self._known[phase]
        self._known[phase] = found
        return is_new

    def order(self) -> tuple[tuple[Move, ...], int]:
        """A whole step's moves in order, and where its backward begins."""
        forward = self._known[Phase.FORWARD]
        return forward + self._known[Phase.BACKWARD], len(forward)
