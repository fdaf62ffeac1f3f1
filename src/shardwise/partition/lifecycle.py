"""The states of a Unit, the allowed moves between them, and the interface of its owner.

A parameter stays the same object: in the module, in the user's lists and in autograd's graph. Its class says whether its values
are in memory (`freed.py`); its `Handle` says which Unit it belongs to.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shardwise.errors import LifecycleError, ModelError

if TYPE_CHECKING:
    from shardwise.partition.unit import Unit


class UnitState(enum.Enum):
    """What of a Unit's parameters is in memory."""

    SHARDED = "the shard only"
    GATHERING = "the shard, and a full vector that is being filled"
    GATHERED = "the shard and the full vector; parameters are usable"


_MOVES = {
    UnitState.SHARDED: {UnitState.GATHERING},
    UnitState.GATHERING: {UnitState.GATHERED, UnitState.SHARDED},  # back if the gather failed
    UnitState.GATHERED: {UnitState.SHARDED},
}


def check_move(unit_name: str, now: UnitState, to: UnitState) -> None:
    """Raise unless the move is allowed."""
    if to not in _MOVES[now]:
        raise LifecycleError(f"Unit {unit_name!r} cannot go from {now.name} to {to.name}: a broken invariant.")


class Owner(Protocol):
    """Owns Units: decides what happens when user code touches their parameters, and where gradients are."""

    allows_optimizer: bool
    """Whether an optimizer may be built on freed parameters (before `shard`, which then replaces them)."""

    def touch(self, units: Sequence[Unit]) -> bool:
        """Gather `units` and return True, if a pass runs that will free them again; else return False."""

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Run one operation on freed parameters outside any pass; `name` is its name, for messages."""

    def operate_tiled(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on tiled parameters: tile by tile if it can be done so, else on copies of the whole."""

    def overwrite(self, handle: Handle, write: Callable[[torch.Tensor], object]) -> bool:
        """Give a freed parameter the values that `write` puts into a new tensor, without a gather; False if that is not done."""

    def remedy(self) -> str:
        """What the user should do instead of touching a freed parameter."""

    def local_grad(self, handle: Handle) -> torch.Tensor | None:
        """The value of `parameter.grad`."""

    def set_local_grad(self, handle: Handle, grad: torch.Tensor | None) -> None:
        """Handle an assignment to `parameter.grad`."""

    def flagged(self, handle: Handle, requires_grad: bool) -> None:
        """User code has frozen or unfrozen a parameter."""

    def copied(self, handle: Handle) -> nn.Parameter:
        """A copy of a freed parameter, partitioned too; only called if `allows_optimizer`."""

    def owns(self, address: int) -> bool:
        """Whether an address lies in the full vector of any of its Units."""


class Handle:
    """The one attribute that a parameter carries: its Unit and its Slot there.

    A Slot holds a whole parameter or one tile of it. A tiled parameter lies in several Slots: `places` lists them in order, and
    `unit` and `slot` are the first.

    Autograd's nodes hold parameters, and Python's garbage collector cannot see that. So a parameter holds the Unit of a running
    model by a weak reference only; the model's hooks keep the Unit alive.
    """

    __slots__ = ("_strong", "_units", "slots")

    def __init__(self, unit: Unit, slot: int, *, keeps_unit: bool) -> None:
        self._units = [weakref.ref(unit)]
        self._strong = [unit] if keeps_unit else []
        self.slots = [slot]

    def join(self, unit: Unit, slot: int) -> None:
        """Add the Slot that holds the next range of the parameter."""
        self._units.append(weakref.ref(unit))
        self.slots.append(slot)
        if self._strong:
            self._strong.append(unit)

    @property
    def unit(self) -> Unit:
        """The Unit; raises if the run no longer exists."""
        return _alive(self._units[0])

    @property
    def slot(self) -> int:
        """The number of the Slot in the Unit."""
        return self.slots[0]

    @property
    def places(self) -> list[tuple[Unit, int]]:
        """Every (Unit, Slot) that holds a range of the parameter."""
        return [(_alive(unit), slot) for unit, slot in zip(self._units, self.slots, strict=True)]

    def at(self, slot: int) -> Handle:
        """The Handle of another parameter of the same Unit."""
        return Handle(self.unit, slot, keeps_unit=bool(self._strong))


def _alive(reference: weakref.ref[Unit]) -> Unit:
    unit = reference()
    if unit is None:
        raise ModelError(
            "this parameter belongs to a sharded model that no longer exists: keep the model, or the run that sw.shard() "
            "returned, for as long as its parameters are used."
        )
    return unit
