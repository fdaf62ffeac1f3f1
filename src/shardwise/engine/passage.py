"""One forward call and its way back: which Units it opened, and how autograd says when its backward begins and ends.

Autograd runs ready nodes in reverse order of creation. A hook on a call's outputs therefore runs before anything the call
computed, and a hook on its inputs after all of it, provided the input is itself a computed tensor: a leaf's gradient
is delivered at once, so leaves are passed on as views, whose node is as old as the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from shardwise.engine.nested import map_tensors, tensors_in
from shardwise.partition import ShardedParameter, Unit


class BackwardListener(Protocol):
    """Who is told when the backward of a forward call begins and ends."""

    def before_backward(self, units: Sequence[tuple[Unit, int]], nested: Sequence[tuple[Unit, int]], passage: Passage) -> None:
        """Autograd is about to run the backward of a call; Units come with the version its graph was built on."""

    def announce(self, units: Iterable[Unit]) -> None:
        """Gradients of these Units are about to come, without their parameters being read."""

    def release(self, units: Iterable[Unit], passage: Passage) -> None:
        """The backward of a call is over."""


class Passage:
    """A forward call's way back: Units are gathered when its outputs' gradients come, released when its inputs' are there."""

    def __init__(self, listener: BackwardListener) -> None:
        self._listener = listener
        self._units: tuple[tuple[Unit, int], ...] = ()
        self._nested: tuple[tuple[Unit, int], ...] = ()
        self._num_missing = 0

    def watch(self, inputs: Any) -> Any:
        """End when all inputs that need a gradient have theirs (or, without any, with the whole backward).

        Returns the inputs to use instead, or None if they are fine as they are.
        """
        replaced = None
        if any(_is_plain_leaf(t) for t in tensors_in(inputs)):
            inputs = replaced = map_tensors(lambda t: t.view_as(t) if _is_plain_leaf(t) else t, inputs)
        for tensor in tensors_in(inputs):
            if not isinstance(tensor, ShardedParameter) and tensor.requires_grad:
                self._num_missing += 1
                _register_first(tensor, self._end)
        return replaced

    def guard(self, output: Any, units: Sequence[Unit], nested: Sequence[Unit], *, reads_params: bool) -> None:
        """Have autograd call before it runs the backward of anything this call computed."""
        self._units = tuple((unit, unit.version) for unit in units)
        self._nested = tuple((unit, unit.version) for unit in nested)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin if reads_params else self._announce)

    def _begin(self, _: torch.Tensor) -> None:
        self._listener.before_backward(self._units, self._nested, self)

    def _announce(self, _: torch.Tensor) -> None:
        self._listener.announce(unit for unit, _ in (*self._units, *self._nested))

    def _end(self, _: torch.Tensor) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._listener.release((unit for unit, _ in self._units), self)


class Frame:
    """One forward call that is running now."""

    def __init__(self, passage: Passage | None) -> None:
        self.passage = passage
        self.opened: list[Unit] = []  # every Unit whose scopes this call counts in
        self.units: list[Unit] = []  # Units this call opened: released when its backward is over
        self.nested: list[Unit] = []  # Units some outer call has open anyway


def _is_plain_leaf(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, ShardedParameter) and tensor.requires_grad and tensor.is_leaf


def _register_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Have `hook` run before those registered so far: this call's Units are freed before the ones upstream are gathered."""
    earlier = dict(tensor._backward_hooks or {})
    tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    assert hooks is not None
    for number, other in earlier.items():  # autograd walks the dictionary in order of insertion
        del hooks[number]
        hooks[number] = other
