"""Offset arithmetic by property, over ten thousand random layouts."""

from __future__ import annotations

import random

from shardwise.partition import make_layout, storage_stride
from shardwise.partition.layout import ALIGN_BYTES, BLOCK_BYTES, LARGE_SHARD_BYTES, Layout


def _random_shape(rng: random.Random) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.08:
        return ()
    if kind < 0.13:
        return (rng.randrange(4), 0)
    if kind < 0.16:
        return (rng.randrange(20_000, 400_000),)
    return tuple(rng.randrange(1, 40) for _ in range(rng.randrange(1, 4)))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return storage_stride(shape, tuple(-1 for _ in shape))


def _check(layout: Layout, itemsize: int, world_size: int) -> None:
    ends = 0
    for slot in layout.slots:
        assert slot.offset >= ends, "parameters overlap"
        assert slot.offset * itemsize % ALIGN_BYTES == 0, "a parameter starts off its alignment"
        ends = slot.end
    assert layout.numel >= ends
    assert layout.numel == layout.shard_numel * world_size
    if layout.shard_numel * itemsize >= LARGE_SHARD_BYTES:
        assert layout.shard_numel * itemsize % BLOCK_BYTES == 0
    gaps = (len(layout.slots) + world_size) * ALIGN_BYTES // itemsize + world_size * BLOCK_BYTES // itemsize
    assert layout.numel - layout.param_numel <= gaps, "more padding than alignment explains"
    owned: dict[int, list[tuple[int, int]]] = {}
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            slot = layout.slots[piece.slot_index]
            assert rank * layout.shard_numel + piece.shard_start == slot.offset + piece.param_start
            assert 0 <= piece.shard_start and piece.shard_start + piece.numel <= layout.shard_numel
            owned.setdefault(piece.slot_index, []).append((piece.param_start, piece.numel))
    for index, slot in enumerate(layout.slots):  # every element is owned exactly once, in rank order
        at = 0
        for start, numel in owned.get(index, []):
            assert start == at
            at += numel
        assert at == slot.numel


def _check_cover(layout: Layout, rng: random.Random) -> None:
    if layout.numel == 0:
        return
    start = rng.randrange(layout.numel)
    stop = rng.randrange(start + 1, layout.numel + 1)
    at = 0
    for index, slot_start, run_start, numel in layout.cover(start, stop):
        assert run_start == at and numel > 0
        if index is not None:
            slot = layout.slots[index]
            assert slot.offset + slot_start == start + run_start
            assert slot_start + numel <= slot.numel
        at += numel
    assert at == stop - start


def test_ten_thousand_random_layouts() -> None:
    rng = random.Random(0)
    sizes = {"checked": 0, "with padding": 0, "large": 0, "rank without a piece": 0}
    for number in range(10_000):
        world_size = 1 + number % 9
        itemsize = rng.choice((2, 4, 8))
        shapes = [_random_shape(rng) for _ in range(rng.randrange(1, 12))]
        params = [(f"p{i}", shape, _row_major(shape)) for i, shape in enumerate(shapes)]
        layout = make_layout(params, itemsize, world_size)
        _check(layout, itemsize, world_size)
        _check_cover(layout, rng)
        sizes["checked"] += 1
        sizes["with padding"] += layout.numel > layout.param_numel
        sizes["large"] += layout.shard_numel * itemsize >= LARGE_SHARD_BYTES
        sizes["rank without a piece"] += any(not layout.pieces(rank) for rank in range(world_size))
    assert sizes["checked"] == 10_000
    assert min(sizes.values()) > 100, f"the random layouts miss a kind: {sizes}"


def test_strides_that_fill_memory_are_kept_and_others_replaced() -> None:
    assert storage_stride((4, 3), (3, 1)) == (3, 1)
    assert storage_stride((4, 3), (1, 4)) == (1, 4)  # transposed
    assert storage_stride((2, 3, 4, 5), (60, 1, 15, 3)) == (60, 1, 15, 3)  # channels last
    assert storage_stride((4, 3), (6, 1)) == (3, 1)  # gaps
    assert storage_stride((4, 3), (0, 1)) == (3, 1)  # expanded
    assert storage_stride((), ()) == ()
    assert storage_stride((1, 5), (77, 1)) == (77, 1)
    assert storage_stride((0, 5), (5, 1)) == (5, 1)
