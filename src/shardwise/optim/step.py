"""Hooks on the user's `optimizer.step()`: they tell the runtime, unguard the pieces, and run a streamed update if there is one.

Outside a step the pieces are guarded (`guarded.py`); inside they are ordinary parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.optim.guarded import GuardedPiece


class StreamedUpdate(Protocol):
    """Runs in place of the body of a step."""

    @property
    def has_states(self) -> bool:
        """Whether any part has been updated."""

    def __call__(self) -> None:
        """Update everything that has a gradient."""


class StepListener(Protocol):
    """Is told about an optimizer's steps. The runtime implements it."""

    def before_step(self, has_closure: bool = False) -> None:
        """The optimizer is about to update."""

    def after_closure(self) -> None:
        """A closure that the optimizer called has ended."""

    def after_step(self) -> None:
        """The optimizer has updated."""

    def cleared(self, slots: Collection[tuple[int, int]], *, set_to_none: bool) -> None:
        """Gradients of these (Unit, slot) parameters were dropped or zeroed by `optimizer.zero_grad()`."""


class Step:
    """The steps of one optimizer. A step may be nested (a subclass's calls its parent's) or end with an error."""

    def __init__(
        self, listener: StepListener, stream: StreamedUpdate | None, *, is_guarded: bool, prepare: Callable[[Any], None]
    ) -> None:
        """`stream` runs in place of the step's body. `prepare(optimizer)` runs before the listener is told."""
        self._listener = listener
        self._stream = stream
        self._is_guarded = is_guarded
        self._prepare = prepare
        self._pieces: list[nn.Parameter] = []
        self._outermost: FrameType | None = None  # the call of step() that is running
        self._params: list[list[nn.Parameter]] | None = None  # every group's own, while the body of a streamed step runs

    @property
    def is_running(self) -> bool:
        """Whether a step runs now, its closure included."""
        return self._outermost is not None

    def guard(self, piece: nn.Parameter) -> None:
        """Guard a piece: only a step may use it."""
        self._pieces.append(piece)
        if self._is_guarded:
            piece.__class__ = GuardedPiece

    def open(self, *, is_open: bool = True) -> None:
        """Make the pieces ordinary parameters, or guard them again."""
        if self._is_guarded:
            wanted = nn.Parameter if is_open else GuardedPiece
            for piece in self._pieces:
                piece.__class__ = wanted

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Pre-hook of the optimizer's step."""
        caller = sys._getframe(1)
        if self._outermost is not None and _is_above(self._outermost, caller):
            return None  # a subclass's step calls its parent's, which calls this hook again
        self.recover(optimizer)
        self._prepare(optimizer)
        closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._listener.before_step(closure is not None)
        self._outermost = caller
        self._hide(optimizer)
        self.open()
        if closure is None:
            return None

        def followed() -> Any:
            self._show(optimizer)
            self.open(is_open=False)
            loss = closure()
            self._listener.after_closure()
            self._hide(optimizer)
            self.open()
            return loss

        return (args[0],), {**kwargs, "closure": followed}

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Post-hook of the optimizer's step. A streamed update runs here: the body was given no parameters."""
        if sys._getframe(1) is not self._outermost:
            return
        self._show(optimizer)
        if self._stream is not None:
            self._stream()
        self._outermost = None
        self.open(is_open=False)
        self._listener.after_step()

    def recover(self, optimizer: torch.optim.Optimizer) -> None:
        """Clean up after a step that raised, in its body or in another hook, so that `end` was not called."""
        self._show(optimizer)
        self.open(is_open=False)
        self._outermost = None

    def _hide(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stream is not None:
            self._params = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = []

    def _show(self, optimizer: torch.optim.Optimizer) -> None:
        if self._params is not None:
            for group, params in zip(optimizer.param_groups, self._params, strict=False):
                group["params"] = [*params, *group["params"]]
            self._params = None


def _is_above(frame: FrameType, below: FrameType | None) -> bool:
    """Whether `frame` is `below` or one of its callers."""
    while below is not None:
        if below is frame:
            return True
        below = below.f_back
    return False
