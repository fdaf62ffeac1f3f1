"""What state a Unit is in, which moves are allowed, and what a parameter is while its Unit is freed.

A parameter keeps its identity for life: the same object sits in the module, in the user's lists and in autograd's
graph. Its class says what is in memory: `ShardedParameter` while its Unit is gathered, `FreedParameter` while it
is not (`docs/decisions/0001-freed-parameters.md`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shardwise.errors import FreedParameterError, LifecycleError

if TYPE_CHECKING:
    from shardwise.partition.unit import Unit


class UnitState(enum.Enum):
    """What of a Unit's parameters is in memory."""

    SHARDED = "the shard only"
    GATHERING = "the shard, and a full vector that is being filled"
    GATHERED = "the shard and the full vector; parameters are usable"


_MOVES = {
    UnitState.SHARDED: {UnitState.GATHERING},
    UnitState.GATHERING: {UnitState.GATHERED, UnitState.SHARDED},  # back if the gather failed
    UnitState.GATHERED: {UnitState.SHARDED},
}


def check_move(unit_name: str, now: UnitState, to: UnitState) -> None:
    """Raise unless the move is in the table."""
    if to not in _MOVES[now]:
        raise LifecycleError(f"Unit {unit_name!r} cannot go from {now.name} to {to.name}: a broken invariant.")


class Owner(Protocol):
    """Whoever answers for a Unit: decides what a touch means and where gradients are."""

    allows_optimizer: bool
    """Whether an optimizer may be built on freed parameters (before `shard`, which then replaces them)."""

    def touch(self, units: Sequence[Unit]) -> bool:
        """Gather `units`, all at once, if a touch may do that now; False means the touch is a mistake."""

    def remedy(self) -> str:
        """What the user should do instead of touching a freed parameter."""

    def local_grad(self, handle: Handle) -> torch.Tensor | None:
        """What `parameter.grad` answers."""

    def set_local_grad(self, handle: Handle, grad: torch.Tensor | None) -> None:
        """What assigning `parameter.grad` does."""


@dataclasses.dataclass(frozen=True)
class Handle:
    """The one attribute a managed parameter carries: its Unit and its place there."""

    unit: Unit
    slot: int


class ShardedParameter(nn.Parameter):
    """A parameter of a gathered Unit: an ordinary parameter whose gradient lives in shards."""

    _shardwise: Handle
    _user_class: type[nn.Parameter] = nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """None, or an error naming the remedy if the gradient is in the shards (stage 0: the gradient)."""
        return self._shardwise.unit.owner.local_grad(self._shardwise)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._shardwise.unit.owner.set_local_grad(self._shardwise, value)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """A copy is an ordinary parameter with its own memory."""
        if id(self) not in memo:
            memo[id(self)] = self._user_class(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


# Answered from the placeholder, which has the true shape, dtype and device and no values.
_METADATA = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "ndim",
        "names",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "is_complex",
        "is_floating_point",
        "is_signed",
        "is_inference",
        "itemsize",
        "nbytes",
        "numel",
        "nelement",
        "size",
        "dim",
        "element_size",
        "__hash__",
        "__dir__",
        "grad_fn",
        "_version",
        "retains_grad",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "_base",
        "_grad",
        "_is_view",
        "get_device",
        "output_nr",
        "is_sparse_csr",
        "is_xla",
        "is_mps",
        "is_xpu",
        "is_vulkan",
        "is_maia",
        "is_ipu",
        "is_mtia",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__torch_function__",
        "is_shared",
        "is_pinned",
    }
)


class FreedParameter(ShardedParameter):
    """A parameter whose Unit is freed: shape, dtype, name and place stay; touching its values raises or gathers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Answer metadata; let the owner gather if this touch is inside a forward; otherwise raise."""
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _METADATA or func is torch.autograd.grad:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        freed = [value for value in _flatten((args, kwargs)) if isinstance(value, FreedParameter)]
        if name in ("stride", "is_contiguous") and len(freed) == 1:
            with torch._C.DisableTorchFunctionSubclass():
                return func(freed[0]._shardwise.unit.blank(freed[0]._shardwise.slot), *args[1:], **kwargs)
        if name == "is_leaf" and all(param._shardwise.unit.owner.allows_optimizer for param in freed):
            return True
        for owner in {id(param._shardwise.unit.owner): param._shardwise.unit.owner for param in freed}.values():
            touched = [param for param in freed if param._shardwise.unit.owner is owner]
            if not owner.touch(list(dict.fromkeys(param._shardwise.unit for param in touched))):
                raise _touched(touched[0], name)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        unit = self._shardwise.unit
        slot = unit.layout.slots[self._shardwise.slot]
        return f"FreedParameter({slot.name!r}, shape={list(slot.shape)}, dtype={self.dtype}, unit={unit.name!r})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise _touched(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _touched(self, "pickle")


def _touched(param: FreedParameter, what: str) -> FreedParameterError:
    unit = param._shardwise.unit
    slot = unit.layout.slots[param._shardwise.slot]
    return FreedParameterError(
        f"{what} on parameter {slot.name!r} (shape {list(slot.shape)}, Unit {unit.name!r}, rank {unit.rank}): only this "
        f"rank's shard is in memory outside the forward pass. {unit.owner.remedy()}"
    )


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        return attribute if name == "__get__" else f"setting .{attribute}"
    return name


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flatten(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flatten(item)]
    return [value]


@functools.cache
def managed_classes(cls: type[nn.Parameter]) -> tuple[type[ShardedParameter], type[FreedParameter]]:
    """The (gathered, freed) classes for parameters of class `cls`, which may be one of them already."""
    if issubclass(cls, ShardedParameter):
        cls = cls._user_class
    if cls is nn.Parameter:
        return ShardedParameter, FreedParameter
    gathered = type(f"Sharded{cls.__name__}", (ShardedParameter, cls), {"_user_class": cls})
    freed = type(f"Freed{cls.__name__}", (FreedParameter, cls), {"_user_class": cls})
    return gathered, freed
