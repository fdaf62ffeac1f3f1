"""What torch itself keeps of a parameter: value, gradient and flag, past whatever the parameter's class answers."""

from __future__ import annotations

from typing import Any

import torch

DATA: Any = torch.Tensor.data
"""The attribute itself, for classes that answer `.data` their own way."""
GRAD: Any = torch.Tensor.grad
"""The same for `.grad`."""
REQUIRES_GRAD: Any = torch.Tensor.requires_grad
"""The same for the flag."""


def own_data(param: torch.Tensor) -> torch.Tensor:
    """`param.data`, without the note that user code has taken an alias."""
    data: torch.Tensor = DATA.__get__(param)
    return data


def point_at(param: torch.Tensor, data: torch.Tensor) -> None:
    """`param.data = data`, whatever the parameter's class makes of an assignment."""
    with torch._C.DisableTorchFunctionSubclass():
        DATA.__set__(param, data)


def own_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd accumulated in a parameter itself, whatever its class answers."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = GRAD.__get__(param)
    return grad


def set_own_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Replace that gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        GRAD.__set__(param, grad)
