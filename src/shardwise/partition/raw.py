"""Reads and sets torch's own `.data`, `.grad` and `.requires_grad` of a parameter, past the overrides of its class.

A DTensor (tensor parallelism) is a wrapper without memory around a local tensor. What a Unit holds of it is the local tensor, so
here its data, address and version are those of the local one; no other file has to know.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

DATA: Any = torch.Tensor.data
"""torch's own attribute, for parameters whose class overrides `.data`."""
GRAD: Any = torch.Tensor.grad
"""torch's own `.grad`."""
REQUIRES_GRAD: Any = torch.Tensor.requires_grad
"""torch's own `.requires_grad`."""


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor. Their module is not imported for this: it is slow, and without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def even_numel(param: torch.Tensor) -> int:
    """Elements of a parameter on the rank that has most of it: the same number on every rank, also if it is divided unevenly."""
    if not is_dtensor(param):
        return param.numel()
    shape = list(param.shape)
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):  # type: ignore[attr-defined]
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return math.prod(shape)


def own_data(param: torch.Tensor) -> torch.Tensor:
    """`param.data`, without recording that user code has taken an alias."""
    data: torch.Tensor = DATA.__get__(local_of(param))
    return data


def point_at(param: torch.Tensor, data: torch.Tensor) -> None:
    """`param.data = data`, past the setter of the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        if is_dtensor(param):
            set_local(param, data)
        else:
            DATA.__set__(param, data)


def set_local(param: torch.Tensor, data: torch.Tensor) -> None:
    """Give a DTensor another local tensor of the same shape."""
    param._local_tensor = data  # type: ignore[attr-defined]


def address_of(param: torch.Tensor) -> int:
    """Where a parameter's values are."""
    return local_of(param).data_ptr()


def version_of(param: torch.Tensor) -> int:
    """A number that grows with every write that autograd counts, through a DTensor or through its local tensor."""
    return param._version + param._local_tensor._version if is_dtensor(param) else param._version  # type: ignore[attr-defined]


def own_grad(param: torch.Tensor) -> torch.Tensor | None:
    """`param.grad` as torch keeps it, past the property of the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = GRAD.__get__(param)
    return grad


def set_own_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """`param.grad = grad`, past the setter of the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        GRAD.__set__(param, grad)
