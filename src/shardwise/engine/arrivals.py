"""Takes each parameter's gradient where autograd would accumulate it.

A hook in front of every AccumulateGrad node: nothing is copied and `.grad` is never set. Hooks hold the engine weakly, because
autograd's nodes are never collected with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.partition import REQUIRES_GRAD, Unit, own_grad, set_own_grad


class ArrivalListener(Protocol):
    """Who is given gradients: the runtime."""

    def arrive(self, index: int, slot: int, grad: torch.Tensor | None) -> None:
        """Autograd has the whole gradient of a parameter."""


class Arrivals:
    """Listens to the gradients of all Units, frozen ones too: they may be unfrozen."""

    def __init__(self, units: Sequence[Unit], listener: ArrivalListener) -> None:
        self._units = units
        self._listener = listener
        # Autograd holds a node weakly: without this a new one, without our hook, would replace it.
        self._nodes: dict[tuple[int, int], torch.autograd.graph.Node] = {}
        for unit in units:
            for slot, param in enumerate(unit.params):
                self._listen(unit, slot, param)

    def _listen(self, unit: Unit, slot: int, param: nn.Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():  # looks at the graph, not at values
            is_frozen = not param.requires_grad
            if is_frozen:
                torch.Tensor.requires_grad_(param)
            node = torch.autograd.graph.get_gradient_edge(param).node
            if is_frozen:
                torch.Tensor.requires_grad_(param, False)
        node.register_prehook(_Arrival(self._listener, unit.index, slot))
        self._nodes[unit.index, slot] = node

    def take_strays(self, complete: Container[int]) -> None:
        """Gradients that autograd accumulated itself: some changes of a parameter's memory (`p.set_()`) give it a new node.

        Of Units that are not `complete`: the others' have all arrived.
        """
        for unit in self._units:
            if unit.index in complete:
                continue
            for slot, param in enumerate(unit.params):
                grad = own_grad(param)
                if grad is not None:
                    set_own_grad(param, None)
                    self._listen(unit, slot, param)
                    self._listener.arrive(unit.index, slot, grad)


def is_expected(unit: Unit, slot: int) -> bool:
    """Whether a gradient that has arrived is wanted: not if its parameter was frozen since. Refuses what cannot be honoured."""
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
    """Called by autograd with a parameter's gradient."""

    __slots__ = ("_index", "_listener", "_slot")

    def __init__(self, listener: ArrivalListener, index: int, slot: int) -> None:
        self._listener = weakref.ref(listener)
        self._index, self._slot = index, slot

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None]:
        listener = self._listener()
        if listener is not None:
            listener.arrive(self._index, self._slot, grads[0])
        return (None,)


class EndOfBackward:
    """What autograd calls when a backward has ended; if that raises instead, autograd drops it and it is gone."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self) -> None:
        """Autograd has ended."""
        self._function()


def is_inside_autograd() -> bool:
    """Whether this thread runs a backward, hooks and recomputation included."""
    return torch._C._current_graph_task_id() != -1
