"""Inside a torch.func transform every operation is recorded by it: moving parameters must happen outside."""

from __future__ import annotations

import contextlib

import torch

_NOTHING = contextlib.nullcontext()


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Step out of whatever torch.func transforms (`grad`, `vmap`, ...) are running."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    context: contextlib.AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return context
