"""Offset arithmetic by property, over ten thousand random layouts."""

from __future__ import annotations

import random

import torch
from torch import nn

from shardwise.partition import UnitSpec, find_units, make_layout, storage_stride
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
            assert piece.shard_start >= 0 and piece.shard_start + piece.numel <= layout.shard_numel
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


DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


def _random_model(rng: random.Random) -> nn.Module:
    """A container of blocks with parameters of random shapes and dtypes, some frozen, some tied within or across blocks."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(rng.randrange(1, 4)))
    made: list[nn.Parameter] = []
    for number in range(rng.randrange(1, 12)):
        owner = model if rng.random() < 0.2 else rng.choice(list(model.blocks))
        if made and rng.random() < 0.2:
            param = rng.choice(made)
        else:
            values = torch.empty(_random_shape(rng), dtype=rng.choice(DTYPES), device="meta")
            param = nn.Parameter(values, requires_grad=rng.random() < 0.8)
            made.append(param)
        owner.register_parameter(f"p{number}", param)
    return model


def _check_units(model: nn.Module, specs: list[UnitSpec]) -> None:
    placed = [id(info.param) for spec in specs for info in spec.infos]
    assert len(placed) == len(set(placed)), "a parameter is in two Units"
    assert set(placed) == {id(p) for p in model.parameters()}, "a parameter is in no Unit"
    names = [name for spec in specs for info in spec.infos for name in info.names]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False)), "a tied name was lost"
    for spec in specs:
        assert len({info.param.dtype for info in spec.infos}) == 1, "a Unit mixes dtypes"
        assert {info.param.requires_grad for info in spec.infos} == {spec.is_trainable}
        for info in spec.infos:  # every user of a tied parameter is inside the module its Unit is opened at
            assert all(name.startswith(spec.module_path) for name in info.names)


def test_ten_thousand_random_layouts() -> None:
    rng = random.Random(0)
    seen = {"models": 0, "ties": 0, "several dtypes": 0, "frozen": 0, "padding": 0, "large": 0, "a rank without a piece": 0}
    for number in range(10_000):
        world_size = 1 + number % 9
        model = _random_model(rng)
        specs = find_units(model, None, rng.choice((1 << 10, 1 << 16, 1 << 28)))
        _check_units(model, specs)
        seen["models"] += 1
        seen["ties"] += any(len(info.names) > 1 for spec in specs for info in spec.infos)
        seen["several dtypes"] += len({info.param.dtype for spec in specs for info in spec.infos}) > 1
        seen["frozen"] += any(not spec.is_trainable for spec in specs)
        for spec in specs:
            itemsize = spec.infos[0].param.dtype.itemsize
            params = [(i.name, tuple(i.param.shape), storage_stride(i.param.shape, i.param.stride())) for i in spec.infos]
            layout = make_layout(params, itemsize, world_size)
            _check(layout, itemsize, world_size)
            _check_cover(layout, rng)
            seen["padding"] += layout.numel > layout.param_numel
            seen["large"] += layout.shard_numel * itemsize >= LARGE_SHARD_BYTES
            seen["a rank without a piece"] += any(not layout.pieces(rank) for rank in range(world_size))
    assert seen["models"] == 10_000
    assert min(seen.values()) > 100, f"the random layouts miss a kind: {seen}"


def test_strides_that_fill_memory_are_kept_and_others_replaced() -> None:
    assert storage_stride((4, 3), (3, 1)) == (3, 1)
    assert storage_stride((4, 3), (1, 4)) == (1, 4)  # transposed
    assert storage_stride((2, 3, 4, 5), (60, 1, 15, 3)) == (60, 1, 15, 3)  # channels last
    assert storage_stride((4, 3), (6, 1)) == (3, 1)  # gaps
    assert storage_stride((4, 3), (0, 1)) == (3, 1)  # expanded
    assert storage_stride((), ()) == ()
    assert storage_stride((1, 5), (77, 1)) == (77, 1)
    assert storage_stride((0, 5), (5, 1)) == (5, 1)
