"""Where do the states of a set of Units live, and how are they split into portions for streaming?

A Region is a set of Units whose vectors have the same dtypes. Each kind of their states is either in memory, Unit by Unit, or on
a Shelf. Element numbers are the same in all of a Region's shelves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from shardwise.partition import Blueprint, Unit, UpdatePiece
from shardwise.tiers import QUANTUM, Shelf, whole_quanta


def was_zeroed(placeholder: torch.Tensor) -> bool:
    """Whether the placeholder of an offloaded gradient was written to. Only `zero_grad(set_to_none=False)` does that."""
    return placeholder._version > 0


@dataclasses.dataclass
class Region:
    """Units of the same dtypes, and the shelves of their offloaded states."""

    blueprints: Sequence[Blueprint]
    param: Shelf | None = None
    """Stored parameters. They are also the masters, if there are no separate ones."""
    master: Shelf | None = None
    grad: Shelf | None = None
    moments: dict[str, Shelf] = dataclasses.field(default_factory=dict)
    """Optimizer states that are as long as their piece, by name."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of masters, gradients and moments."""
        return self.blueprints[0].dtypes.master

    @property
    def has_own_masters(self) -> bool:
        """Whether masters are separate from the stored parameters."""
        return self.blueprints[0].has_own_master

    @property
    def master_shelf(self) -> Shelf | None:
        """Where masters are read from and written to."""
        return self.master if self.has_own_masters else self.param

    @property
    def lengths(self) -> dict[int, int]:
        """Number of elements of each Unit that this rank updates."""
        return {unit.index: unit.span.numel for unit in self.blueprints}


@dataclasses.dataclass(frozen=True)
class Run:
    """Elements [low, high) of one Unit's span; in the portion they start at element `at`."""

    unit: Unit
    low: int
    high: int
    at: int

    def parts(self) -> Iterator[tuple[int, UpdatePiece, int, int]]:
        """(number of the piece, the piece, low, high) for every piece with elements in this run: [low, high) of the span."""
        for number, update in enumerate(self.unit.pieces):
            start = update.bounds.shard_start
            low, high = max(start, self.low), min(start + update.bounds.numel, self.high)
            if low < high:
                yield number, update, low, high


@dataclasses.dataclass(frozen=True)
class Portion:
    """A range of a Region's elements that is fetched, updated and evicted at once."""

    start: int
    numel: int
    runs: tuple[Run, ...]


def cut(units: Sequence[Unit], most_numel: int) -> list[Portion]:
    """Split Units, in order, into portions of at most `most_numel` elements (whole quanta). Small Units share a portion."""
    limit = max(most_numel // QUANTUM, 1) * QUANTUM
    found: list[Portion] = []
    runs: list[Run] = []
    start = filled = 0

    def close() -> None:
        nonlocal runs, start, filled
        if runs:
            found.append(Portion(start, filled, tuple(runs)))
        runs, start, filled = [], start + filled, 0

    for unit in units:
        length = unit.span.numel
        if filled and filled + whole_quanta(length) > limit:
            close()
        for low in range(0, length, limit):
            high = min(low + limit, length)
            runs.append(Run(unit, low, high, filled))
            filled += whole_quanta(high - low)
            if filled >= limit:
                close()
    close()
    return found
