"""Decides what happens when user code touches a sharded parameter: implements `partition.Owner` for a run.

Called by `ShardedParameter` and `FreedParameter`; the runtime, `Outside` and `Gradients` do the work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import FreedParameterError, LifecycleError
from shardwise.partition import Handle, Unit, like, local_grad

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime


_OF_SCHEDULES = (
    " A pipeline's schedule, which divides gradients by the number of micro-batches, must run inside run.accumulating(), with "
    "run.reduce() after it; or give it scale_grads=False."
)


class Answers:
    """The owner of a sharded model's Units. It holds the runtime by a weak reference, because Units hold it."""

    allows_optimizer = False

    def __init__(self) -> None:
        self._runtime: weakref.ref[Runtime] | None = None

    def begin(self, runtime: Runtime) -> None:
        """Set the runtime that does the work."""
        self._runtime = weakref.ref(runtime)

    @property
    def runtime(self) -> Runtime:
        """The runtime; raises if it does not exist."""
        found = None if self._runtime is None else self._runtime()
        if found is None:
            raise LifecycleError("a parameter was touched before its run began or after it ended: a broken invariant.")
        return found

    def touch(self, units: Sequence[Unit]) -> bool:
        """Gather the touched Units if a forward, a backward or a load runs, and return True; else return False."""
        return self.runtime.touch(units)

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Run one operation outside any pass: gather, run, write back, free."""
        return self.runtime.outside.operate(function, touched, name)

    def operate_tiled(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on tiled parameters."""
        return self.runtime.tiles.operate(func, name, args, kwargs)

    def overwrite(self, handle: Handle, write: Callable[[torch.Tensor], object]) -> bool:
        """Always False: ranks must check that all have written the same values."""
        return False

    def flagged(self, handle: Handle, requires_grad: bool) -> None:
        """Make a frozen Unit trainable when the first of its parameters is unfrozen. Tiles follow their parameter."""
        for unit, slot in handle.places:
            if unit.params[slot].requires_grad != requires_grad:
                unit.params[slot].requires_grad = requires_grad  # a tile, which is not the parameter itself
            elif requires_grad and not unit.is_trainable:
                self.runtime.unfreeze(unit)

    def owns(self, address: int) -> bool:
        """Whether an address lies in the full vector of a Unit."""
        return self.runtime.saved.unit_at(address) is not None

    def copied(self, handle: Handle) -> nn.Parameter:
        """Never called: parameters of a sharded model are copied as ordinary ones, inside `run.gathered`."""
        raise LifecycleError("a copy of a sharded parameter was asked for: a broken invariant.")

    def remedy(self) -> str:
        """How to reach full parameters."""
        return "Do it inside `with run.gathered(module):`, on every rank."

    def local_grad(self, handle: Handle) -> torch.Tensor | None:
        """`parameter.grad`: None if there is no gradient; at stage 0 the gradient; else an error, as it is in the shards."""
        runtime, unit, slot = self.runtime, handle.unit, handle.slot
        accumulated = runtime.gradients.accumulated
        if any(accumulated.has(each.index, number) for each, number in handle.places):
            local = accumulated.sum_of(unit.index, slot)
            if local is not None and not unit.blueprint.tile_of and not runtime.gradients.holds(unit, slot):
                return like(unit.params[slot], local)  # as in DDP's no_sync(): what this rank has summed
            accumulated.require_reduced(".grad")
        if not any(runtime.gradients.holds(each, number) for each, number in handle.places):
            return None
        place = unit.layout.slots[slot]
        if runtime.stage.gathers_grads and not unit.blueprint.tile_of:
            runtime.gradients.home.show(unit)
            held = next((piece.grad for piece in unit.pieces_of(slot)), None)
            return None if held is None else like(unit.params[slot], held.as_strided(place.shape, place.stride))
        raise FreedParameterError(
            f".grad of parameter {place.name!r} (rank {runtime.world.rank}): the gradient was reduced and only this rank's shard "
            "of it (of a tiled parameter: its tiles) is kept. Use run.clip_grad_norm_() to clip, run.grad(name) to read, "
            f"optimizer.zero_grad() to clear.{_OF_SCHEDULES if runtime.world.pipe is not None else ''}"
        )

    def set_local_grad(self, handle: Handle, grad: torch.Tensor | None) -> None:
        """`parameter.grad = None` clears the shard's gradient too. Other values set a sum inside `run.accumulating()`."""
        accumulated = self.runtime.gradients.accumulated
        if grad is not None and accumulated.is_open and not handle.unit.blueprint.tile_of and handle.unit.is_trainable:
            accumulated.replace(handle.unit, handle.slot, local_grad(handle.unit.params[handle.slot], grad))
            return
        if grad is not None:
            raise FreedParameterError(
                f"setting .grad of parameter {handle.unit.layout.slots[handle.slot].name!r}: gradients live in shards and come "
                "from backward() only; None clears them."
            )
        for unit, slot in handle.places:
            if unit.is_trainable:
                self.runtime.gradients.drop(unit, slot)
