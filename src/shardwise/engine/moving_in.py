"""Takes over the states of an optimizer that has stepped, or loaded a plain state dict, before `shard`.

They are whole, and the same on every rank. They are checked before anything changes, and partitioned by `Restoring` when the
model is; a Unit's whole states are released as soon as it has its shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.comm import World
from shardwise.engine.restoring import Restoring
from shardwise.engine.survivors import LONG
from shardwise.errors import OptimizerError, RanksDifferError
from shardwise.optim import has_stepped, long_names, long_states
from shardwise.partition import ParamInfo, Piece, Unit, flat_values, local_of
from shardwise.tiers import checksum


class Brief(NamedTuple):
    """What ranks compare of one parameter's states: their names and their values."""

    name: str
    kinds: tuple[str, ...]
    mark: tuple[int | str, ...]


class MovingIn:
    """The whole states of one optimizer, by parameter. `Restoring` reads them from here."""

    def __init__(self, optimizer: torch.optim.Optimizer, infos: Sequence[ParamInfo], *, streams: bool) -> None:
        """Raises OptimizerError, with nothing changed, if a state cannot be partitioned. `streams`: states will be offloaded."""
        self._optimizer = optimizer
        self.states: dict[str, dict[str, Any]] = {}
        """States of each parameter, LONG for long ones."""
        self._long: dict[str, dict[str, torch.Tensor]] = {}
        self._kinds = type(optimizer).__name__
        names = {id(info.param): info.name for info in infos}
        for param in optimizer.state:
            if id(param) not in names:
                what = f"a tensor of shape {list(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
                raise OptimizerError(
                    f"{self._kinds} has a state of {what}, which is no parameter of the model: there is nothing to divide it by. "
                    "Remove it from optimizer.state before sw.shard()."
                )
        if not has_stepped(optimizer):
            return  # what it was built with is made anew for every piece
        known = long_states(optimizer) if streams else None
        expected: Collection[str] = long_names(optimizer) if known is None else known
        for param, state in optimizer.state.items():
            if state:
                self._take(names[id(param)], param, state, expected, streams=streams)

    def _take(self, name: str, param: torch.Tensor, state: dict[str, Any], expected: Collection[str], *, streams: bool) -> None:
        found: dict[str, Any] = {}
        long: dict[str, torch.Tensor] = {}
        for kind, value in state.items():
            if _is_long(param, value, is_expected=kind in expected):
                found[kind], long[kind] = LONG, value
            elif _is_small(value):
                found[kind] = value
            else:
                raise OptimizerError(
                    f"{self._kinds} has a state {kind!r} of parameter {name!r} that cannot be divided among ranks: it is "
                    f"{_described(value)}, the parameter has shape {list(param.shape)}. A state must have the parameter's shape, "
                    "or be one number."
                )
        if streams and param.requires_grad:
            found = {kind: value for kind, value in found.items() if kind not in expected or value is not None}
            strange, missing = sorted(long.keys() - set(expected)), sorted(set(expected) - long.keys())
            if strange or (missing and found):
                which = f"has a state {strange[0]!r}" if strange else f"has no state {missing[0]!r}"
                raise OptimizerError(
                    f"{self._kinds} {which} of parameter {name!r}, but with its present settings it would "
                    f"{'not ' if strange else ''}make one, so no place was set aside for what it has. Give its groups the "
                    "settings it has stepped with, or leave Offload out."
                )
        if found:
            self.states[name], self._long[name] = found, long

    def briefs(self) -> list[Brief]:
        """What ranks compare."""
        return [
            Brief(name, tuple(sorted(found)), tuple(self._mark(name, kind) for kind in sorted(found)))
            for name, found in sorted(self.states.items())
        ]

    def _mark(self, name: str, kind: str) -> int | str:
        value = self.states[name][kind]
        if value is LONG:
            return checksum(local_of(self._long[name][kind]))
        return repr(value.tolist() if isinstance(value, torch.Tensor) else value)

    def partition(self, restoring: Restoring, units: Sequence[Unit]) -> None:
        """Give every Unit its part, wherever that is kept, and release the whole states."""
        for unit in units:
            restoring.restore_states(unit, self.states)
            for slot in unit.layout.slots:
                if slot.start + slot.numel == math.prod(slot.param_shape):  # all of it, or its last tile
                    self._long.pop(slot.name, None)

    def clear(self) -> None:
        """Take the whole states out of the optimizer."""
        self._optimizer.state.clear()

    # -- read by Restoring ------------------------------------------------------------------------------------

    def has(self, unit: Unit, piece: Piece) -> bool:
        """Whether the optimizer has brought states of the parameter of a Piece."""
        return unit.layout.slots[piece.slot_index].name in self.states

    def read(self, unit: Unit, pieces: Iterable[Piece], kind: str | None, vector: torch.Tensor) -> None:
        """Copy a long state of Pieces to where they lie in `vector`."""
        assert kind is not None, "values do not move in: the parameters have them"
        for piece in pieces:
            slot = unit.layout.slots[piece.slot_index]
            values = flat_values(self._long[slot.name][kind], slot.stride)
            vector[piece.shard_start : piece.shard_start + piece.numel].copy_(
                values[slot.start + piece.param_start : slot.start + piece.param_start + piece.numel]
            )

    def dtype_of(self, unit: Unit, piece: Piece, kind: str) -> torch.dtype:
        """The dtype to keep a long state in: that of the masters if it had that of its parameter."""
        dtype = self._long[unit.layout.slots[piece.slot_index].name][kind].dtype
        return unit.dtypes.master if dtype == unit.dtypes.original else dtype


