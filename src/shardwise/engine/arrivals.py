"""Receives each parameter's gradient before autograd would accumulate it into `.grad`.

A prehook on every AccumulateGrad node keeps the gradient: nothing is copied, and `.grad` is never set. When all of a Unit have
arrived, the runtime is told. Hooks hold the runtime by a weak reference, because Python's collector cannot see what autograd's
nodes hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from shardwise.engine.accumulated import Accumulated
from shardwise.engine.lookups import SharedTable
from shardwise.partition import GRAD, REQUIRES_GRAD, Unit, is_dtensor, local_grad, set_own_grad


class Arrived(NamedTuple):
    """The complete gradient of one parameter, and the version that the tensor had when it arrived."""

    slot: int
    grad: torch.Tensor
    version: int


class ArrivalListener(Protocol):
    """Receives gradients: the runtime."""

    def begin_backward(self) -> None:
        """Note that a backward runs. Called for every parameter, because the last backward may have raised."""

    def arrive(self, index: int) -> None:
        """All gradients of a Unit have arrived; `Arrivals.take` returns them."""


class Arrivals:
    """Hooks all parameters, frozen ones too, because they may be unfrozen later."""

    def __init__(
        self, units: Sequence[Unit], listener: ArrivalListener, tables: Mapping[int, SharedTable], accumulated: Accumulated
    ) -> None:
        """`tables` by Unit, whose gradients are put together here. While `accumulated` is open no gradient waits for others."""
        self._accumulated = accumulated
        self._units = units
        self._listener = listener
        # A parameter holds its AccumulateGrad node weakly: without this reference a new node without the hook would replace it.
        self._nodes: dict[tuple[int, int], torch.autograd.graph.Node] = {}
        self._tables = tables
        self._arrived: list[list[Arrived]] = [[] for _ in units]
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
        table, arrived = self._tables.get(unit.index), self._arrived[unit.index]
        if table is not None:
            table.node_id = id(node)
        node.register_prehook(_Arrival(self._listener, unit, slot, table, arrived, self._accumulated))
        self._nodes[unit.index, slot] = node

    def take(self, index: int) -> list[Arrived]:
        """The gradients of a Unit that have arrived since the last call."""
        arrived = self._arrived[index][:]
        self._arrived[index].clear()
        return arrived

    def rest(self) -> list[int]:
        """Units of which some gradients, and not all, have arrived."""
        return [index for index, arrived in enumerate(self._arrived) if arrived]

    def abandon(self) -> None:
        """Drop the gradients of a backward that raised."""
        for arrived in self._arrived:
            arrived.clear()

    def take_strays(self) -> None:
        """Receive gradients that autograd accumulated itself: `p.set_()`, for example, gives a parameter a new node."""
        for unit in self._units:
            with torch._C.DisableTorchFunctionSubclass():
                grads = [GRAD.__get__(param) for param in unit.params]
            for slot, grad in enumerate(grads):
                if grad is not None:
                    set_own_grad(unit.params[slot], None)
                    self._listen(unit, slot, unit.params[slot])
                    grad = local_grad(unit.params[slot], grad)
                    self._arrived[unit.index].append(Arrived(slot, grad, grad._version))


class _Arrival:
    """The prehook of one parameter: autograd calls it with the gradient. It runs for every parameter, so it does little."""

    __slots__ = ("_accumulated", "_arrived", "_index", "_is_dtensor", "_listener", "_num_params", "_param", "_slot", "_table")

    def __init__(
        self,
        listener: ArrivalListener,
        unit: Unit,
        slot: int,
        table: SharedTable | None,
        arrived: list[Arrived],
        accumulated: Accumulated,
    ) -> None:
        self._listener = weakref.ref(listener)
        self._index, self._slot, self._param, self._num_params = unit.index, slot, unit.params[slot], len(unit.params)
        self._table, self._arrived, self._accumulated = table, arrived, accumulated
        self._is_dtensor = is_dtensor(self._param)

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None]:
        listener = self._listener()
        if listener is not None:
            listener.begin_backward()
            grad = grads[0] if self._table is None else self._table.complete(grads)
            with torch._C.DisableTorchFunctionSubclass():
                is_trained = REQUIRES_GRAD.__get__(self._param)  # if it was frozen after the forward, autograd drops it too
                is_hooked = self._param._post_accumulate_grad_hooks  # refused now, before autograd calls it
            if grad is not None and is_trained:
                # Detached: with create_graph=True this list would hold the graph, which holds this hook.
                grad = grad.detach() if grad.requires_grad else grad
                if self._is_dtensor:
                    grad = local_grad(self._param, grad)
                self._arrived.append(Arrived(self._slot, grad, grad._version))
                if is_hooked or len(self._arrived) == self._num_params or self._accumulated.is_open:
                    listener.arrive(self._index)
        return _NOTHING


_NOTHING = (None,)  # for autograd: there is no gradient to accumulate
