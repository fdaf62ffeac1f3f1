"""Finds out when the backward of one forward call begins and ends, by hooks on the call's outputs and inputs.

Autograd runs ready nodes in reverse order of creation. So a hook on a call's outputs runs before the backward of everything
that the call computed, and a hook on its most recent input runs after that.

Both are hints: they gather a Unit before its first use in backward and free it after the last. A Unit that they miss is gathered
when autograd unpacks a Place of it (`saved.py`) and freed at the end of the backward. Called by the runtime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from shardwise.engine.nested import map_tensors, tensors_in
from shardwise.engine.saved import SavedPlaces
from shardwise.partition import ShardedParameter, Unit


class BackwardListener(Protocol):
    """Is told when the backward of a forward call begins and ends: the runtime."""

    def before_backward(self, units: Iterable[Unit], passage: Passage) -> None:
        """Autograd is about to run the backward of a call that used these Units."""

    def release(self, units: Iterable[Unit], passage: Passage) -> None:
        """The backward of a call has ended."""


class Passage:
    """The backward of one forward call: its Units are gathered when an output gets its gradient, released when an input does."""

    def __init__(self, listener: BackwardListener) -> None:
        self._listener = listener
        self._units: tuple[Unit, ...] = ()
        self._inputs: set[int] = set()

    def watch(self, inputs: Any) -> Any:
        """Hook the inputs: the passage ends when the first of them has its gradient, or with the backward if none needs one.

        Returns the inputs to use instead. A leaf is replaced by a view, because it outlives the call and would collect hooks.
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
        """Hook the outputs: autograd calls `_begin` before it runs the backward of anything that this call computed."""
        self._units = tuple(units)
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in self._inputs:  # not an input
                tensor.register_hook(self._begin)

    def _begin(self, _: torch.Tensor) -> None:
        self._listener.before_backward(self._units, self)

    def _end(self, _: torch.Tensor) -> None:
        if self._units:
            self._listener.release(self._units, self)


def _put_last(tensor: torch.Tensor, method: Any) -> None:
    """Move the hooks of a tensor that are bound to `method` behind its other hooks.

    So the passage of the call that uses the tensor ends before the passage of the call that made it begins. Autograd runs hooks
    in the order of this dictionary, so they are removed and inserted again.
    """
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        for key in [key for key, hook in hooks.items() if getattr(hook, "__func__", None) is method]:
            hooks[key] = hooks.pop(key)


class Frame:
    """One forward call that is running now."""

    __slots__ = ("entries", "hooks", "is_lookup", "is_pinning", "is_root", "opened", "passage", "units")

    def __init__(self, entries: object, passage: Passage | None, *, is_root: bool = False, is_lookup: bool = False) -> None:
        self.entries = entries  # what the module opens; `leave` recognises its own call by it
        self.passage = passage
        self.is_root = is_root  # whether it is the model's own forward
        self.is_lookup = is_lookup  # whether its backward does not read the parameter: see `lookups.py`
        self.hooks: contextlib.AbstractContextManager[Any] | None = None  # saved-tensor hooks that this call installed
        self.is_pinning = False  # saved-tensor hooks are not allowed here: Units stay gathered until the next step
        self.opened: list[Unit] = []  # every Unit whose `scopes` this call has incremented
        self.units: list[Unit] = []  # Units that are released when the backward of this call has ended

    def keep_places(self, saved: SavedPlaces) -> None:
        """Have autograd save Places until `stop_keeping_places`, or keep Units gathered if that is not possible here."""
        try:
            self.hooks = saved.begin()
        except LookupError:
            self.is_pinning = True

    def stop_keeping_places(self) -> None:
        """Remove the saved-tensor hooks that this call installed, if any."""
        if self.hooks is not None:
            self.hooks.__exit__(None, None, None)
