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


def make_plan(order: Sequence[Move], backward_at: int, budget_bytes: int, depth: int, batch_bytes: int = 0) -> Plan:
    """Allow at most `depth` moves ahead of the one in use, and at most `budget_bytes` for all of them together.

    A move that alone exceeds the budget is not started early, and no later move starts before it. Neighbours that together have
    at most `batch_bytes` bytes are a batch: they count as one move, and may start as soon as any of them may.
    """
    ends = _batch_ends(order, backward_at, batch_bytes)
    reach = []
    for position in range(len(order) + 1):
        stop, ahead_bytes = position, 0
        for _ in range(depth):
            end = ends[stop] if stop < len(order) else stop
            while stop < end and ahead_bytes + order[stop].num_bytes <= budget_bytes:
                ahead_bytes += order[stop].num_bytes
                stop += 1
            if stop < end:
                break
        reach.append(stop)
    return Plan(tuple(order), backward_at, tuple(reach))


def _batch_ends(order: Sequence[Move], backward_at: int, batch_bytes: int) -> list[int]:
    """For every move, the position behind its batch. A batch does not cross the begin of the backward."""
    ends: list[int] = []
    while len(ends) < len(order):
        first = len(ends)
        last = backward_at if first < backward_at else len(order)
        end, num_bytes = first + 1, order[first].num_bytes
        while end < last and num_bytes + order[end].num_bytes <= batch_bytes:
            num_bytes += order[end].num_bytes
            end += 1
        ends += [end] * (end - first)
    return ends
