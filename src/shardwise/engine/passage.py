"""One forward call, and how autograd says when its backward begins and ends.

Autograd runs ready nodes in reverse order of creation. A hook on a call's outputs therefore runs before anything the call
computed, and a hook on the youngest of its inputs after everything that it computed.

Both are hints: they gather a Unit before its first use in backward and free it after the last. What is missed is gathered when
autograd asks for it (`saved.py`) and freed at the end of the backward. The graph itself stays as plain torch would make it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from shardwise.engine.nested import map_tensors, tensors_in
from shardwise.partition import ShardedParameter, Unit


class BackwardListener(Protocol):
    """Who is told when the backward of a forward call begins and ends."""

    def before_backward(self, units: Iterable[Unit], passage: Passage) -> None:
        """Autograd is about to run the backward of a call that used these Units."""

    def release(self, units: Iterable[Unit], passage: Passage) -> None:
        """The backward of a call is over."""


class Passage:
    """A forward call's way back: Units are gathered when its outputs' gradients come, released when its inputs' are there."""

    def __init__(self, listener: BackwardListener) -> None:
        self._listener = listener
        self._units: tuple[Unit, ...] = ()
        self._inputs: set[int] = set()

    def watch(self, inputs: Any) -> Any:
        """End when the first of the inputs has its whole gradient (or, if none needs one, with the whole backward).

        Returns the inputs to use instead: a leaf outlives the call, and hooks would pile up on it, so it is passed on as a view.
        """

        def watched(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, ShardedParameter) or not tensor.requires_grad:
                return tensor
            if tensor.is_leaf:
                tensor = tensor.view_as(tensor)
            self._inputs.add(id(tensor))
            tensor.register_hook(self._end)
            _put_last(tensor, Passage._begin)
            return tensor

        return map_tensors(watched, inputs)

    def guard(self, output: Any, units: Sequence[Unit]) -> None:
        """Have autograd call before it runs the backward of anything this call computed."""
        self._units = tuple(units)
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in self._inputs:  # not handed through
                tensor.register_hook(self._begin)

    def _begin(self, _: torch.Tensor) -> None:
        self._listener.before_backward(self._units, self)

    def _end(self, _: torch.Tensor) -> None:
        if self._units:
            self._listener.release(self._units, self)


def _put_last(tensor: torch.Tensor, method: Any) -> None:
    """Have a tensor's hooks that are this method run after its others: the call that made the tensor announces its backward
    when the one that took it has ended.

    Autograd walks the hooks in the order in which they were put into the dictionary, so they are taken out and put in again.
    """
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        for key in [key for key, hook in hooks.items() if getattr(hook, "__func__", None) is method]:
            hooks[key] = hooks.pop(key)


class Frame:
    """One forward call that is running now."""

    __slots__ = ("entries", "hooks", "is_pinning", "is_root", "opened", "passage", "units")

    def __init__(self, entries: object, passage: Passage | None, *, is_root: bool = False) -> None:
        self.entries = entries  # what the call's module opens: tells its leave from another's
        self.passage = passage
        self.is_root = is_root  # the whole model's own forward
        self.hooks: contextlib.AbstractContextManager[Any] | None = None  # on what autograd saves, if this call put them there
        self.is_pinning = False  # hooks are not allowed here: Units stay gathered until the next step
        self.opened: list[Unit] = []  # every Unit whose scopes this call counts in
        self.units: list[Unit] = []  # Units this call opened: released when its backward is over

    def stop_keeping_places(self) -> None:
        """The call is over: autograd saves as it would without us, if this call had changed that."""
        if self.hooks is not None:
            self.hooks.__exit__(None, None, None)
