"""Parameters that tensor parallelism has divided: DTensors, which stay DTensors while their local tensors are sharded.

The wrapper, its mesh, placements and global shape are never touched. Its local tensor is a view of the Unit's full vector while
the Unit is gathered, and a placeholder while it is freed. This file has what only DTensors need: which box of the whole a local
tensor is, their classes while gathered and freed, and gradients that must be made whole before they are reduced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ModelError
from shardwise.partition.layout import Part, storage_stride
from shardwise.partition.raw import DATA, is_dtensor, local_of, own_data, point_at, set_local


def part_of(name: str, param: torch.Tensor, ranks: Sequence[int]) -> Part | None:
    """Which box of the whole parameter this rank's local tensor is; None if it is all of it.

    `ranks`: those of this rank's dimension of tensor parallelism. Raises ModelError for a DTensor that is divided otherwise.
    """
    if not is_dtensor(param):
        return None
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    what = (
        f"parameter {name!r} is a DTensor with placements {tuple(placements)} on a mesh {mesh.mesh_dim_names or 'without names'}"
    )
    what += f" of ranks {mesh.mesh.tolist()}"
    if mesh.ndim != 1 or mesh.mesh.tolist() != list(ranks):
        raise ModelError(
            f"{what}. It must be divided over the 'tensor' dimension of the mesh that is given to sw.shard(), which has "
            f"{f'ranks {list(ranks)}' if ranks else 'none'} here: call parallelize_module(model, mesh['tensor'], plan) first, "
            "then sw.shard(model, optimizer, mesh=mesh)."
        )
    if type(placements[0]) not in (Shard, Replicate):
        raise ModelError(f"{what}; only Shard and Replicate can be sharded further.")
    if type(placements[0]) is Replicate:
        return None
    dim, whole = placements[0].dim, tuple(param.shape)
    length = -(-whole[dim] // len(ranks))  # as torch.chunk divides
    start = min(mesh.get_local_rank() * length, whole[dim])
    shape = (*whole[:dim], min(length, whole[dim] - start), *whole[dim + 1 :])
    if tuple(local_of(param).shape) != shape:
        raise ModelError(f"{what}: its local tensor has shape {list(local_of(param).shape)}, and {list(shape)} was expected.")
    with torch._C.DisableTorchFunctionSubclass():
        origin = tuple(start if number == dim else 0 for number in range(len(whole)))
        return Part(origin, whole, storage_stride(whole, param.stride()))


def local_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor's gradient, placed as the parameter is: partial sums are added up by all tensor ranks."""
    if not is_dtensor(grad):
        return grad
    if grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    local: torch.Tensor = grad._local_tensor  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local  # a collective that runs in the background


class Form(NamedTuple):
    """How a DTensor is placed, without its values."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """The form of a DTensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return Form(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())  # type: ignore[attr-defined]

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor of this form around a local tensor."""
        from torch.distributed.tensor import DTensor

        found: torch.Tensor = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return found


def like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A local tensor as the DTensor that `param` is; itself if `param` is an ordinary tensor."""
    return Form.of(param).wrap(local) if is_dtensor(param) else local


def full_of(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The whole value of which a parameter's local value is a part. All tensor ranks must call."""
    return like(param, local.detach()).full_tensor() if is_dtensor(param) else local  # type: ignore[attr-defined]


def set_values(param: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole value into a DTensor. Nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    own_data(param).copy_(own_data(distribute_tensor(whole, mesh, placements, src_data_rank=None)))


def retype(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of a DTensor, which an assignment to its local tensor does not."""
    if not is_dtensor(param) or param.dtype == dtype:
        return
    other = like(param, torch.empty_like(own_data(param), dtype=dtype))
    with torch._C.DisableTorchFunctionSubclass():
        DATA.__set__(param, other)
    param._spec = other._spec  # type: ignore[attr-defined]
    set_local(param, own_data(other))


def assign(param: torch.Tensor, value: torch.Tensor) -> None:
    """`param.data = value`; a DTensor takes the local tensor of a DTensor like it."""
    if not is_dtensor(param):
        DATA.__set__(param, value)
        return
    if not is_dtensor(value) or value.placements != param.placements or value.shape != param.shape:  # type: ignore[attr-defined]
        raise ModelError(
            f"setting .data of a parameter that is a DTensor of shape {list(param.shape)} with placements "
            f"{tuple(param.placements)}: a DTensor of the same shape and placements is needed."  # type: ignore[attr-defined]
        )
    point_at(param, own_data(value))


class FreedDTensor:
    """What a divided parameter's class has besides while its Unit is freed: DTensor's own methods are operations on it."""

    _shardwise: Any

    def _strides(self: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(self.shape), self.stride()

    def to_local(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather, and return the local tensor."""
        return self._run("to_local", args, kwargs)

    def full_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather, and return the whole tensor."""
        return self._run("full_tensor", args, kwargs)

    def redistribute(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather, and return the tensor with other placements."""
        return self._run("redistribute", args, kwargs)

    def _run(self: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.distributed.tensor import DTensor

        return type(self).__torch_function__(getattr(DTensor, name), (type(self),), (self, *args), kwargs)

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        unit = self._shardwise.unit
        name = unit.layout.slots[self._shardwise.slot].name
        return f"FreedParameter({name!r}, shape={list(self.shape)}, placements={tuple(self.placements)}, unit={unit.name!r})"


_Gathered = TypeVar("_Gathered", bound=nn.Parameter)
_Freed = TypeVar("_Freed", bound=nn.Parameter)


@functools.cache
def dtensor_classes(cls: type, gathered: type[_Gathered], freed: type[_Freed]) -> tuple[type[_Gathered], type[_Freed]]:
    """The classes of a divided parameter, made of those of an ordinary one."""
    return (
        type(f"Sharded{cls.__name__}", (gathered, cls), {"_user_class": cls}),
        type(f"Freed{cls.__name__}", (FreedDTensor, freed, cls), {"_user_class": cls}),
    )
