"""Reads and sets torch's own `.data`, `.grad` and `.requires_grad` of a parameter, past the overrides of its class."""

from __future__ import annotations

from typing import Any

import torch

DATA: Any = torch.Tensor.data
"""torch's own attribute, for parameters whose class overrides `.data`."""
GRAD: Any = torch.Tensor.grad
"""torch's own `.grad`."""
REQUIRES_GRAD: Any = torch.Tensor.requires_grad
"""torch's own `.requires_grad`."""


def own_data(param: torch.Tensor) -> torch.Tensor:
    """`param.data`, without recording that user code has taken an alias."""
    data: torch.Tensor = DATA.__get__(param)
    return data


def point_at(param: torch.Tensor, data: torch.Tensor) -> None:
    """`param.data = data`, past the setter of the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        DATA.__set__(param, data)


def own_grad(param: torch.Tensor) -> torch.Tensor | None:
    """`param.grad` as torch keeps it, past the property of the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = GRAD.__get__(param)
    return grad


def set_own_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """`param.grad = grad`, past the setter of the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        GRAD.__set__(param, grad)
