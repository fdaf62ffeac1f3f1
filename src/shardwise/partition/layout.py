"""All offset arithmetic of a Unit's flat vector. Pure: it uses no tensors and never communicates.

A flat vector is the concatenation of a Unit's parameters, each start aligned, padded at the end so that every rank's
shard is equally long and, when large, a whole number of direct-I/O blocks. Rank r owns slice r.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

ALIGN_BYTES = 64
"""Every parameter starts at a multiple of this, the size of a cache line."""
BLOCK_BYTES = 4096
"""Large shards are whole multiples of a direct-I/O block."""
ROW_ALIGN = 16
"""Tiles begin at multiples of this many rows, if that many fit into one: matrix products run in such blocks."""
LARGE_SHARD_BYTES = 16 * BLOCK_BYTES
"""Shards from this size on are padded to whole blocks, which adds less than a sixteenth."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Which part of a parameter these ranks train, if tensor parallelism has divided it: a box."""

    origin: tuple[int, ...]
    """Its first index along each dimension."""
    whole: tuple[int, ...]
    """The shape of the whole parameter."""
    stride: tuple[int, ...]
    """The strides that the whole parameter would be kept with."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """A range of one parameter: `numel` elements from `offset` of the flat vector, seen with `shape` and `stride`.

    The range begins at element `start` of the parameter, in its storage order. It is the whole parameter, or one tile of it.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    offset: int
    start: int = 0
    whole: tuple[int, ...] | None = None
    """The whole parameter's shape, if the range is a tile."""
    part: Part | None = None
    """Which part of a divided parameter this one is; None if these ranks train all of it."""
    is_copy: bool = False
    """Whether ranks with another part of the model have the same parameter and count it: it is in norms once."""

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.numel

    @property
    def is_empty(self) -> bool:
        """Whether the parameter has no elements; a part of it may have none though others do."""
        return not math.prod(self.shape if self.part is None else self.part.whole)

    @property
    def param_shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self.shape if self.whole is None else self.whole

    @property
    def whole_form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of the whole parameter, of which tensor parallelism may have given these ranks a part."""
        return (self.param_shape, self.stride) if self.part is None else (self.part.whole, self.part.stride)

    @property
    def label(self) -> str:
        """A name that no other Slot has: the parameter's, with the elements of a tile."""
        return self.name if self.whole is None else f"{self.name}[{self.start}:{self.start + self.numel}]"


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of one parameter inside one shard: where it starts in the parameter and in the shard."""

    slot_index: int
    param_start: int
    shard_start: int
    numel: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every element of a Unit is, for every rank."""

    slots: tuple[Slot, ...]
    shard_numel: int
    num_shards: int

    @property
    def numel(self) -> int:
        """Length of the flat vector, padding included."""
        return self.shard_numel * self.num_shards

    @property
    def param_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was computed from it: `table` cannot be sent to other ranks."""
        return Layout, (self.slots, self.shard_numel, self.num_shards)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The Pieces that `rank` owns, in order; parameters with no element in its shard have none."""
        start, stop = rank * self.shard_numel, (rank + 1) * self.shard_numel
        found = []
        for index, slot in enumerate(self.slots):
            low, high = max(slot.offset, start), min(slot.end, stop)
            if low < high:
                found.append(Piece(index, low - slot.offset, low - start, high - low))
        return tuple(found)

    def all_pieces(self) -> tuple[Piece, ...]:
        """The Pieces of the whole flat vector."""
        return tuple(Piece(index, 0, slot.offset, slot.numel) for index, slot in enumerate(self.slots) if slot.numel)

    def cover(self, start: int, stop: int) -> Iterator[tuple[int | None, int, int, int]]:
        """Split [start, stop) into runs: (slot index or None for padding, start in the slot, start in the range, numel)."""
        at = start
        index = self.slot_at(start)
        while at < stop:
            while index < len(self.slots) and self.slots[index].end <= at:
                index += 1
            if index == len(self.slots):
                yield None, 0, at - start, stop - at
                return
            slot = self.slots[index]
            if at < slot.offset:
                gap = min(slot.offset, stop) - at
                yield None, 0, at - start, gap
                at += gap
            else:
                run = min(slot.end, stop) - at
                yield index, at - slot.offset, at - start, run
                at += run

    def slot_at(self, element: int) -> int:
        """The slot that holds an element of the flat vector (padding belongs to the slot before it)."""
        return max(bisect.bisect_right(self._offsets, element) - 1, 0)

    @functools.cached_property
    def table(self) -> ctypes.Array[ctypes.c_int64]:
        """(offset, length) of every slot, for native code."""
        return (ctypes.c_int64 * (2 * len(self.slots)))(*(number for slot in self.slots for number in (slot.offset, slot.numel)))

    @functools.cached_property
    def _offsets(self) -> list[int]:
        return [slot.offset for slot in self.slots]


