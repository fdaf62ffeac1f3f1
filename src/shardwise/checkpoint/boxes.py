"""Parts of parameters that tensor parallelism has divided, as boxes in storage order. Pure arithmetic.

A box is described along the dimensions in the order in which they lie in memory, outermost first. "Rows" are its slices along the
outermost one: the rows of a box lie one after the other in every vector that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.partition import Slot, is_row_major


class Overlap(NamedTuple):
    """What one box has of some rows of another."""

    start: int
    """Its first element, in the box that has it."""
    shape: tuple[int, ...]
    """Whole rows of the box that has it."""
    source: tuple[slice, ...]
    """The part of these rows that is wanted."""
    target: tuple[slice, ...]
    """Where that belongs in the rows that are asked for."""

    @property
    def numel(self) -> int:
        """Elements of the whole rows."""
        return math.prod(self.shape)


class Box(NamedTuple):
    """A box of a parameter, along its dimensions in storage order."""

    origin: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @staticmethod
    def of(slot: Slot) -> Box | None:
        """What this rank's Slot is of the whole parameter; None if tensor parallelism has not divided it."""
        if slot.part is None:
            return None
        return Box.along(slot.part.stride, slot.part.origin, slot.shape, slot.part.whole)

    @staticmethod
    def along(stride: Sequence[int], origin: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> Box:
        """A box given along the parameter's own dimensions, which lie in memory with `stride`."""
        order = sorted(range(len(whole)), key=lambda dim: (-stride[dim], dim))
        return Box(*(tuple(values[dim] for dim in order) for values in (origin, shape, whole)))

    @property
    def row_numel(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)

    @property
    def first(self) -> int | None:
        """The number of its first element in the whole parameter, if its elements lie together there; else None."""
        if self.shape[1:] != self.whole[1:]:
            return None
        return self.origin[0] * self.row_numel if self.origin else 0

    def rows_with(self, start: int, numel: int) -> tuple[int, int]:
        """The rows in which elements [start, start + numel) lie."""
        return start // max(self.row_numel, 1), -(-(start + numel) // max(self.row_numel, 1))

    def overlap(self, low: int, high: int, other: Box) -> Overlap | None:
        """What `other` has of the rows [low, high) of this box."""
        begin, end = self.origin[0] + low, self.origin[0] + high
        lows = [max(begin, other.origin[0]), *map(max, zip(self.origin[1:], other.origin[1:], strict=True))]
        highs = [min(end, other.origin[0] + other.shape[0])]
        highs += [
            min(a + n, b + m)
            for a, n, b, m in zip(self.origin[1:], self.shape[1:], other.origin[1:], other.shape[1:], strict=True)
        ]
        if any(a >= b for a, b in zip(lows, highs, strict=True)):
            return None
        return Overlap(
            (lows[0] - other.origin[0]) * other.row_numel,
            (highs[0] - lows[0], *other.shape[1:]),
            (slice(None), *(slice(a - o, b - o) for a, b, o in zip(lows[1:], highs[1:], other.origin[1:], strict=True))),
            (
                slice(lows[0] - begin, highs[0] - begin),
                *(slice(a - o, b - o) for a, b, o in zip(lows[1:], highs[1:], self.origin[1:], strict=True)),
            ),
        )


def whole_box(whole: Sequence[int], stride: Sequence[int]) -> Box:
    """The box that is a whole parameter."""
    return Box.along(stride, (0,) * len(whole), whole, whole)


def linear_start(slot: Slot) -> int | None:
    """The number of a Slot's first element in the row-major whole parameter, if its elements lie together there; else None."""
    if slot.part is None:
        return slot.start if is_row_major(slot.shape, slot.stride) else None
    box = Box.of(slot)
    return None if box is None or not is_row_major(slot.part.whole, slot.part.stride) else box.first
