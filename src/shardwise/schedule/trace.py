"""In which order did the last forward and backward need their moves?"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Phase(enum.Enum):
    """The two passes of a step; each has its own order."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Move(NamedTuple):
    """Bytes moved to where they are used: what, from where, to where, how many."""

    what: int
    """Index of a Unit."""
    source: str
    """'shards' if the ranks' shards are on the device, else the tier that they are fetched from first."""
    target: str
    num_bytes: int
    """Bytes that it needs at its target."""


class Trace:
    """The moves of the last complete forward and backward, and those of the current pass so far."""

    def __init__(self) -> None:
        self._known: dict[Phase, tuple[Move, ...]] = {Phase.FORWARD: (), Phase.BACKWARD: ()}
        self._now: dict[Phase, list[Move]] = {Phase.FORWARD: [], Phase.BACKWARD: []}

    def begin(self, phase: Phase) -> None:
        """Start recording a pass."""
        self._now[phase] = []

    def add(self, phase: Phase, move: Move) -> None:
        """Record a move that the pass needed."""
        self._now[phase].append(move)

    def end(self, phase: Phase) -> bool:
        """The pass is complete, and the next one is expected to do the same. Return whether its moves are new."""
        found = tuple(self._now[phase])
        is_new = found != self._known[phase]
        self._known[phase] = found
        return is_new

    def order(self) -> tuple[tuple[Move, ...], int]:
        """The moves of a whole step in order, and the position where its backward begins."""
        forward = self._known[Phase.FORWARD]
        return forward + self._known[Phase.BACKWARD], len(forward)