def make_layout(params: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], itemsize: int, num_shards: int) -> Layout:
    """Lay out (name, shape, stride) triples for a stored element size, divided among `num_shards` ranks."""
    align = ALIGN_BYTES // itemsize
    slots = []
    at = 0
    for name, shape, stride in params:
        numel = 1
        for extent in shape:
            numel *= extent
        slots.append(Slot(name, tuple(shape), tuple(stride), numel, at))
        at = _round_up(at + numel, align)
    shard = _round_up(-(-at // num_shards), align)
    if shard * itemsize >= LARGE_SHARD_BYTES:
        shard = _round_up(shard, BLOCK_BYTES // itemsize)
    return Layout(tuple(slots), shard, num_shards)


def make_tile_layout(name: str, shape: Sequence[int], rows: tuple[int, int], itemsize: int, num_shards: int) -> Layout:
    """Lay out one tile, the given rows of a row-major parameter, as a flat vector of its own."""
    tile = (rows[1] - rows[0], *shape[1:])
    layout = make_layout([(name, tile, row_major(tile))], itemsize, num_shards)
    slot = dataclasses.replace(layout.slots[0], start=rows[0] * math.prod(shape[1:]), whole=tuple(shape))
    return dataclasses.replace(layout, slots=(slot,))


def cut_rows(num_rows: int, row_bytes: int, max_bytes: int) -> list[tuple[int, int]]:
    """Cut rows into tiles of at most `max_bytes`, nearly equal; each begins at a multiple of ROW_ALIGN if that many fit.

    A row is never cut: `row_bytes` must not exceed `max_bytes`.
    """
    most = max_bytes // row_bytes
    if most >= ROW_ALIGN:
        most -= most % ROW_ALIGN
    num_tiles = -(-num_rows // most)
    rows = -(-num_rows // num_tiles)
    if most >= ROW_ALIGN:
        rows = _round_up(rows, ROW_ALIGN)
    return [(at, min(at + rows, num_rows)) for at in range(0, num_rows, rows)]


def storage_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides to keep: the given ones if they fill memory without gaps or overlap, else row-major ones."""
    expected = 1
    for extent, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if extent == 1:
            continue
        if extent == 0:
            break
        if step != expected:
            break
        expected *= extent
    else:
        return tuple(stride)
    return row_major(shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    dense: list[int] = []
    step = 1
    for extent in reversed(shape):
        dense.append(step)
        step *= max(extent, 1)
    return tuple(reversed(dense))


def dense_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides that fill memory, for elements of a shape in the order of other strides."""
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    dense = row_major([shape[dim] for dim in order])
    return tuple(dense[order.index(dim)] for dim in range(len(shape)))


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements with these strides lie in row-major order."""
    return same_order(shape, stride, row_major(shape))


def same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides put the elements of a shape in the same order."""
    return all(a == b for extent, a, b in zip(shape, one, other, strict=True) if extent > 1) or 0 in shape


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
