"""Receives each parameter's gradient before autograd would accumulate it into `.grad`.

A prehook on every AccumulateGrad node passes the gradient to the runtime: nothing is copied, and `.grad` is never set. Hooks hold
the runtime by a weak reference, because Python's collector cannot see what autograd's nodes hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from shardwise.engine.lookups import SharedTable
from shardwise.errors import ModelError
from shardwise.partition import GRAD, REQUIRES_GRAD, Unit, set_own_grad


class ArrivalListener(Protocol):
    """Receives gradients: the runtime."""

    def arrive(self, index: int, slot: int, grad: torch.Tensor | None) -> None:
        """Receive the complete gradient of a parameter."""


class Arrivals:
    """Hooks all parameters, frozen ones too, because they may be unfrozen later."""

    def __init__(self, units: Sequence[Unit], listener: ArrivalListener, tables: Mapping[int, SharedTable]) -> None:
        """`tables`: by Unit, tables whose gradient is put together here."""
        self._units = units
        self._listener = listener
        # A parameter holds its AccumulateGrad node weakly: without this reference a new node without the hook would replace it.
        self._nodes: dict[tuple[int, int], torch.autograd.graph.Node] = {}
        self._tables = tables
        for unit in units:
            for slot, param in enumerate(unit.params):
                self._listen(unit, slot, param)

    def _listen(self, unit: Unit, slot: int, param: nn.Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():  # needs the graph only, no values
            is_frozen = not param.requires_grad
            if is_frozen:
                torch.Tensor.requires_grad_(param)
            node = torch.autograd.graph.get_gradient_edge(param).node
            if is_frozen:
                torch.Tensor.requires_grad_(param, False)
        node.register_prehook(_Arrival(self._listener, unit.index, slot, self._tables.get(unit.index)))
        self._nodes[unit.index, slot] = node

    def take_strays(self) -> None:
        """Receive gradients that autograd accumulated itself: `p.set_()`, for example, gives a parameter a new node."""
        for unit in self._units:
            with torch._C.DisableTorchFunctionSubclass():
                grads = [GRAD.__get__(param) for param in unit.params]
            for slot, grad in enumerate(grads):
                if grad is not None:
                    set_own_grad(unit.params[slot], None)
                    self._listen(unit, slot, unit.params[slot])
                    self._listener.arrive(unit.index, slot, grad)


def is_expected(unit: Unit, slot: int) -> bool:
    """Whether to use a gradient: not if its parameter was frozen after the forward. Raises in unsupported cases."""
    param = unit.params[slot]
    with torch._C.DisableTorchFunctionSubclass():
        is_trained, hooks = REQUIRES_GRAD.__get__(param), param._post_accumulate_grad_hooks
    if not is_trained:  # autograd would drop it too
        return False
    if hooks:
        raise ModelError(
            f"parameter {unit.layout.slots[slot].name!r} has a hook from register_post_accumulate_grad_hook(), which runs "
            "before gradients are averaged over ranks and finds none in .grad. Use register_hook() to change a gradient "
            "on its way, or run.grad(name) after backward()."
        )
    if not unit.is_trainable:
        raise ModelError(
            f"parameter {unit.layout.slots[slot].name!r} was frozen when the model was sharded and was unfrozen after this "
            "backward's forward pass had begun. Unfreeze it before the forward pass."
        )
    return True


class _Arrival:
    """The prehook of one parameter: autograd calls it with the gradient."""

    __slots__ = ("_index", "_listener", "_slot", "_table")

    def __init__(self, listener: ArrivalListener, index: int, slot: int, table: SharedTable | None) -> None:
        self._listener = weakref.ref(listener)
        self._index, self._slot, self._table = index, slot, table

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None]:
        listener = self._listener()
        if listener is not None:
            listener.arrive(self._index, self._slot, grads[0] if self._table is None else self._table.complete(grads))
        return (None,)


class EndOfBackward:
    """The callback that autograd runs when a backward has ended; if the backward raises, autograd deletes it uncalled."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self) -> None:
        """The backward has ended."""
        self._function()


def is_inside_autograd() -> bool:
    """Whether this thread is inside a backward, which includes hooks and recomputation."""
    return torch._C._current_graph_task_id() != -1
