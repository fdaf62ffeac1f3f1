"""Gives an optimizer's states in the form that plain torch loads: whole, by the parameters' numbers in the user's groups.

The reverse of `moving_in.py`. Long states are gathered Unit by Unit, so that only the rank that keeps them ever holds them all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.engine.survivors import LONG, MASTER, VALUE, Survivors
from shardwise.partition import Piece, Unit, full_of

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime

Kinds = dict[int, dict[str, torch.dtype]]
"""Dtypes of long states, by Unit and name."""
States = dict[tuple[int, int], dict[str, Any]]
"""The states of a parameter, by Unit and slot."""


class _Alike(NamedTuple):
    """A long state that was never updated: one element stands for all."""

    element: torch.Tensor


def plain_state_dict(runtime: Runtime, survivors: Survivors, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What `optimizer.state_dict()` of an optimizer that was never sharded would be, on the CPU of rank 0; empty on other ranks.

    All ranks must call.
    """
    runtime.changes.store_written()  # here ranks meet under a limit of time
    adopted = runtime.adoption.adopted
    assert adopted is not None
    places = adopted.places(optimizer)
    kinds, states = _tell(runtime, survivors)
    is_first = runtime.world.is_first
    for unit in runtime.units:
        for kind, dtype in kinds.get(unit.index, {}).items():
            full = survivors.full_state(unit, kind, dtype)
            for slot in _slots_with(unit, kind, states):
                if is_first or unit.layout.slots[slot].part is not None:  # its parts are gathered by all ranks that have them
                    states[unit.index, slot][kind] = _cut_out(unit, slot, full)
            del full  # before the next one is gathered
    if not is_first:
        return {}
    _put_tiles_together(runtime.units, states)
    return _packed(runtime, optimizer, places, states)


def _put_tiles_together(units: Sequence[Unit], states: States) -> None:
    """Give the first tile of every tiled parameter the states of the whole one."""
    tiles: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.blueprint.tile_of and (unit.index, 0) in states:
            tiles.setdefault(unit.blueprint.tile_of, []).append(unit)
    for own in tiles.values():
        found = [states.pop((unit.index, 0)) for unit in own]
        states[own[0].index, 0] = {
            kind: torch.cat([_spread(unit, state[kind]) for unit, state in zip(own, found, strict=True)])
            if _is_spread(own[0], value)
            else value
            for kind, value in found[0].items()
        }


def _is_spread(unit: Unit, value: Any) -> bool:
    return isinstance(value, _Alike) or (isinstance(value, torch.Tensor) and value.shape == unit.layout.slots[0].shape)


def _spread(unit: Unit, value: Any) -> torch.Tensor:
    return _spread_out(unit, 0, value.element) if isinstance(value, _Alike) else value


def _packed(
    runtime: Runtime, optimizer: torch.optim.Optimizer, places: list[list[tuple[int, int]]], states: States
) -> dict[str, Any]:
    """The state dict: states by number, and groups with the numbers of their parameters."""
    numbers = {place: number for number, place in enumerate(place for listed in places for place in listed)}
    groups = [
        {**{key: on_cpu(value) for key, value in group.items() if key != "params"}, "params": [numbers[p] for p in listed]}
        for group, listed in zip(optimizer.param_groups, places, strict=True)
    ]
    for (index, slot), state in states.items():
        unit = runtime.units[index]
        for kind, value in state.items():
            if isinstance(value, _Alike):
                state[kind] = _spread_out(unit, slot, value.element)
    is_native = runtime.offload.step is not None and runtime.offload.step.is_native
    found = {}
    for place, number in numbers.items():
        if place in states:
            found[number] = {kind: _counted(kind, value, is_native) for kind, value in states[place].items()}
    return {"state": found, "param_groups": groups}


def _tell(runtime: Runtime, survivors: Survivors) -> tuple[Kinds, States]:
    """Exchange which long states there are, and the other ones themselves; the rank with a parameter's first element tells."""
    mine_kinds: Kinds = {}
    mine: States = {}
    for unit in runtime.units:
        kinds = {kind: dtype for kind, dtype in survivors.kinds(unit).items() if kind not in (MASTER, VALUE)}
        if kinds:
            mine_kinds[unit.index] = kinds
        for piece, states in (*survivors.states(unit), *_fresh_states(runtime, survivors, unit)):
            if unit.layout.slots[piece.slot_index].offset // unit.layout.shard_numel == unit.rank:
                mine[unit.index, piece.slot_index] = {kind: on_cpu(value) for kind, value in states.items()}
    everyone = runtime.world.gather_objects((mine_kinds, mine))
    found: Kinds = {}
    for theirs, _ in everyone:
        for index, kinds in theirs.items():
            found.setdefault(index, {}).update(kinds)
    return found, {place: states for _, theirs in everyone for place, states in theirs.items()}


def _slots_with(unit: Unit, kind: str, states: States) -> Iterator[int]:
    for slot in range(len(unit.layout.slots)):
        if states.get((unit.index, slot), {}).get(kind) is LONG:
            yield slot


def _cut_out(unit: Unit, slot: int, full: torch.Tensor) -> torch.Tensor:
    """A parameter's state out of a full vector: a copy with its shape, its strides, and its dtype if it has that of masters."""
    place = unit.layout.slots[slot]
    dtype = unit.dtypes.original if full.dtype == unit.dtypes.master else full.dtype
    found = torch.empty_strided(place.shape, place.stride, dtype=dtype, device=full.device)
    found.as_strided((place.numel,), (1,)).copy_(full[place.offset : place.end])
    return (found if place.part is None else full_of(unit.held[slot], found)).cpu()


def _spread_out(unit: Unit, slot: int, element: torch.Tensor) -> torch.Tensor:
    """A state of which one element stands for all."""
    (shape, stride), dtype = unit.layout.slots[slot].whole_form, element.dtype
    dtype = unit.dtypes.original if dtype == unit.dtypes.master else dtype
    if unit.blueprint.tile_of:
        shape, stride = unit.layout.slots[slot].shape, unit.layout.slots[slot].stride
    return torch.empty_strided(shape, stride, dtype=dtype).fill_(element.item())


def _fresh_states(runtime: Runtime, survivors: Survivors, unit: Unit) -> Iterator[tuple[Piece, dict[str, Any]]]:
    for piece, states in survivors.fresh_states(unit):
        yield piece, {kind: _Alike(value) if kind in runtime.offload.states else value for kind, value in states.items()}


def on_cpu(value: Any) -> Any:
    """A copy that does not change with the run."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _counted(kind: str, value: Any, is_native: bool) -> Any:
    """The native Adam counts in a number, torch's own in a tensor."""
    return torch.tensor(float(value), dtype=torch.float32) if is_native and kind == "step" else value
