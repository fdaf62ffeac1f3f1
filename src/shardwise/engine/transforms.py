"""Leaves torch.func transforms while the engine moves parameters, because a transform would record those operations."""

from __future__ import annotations

import contextlib

import torch

_NOTHING = contextlib.nullcontext()


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """A context in which no torch.func transform (`grad`, `vmap`, ...) is active."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    context: contextlib.AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return context
