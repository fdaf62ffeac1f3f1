"""What a parameter answers when user code touches it outside the engine's own path: the run as the owner of its Units.

`ShardedParameter` and `FreedParameter` ask here; the runtime, `Outside` and `Gradients` do the work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import FreedParameterError, LifecycleError
from shardwise.partition import Handle, Unit

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime


class Answers:
    """The owner of a sharded model's Units. Units hold it, so it holds the runtime weakly."""

    allows_optimizer = False

    def __init__(self) -> None:
        self._runtime: weakref.ref[Runtime] | None = None

    def begin(self, runtime: Runtime) -> None:
        """From here on this runtime does the work."""
        self._runtime = weakref.ref(runtime)

    @property
    def runtime(self) -> Runtime:
        """The runtime of a model that still exists."""
        found = None if self._runtime is None else self._runtime()
        if found is None:
            raise LifecycleError("a parameter was touched before its run began or after it ended: a broken invariant.")
        return found

    def touch(self, units: Sequence[Unit]) -> bool:
        """Inside a forward or backward pass, or while a state dict is loaded, a touch gathers."""
        return self.runtime.touch(units)

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Outside any pass one operation gathers, runs, and is written back."""
        return self.runtime.outside.operate(function, touched, name)

    def flagged(self, handle: Handle, requires_grad: bool) -> None:
        """A frozen Unit becomes trainable with the first of its parameters that is unfrozen."""
        if requires_grad and not handle.unit.is_trainable:
            self.runtime.unfreeze(handle.unit)

    def owns(self, address: int) -> bool:
        """Whether an address lies in a full vector."""
        return self.runtime.saved.unit_at(address) is not None

    def copied(self, handle: Handle) -> nn.Parameter:
        """A sharded model's parameters are copied whole, inside `run.gathered`."""
        raise LifecycleError("a copy of a sharded parameter was asked for: a broken invariant.")

    def remedy(self) -> str:
        """How to reach full parameters."""
        return "Do it inside `with run.gathered(module):`, on every rank."

    def local_grad(self, handle: Handle) -> torch.Tensor | None:
        """`parameter.grad`: None before a backward, the gradient at stage 0, else an error: it is in the shards."""
        runtime, unit, slot = self.runtime, handle.unit, handle.slot
        runtime.gradients.require_reduced(".grad")
        if not runtime.gradients.holds(unit, slot):
            return None
        place = unit.layout.slots[slot]
        if runtime.stage.gathers_grads:
            runtime.gradients.home.show(unit)
            held = next((piece.grad for piece in unit.pieces_of(slot)), None)
            return None if held is None else held.as_strided(place.shape, place.stride)
        raise FreedParameterError(
            f".grad of parameter {place.name!r} (rank {runtime.world.rank}): the gradient was reduced and only this rank's shard "
            "of it is kept. Use run.clip_grad_norm_() to clip, run.grad(name) to read, optimizer.zero_grad() to clear."
        )

    def set_local_grad(self, handle: Handle, grad: torch.Tensor | None) -> None:
        """`parameter.grad = None` clears the shard's gradient too; any other value is refused."""
        unit, slot = handle.unit, handle.slot
        if grad is not None:
            raise FreedParameterError(
                f"setting .grad of parameter {unit.layout.slots[slot].name!r}: gradients live in shards and come from "
                "backward() only; None clears them."
            )
        if unit.is_trainable:
            self.runtime.gradients.drop(unit, slot)
