"""Copies values between a Unit's full vector, its shard and its masters.

Called at construction, at loading, after a step, and when user code has changed parameters. Masters have more digits than the
stored dtype, so a write back must change only elements that differ from the stored value.
"""

from __future__ import annotations

import torch

from shardwise.errors import ModelError
from shardwise.partition.raw import local_of, point_at
from shardwise.partition.unit import Unit

_CHUNK_NUMEL = 1 << 20  # elements compared at a time


def store(unit: Unit, slot: int, values: torch.Tensor) -> None:
    """Write one parameter's full value (flat, storage order) into this rank's shard, master and full vector."""
    place = unit.layout.slots[slot]
    values = values.detach()
    if unit.is_always_full:
        unit.full[place.offset : place.end].copy_(values.to(unit.dtypes.stored))
    _store_part(unit.shard, _own_start(unit), place.offset, values)
    if unit.master is not unit.shard:
        _store_part(unit.master, unit.span.start, place.offset, values)


def write_back(unit: Unit) -> bool:
    """Write gathered values that were changed in place to shard and master; return whether any were."""
    is_changed = False if unit.blueprint.holds_alias else _store_changed(unit, unit.shard, _own_start(unit))
    if unit.has_own_master:
        is_changed |= _store_changed(unit, unit.master, unit.span.start)
    if unit.is_always_full and unit.blueprint.is_narrow:
        unit.full.copy_(unit.full.to(unit.dtypes.stored))  # the model computes with stored values, as after a step
    unit.drop_own_pages()
    return is_changed


def publish_master(unit: Unit) -> None:
    """After an optimizer step: round the masters into the stored shard, and at stage 0 into the full vector."""
    if unit.has_own_master:
        publish_part(unit, 0, unit.master)


def publish_part(unit: Unit, low: int, masters: torch.Tensor) -> None:
    """Like `publish_master`, for new masters of the span's elements from `low` on."""
    if unit.is_always_full and unit.span.numel == unit.layout.numel:  # this rank updates all of it
        unit.full[low : low + masters.numel()].copy_(masters.to(unit.dtypes.stored))
    _store_part(unit.shard, _own_start(unit), unit.span.start + low, masters)


def differs(unit: Unit) -> bool:
    """Whether any value in this rank's part of the full vector differs from its shard or masters.

    Always True while those are offloaded, and if the shard is a slice of the full vector: then they cannot be compared.
    """
    is_offloaded = unit.shard.numel() < unit.layout.shard_numel or (unit.is_trainable and unit.master.numel() < unit.span.numel)
    if unit.blueprint.holds_alias or is_offloaded:
        return True
    if _any_differs(unit, unit.shard, _own_start(unit)):
        return True
    return unit.has_own_master and _any_differs(unit, unit.master, unit.span.start)


def copy_assigned(unit: Unit) -> None:
    """Copy tensors that user code assigned (`p.data = x`, `p.set_(x)`) into the full vector, and make parameters views again."""
    if not unit.is_gathered:
        return
    for slot, data, has_moved in list(unit.writes.replaced()):
        view = unit.views[slot]
        _check_replacement(unit, slot, data, view, has_moved=has_moved)
        view.copy_(data)
        unit.rebind(slot)
        point_at(unit.params[slot], view)


def _check_replacement(unit: Unit, slot: int, data: torch.Tensor, view: torch.Tensor, *, has_moved: bool) -> None:
    what = f"parameter {unit.layout.slots[slot].name!r} (Unit {unit.name!r}, rank {unit.rank})"
    if has_moved or data.is_shared():
        raise ModelError(
            f"{what} was moved to shared memory by share_memory(), so updates would not reach it. Call share_memory() before "
            "sw.shard(), on a copy."
        )
    if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
        raise ModelError(
            f"{what} was replaced by a tensor of shape {list(data.shape)}, dtype {data.dtype} on {data.device} (model.to(), "
            f".half(), or an assignment to .data); it has shape {list(view.shape)}, dtype {view.dtype} on {view.device}. Convert "
            "the model before sw.shard()."
        )
    if unit.owner.owns(data.data_ptr()):
        raise ModelError(
            f"{what} was tied to another one through .data. Tie them as one Parameter, as in `module.weight = other.weight`, "
            "before sw.shard()."
        )
    if unit.writes.has_alias_at(slot):
        raise ModelError(
            f"{what} was given other values by an assignment to .data while its old ones are still held through a `.data` taken "
            "before; they would be overwritten now. Keep a copy instead (`.data.clone()`), or put the old values back first."
        )
    if unit.is_overlaid and unit.writes.is_held(slot, is_shown=False):  # the graph would read the new values
        raise ModelError(
            f"{what} was given other values by an assignment to .data after the forward pass had used it, and the graph still "
            "needs the old ones; they would be overwritten now. Assign before the parameter is used, or after the backward."
        )


def flat_values(param: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A parameter's elements in storage order, as the layout keeps them; of a DTensor, those of its local tensor."""
    value = local_of(param).detach()
    if tuple(value.stride()) != stride:
        value = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((value.numel(),), (1,))


def _own_start(unit: Unit) -> int:
    return unit.rank * unit.layout.shard_numel


def _store_part(target: torch.Tensor, target_start: int, offset: int, values: torch.Tensor) -> None:
    low = max(offset, target_start)
    high = min(offset + values.numel(), target_start + target.numel())
    if low < high:
        target[low - target_start : high - target_start].copy_(values[low - offset : high - offset])


def _store_changed(unit: Unit, target: torch.Tensor, start: int) -> bool:
    is_changed = False
    for at in range(0, target.numel(), _CHUNK_NUMEL):
        old = target[at : at + _CHUNK_NUMEL]
        differing = _differing(unit, old, start + at)
        if bool(differing.any()):
            is_changed = True
            new = unit.full[start + at : start + at + old.numel()]
            old.copy_(torch.where(differing, new.to(old.dtype), old))
    return is_changed


def _any_differs(unit: Unit, target: torch.Tensor, start: int) -> bool:
    for at in range(0, target.numel(), _CHUNK_NUMEL):
        if bool(_differing(unit, target[at : at + _CHUNK_NUMEL], start + at).any()):
            return True
    return False


def _differing(unit: Unit, old: torch.Tensor, start: int) -> torch.Tensor:
    """Where gathered values, from element `start` on, differ from `old` rounded to the stored dtype."""
    new = unit.full[start : start + old.numel()]
    was = old.to(unit.dtypes.stored).to(new.dtype)
    return ~((new == was) | (new.isnan() & was.isnan()))
