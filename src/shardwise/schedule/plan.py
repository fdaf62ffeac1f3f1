"""How far ahead may each move start? Turns a trace, a byte budget and a depth into a Plan. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardwise.schedule.trace import Move


@dataclasses.dataclass(frozen=True)
class Plan:
    """The moves of a step in order, and how far ahead each may be started."""

    order: tuple[Move, ...]
    backward_at: int
    """Where in `order` the backward begins."""
    reach: tuple[int, ...]
    """While move i - 1 is in use (i = 0: before the first), moves before position `reach[i]` may be started."""


def make_plan(order: Sequence[Move], backward_at: int, budget_bytes: int, depth: int) -> Plan:
    """Allow at most `depth` moves ahead of the one in use, and at most `budget_bytes` for all of them together.

    A move that alone exceeds the budget is not started early, and no later move starts before it.
    """
    reach = []
    for position in range(len(order) + 1):
        stop, ahead_bytes = position, 0
        while stop < len(order) and stop - position < depth:
            ahead_bytes += order[stop].num_bytes
            if ahead_bytes > budget_bytes:
                break
            stop += 1
        reach.append(stop)
    return Plan(tuple(order), backward_at, tuple(reach))