def moving_in(
    optimizer: torch.optim.Optimizer | None, infos: Sequence[ParamInfo], world: World, *, streams: bool
) -> MovingIn | None:
    """Check the states that an optimizer brings, on all ranks together; None if it brings none. All ranks must call."""
    found: list[MovingIn] = []

    def check() -> list[Brief] | None:
        if optimizer is None:
            return None
        found.append(MovingIn(optimizer, infos, streams=streams))
        return found[0].briefs()

    outcome = world.try_together(check, OptimizerError)
    if outcome.problem is not None:
        raise outcome.problem
    if outcome.first is not None:
        raise OptimizerError(f"rank {outcome.first[0]} cannot shard its optimizer: {outcome.first[1]}")
    first = outcome.results[0]
    for rank, other in enumerate(outcome.results):
        if other != first:
            raise RanksDifferError(_difference(first, rank, other))
    return found[0] if found and found[0].states else None


def _difference(first: list[Brief] | None, rank: int, other: list[Brief] | None) -> str:
    if first is None or other is None:
        return f"rank {0 if first is None else rank} gave sw.shard() no optimizer, rank {rank if first is None else 0} did."
    ours, theirs = ({brief.name: brief for brief in briefs} for briefs in (first, other))
    name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
    here, there = (found[name].kinds if name in found else () for found in (ours, theirs))
    what = "values of the states" if here == there else "states"
    shown = "" if here == there else f": {', '.join(here) or 'none'} against {', '.join(there) or 'none'}"
    return (
        f"the optimizers of rank 0 and rank {rank} differ in the {what} of parameter {name!r}{shown}. Every rank must "
        "bring the same optimizer: make the same steps, or load the same state dict, on all of them."
    )


def _is_long(param: torch.Tensor, value: Any, *, is_expected: bool) -> bool:
    """Whether a state has an element for every element of its parameter.

    A count has the shape of a parameter of one element, too: then it must be `expected`, as a trial has found.
    """
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or value.layout != torch.strided:
        return False
    return value.numel() != 1 or is_expected


def _is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.layout == torch.strided
    return value is None or isinstance(value, (bool, int, float, str))


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
