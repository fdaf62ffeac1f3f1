"""What state a Unit is in, which moves are allowed, and who answers for it.

A parameter keeps its identity for life: the same object sits in the module, in the user's lists and in autograd's graph. Its
class says what is in memory (`freed.py`); its `Handle` says which Unit it belongs to.
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
    """Raise unless the move is in the table."""
    if to not in _MOVES[now]:
        raise LifecycleError(f"Unit {unit_name!r} cannot go from {now.name} to {to.name}: a broken invariant.")


class Owner(Protocol):
    """Whoever answers for a Unit: decides what a touch means and where gradients are."""

    allows_optimizer: bool
    """Whether an optimizer may be built on freed parameters (before `shard`, which then replaces them)."""

    def touch(self, units: Sequence[Unit]) -> bool:
        """Gather `units` and keep them, if a pass runs that will free them again; False if none does."""

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Run one operation on freed parameters outside any pass; `name` is the operation's, for messages."""

    def remedy(self) -> str:
        """What the user should do instead of touching a freed parameter."""

    def local_grad(self, handle: Handle) -> torch.Tensor | None:
        """What `parameter.grad` answers."""

    def set_local_grad(self, handle: Handle, grad: torch.Tensor | None) -> None:
        """What assigning `parameter.grad` does."""

    def flagged(self, handle: Handle, requires_grad: bool) -> None:
        """The user has frozen or unfrozen a parameter."""

    def copied(self, handle: Handle) -> nn.Parameter:
        """A copy of a freed parameter, partitioned too, if `allows_optimizer`."""

    def owns(self, address: int) -> bool:
        """Whether an address lies in the gathered parameters of any of its Units."""


class Handle:
    """The one attribute a managed parameter carries: its Unit and its Slot there.

    A Slot holds a range of a parameter, today always the whole of it. A parameter that is cut lies in several; `places` lists
    them in order, and `unit` and `slot` are the first.

    Autograd's nodes hold parameters where Python's collector cannot see it. A parameter therefore does not keep the Unit of a
    running model alive: the model's hooks do.
    """

    __slots__ = ("_strong", "_units", "slots")

    def __init__(self, unit: Unit, slot: int, *, keeps_unit: bool) -> None:
        self._units = [weakref.ref(unit)]
        self._strong = [unit] if keeps_unit else []
        self.slots = [slot]

    def join(self, unit: Unit, slot: int) -> None:
        """The parameter's next range lies in another Slot."""
        self._units.append(weakref.ref(unit))
        self.slots.append(slot)
        if self._strong:
            self._strong.append(unit)

    @property
    def unit(self) -> Unit:
        """The Unit; an error if the run is gone."""
        return _alive(self._units[0])

    @property
    def slot(self) -> int:
        """Which Slot of the Unit."""
        return self.slots[0]

    @property
    def places(self) -> list[tuple[Unit, int]]:
        """Every (Unit, Slot) that holds a range of the parameter."""
        return [(_alive(unit), slot) for unit, slot in zip(self._units, self.slots, strict=True)]

    def at(self, slot: int) -> Handle:
        """Another parameter of the same Unit."""
        return Handle(self.unit, slot, keeps_unit=bool(self._strong))


def _alive(reference: weakref.ref[Unit]) -> Unit:
    unit = reference()
    if unit is None:
        raise ModelError(
            "this parameter belongs to a sharded model that no longer exists: keep the model, or the run that sw.shard() "
            "returned, for as long as its parameters are used."
        )
    return unit
