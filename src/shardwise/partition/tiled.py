"""A parameter that is cut into tiles, as the model holds it. It never has memory of its own, except inside `run.gathered`.

Each tile is a Unit of its own, whose only parameter no module holds (`Unit.held` is the tiled one). Operations on the tiled
parameter go to its owner, which runs them tile by tile or on a temporary copy of the whole. Made by the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.errors import FreedParameterError
from shardwise.partition.freed import FreedParameter, ShardedParameter, _Freed, managed_classes, refusal
from shardwise.partition.lifecycle import Handle
from shardwise.partition.raw import REQUIRES_GRAD, point_at, set_own_grad


class TiledParameter(FreedParameter):
    """A parameter cut into tiles. It keeps its shape, dtype, name and identity; its owner runs operations on it."""

    is_tiled = True

    def _strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        slot = self._shardwise.unit.layout.slots[self._shardwise.slot]
        return slot.param_shape, slot.stride

    @property
    def data(self) -> torch.Tensor:
        """The parameter without history, as a `TiledView`."""
        return TiledView.of(self, is_transposed=False, has_history=False)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self or (isinstance(value, TiledView) and value.param is self and not value.is_transposed):
            return
        is_fitting = isinstance(value, torch.Tensor) and value.shape == self.shape and value.dtype == self.dtype
        if not is_fitting or value.device != self.device:
            raise refusal(self, "setting .data")
        with torch.no_grad():
            torch.Tensor.copy_(self, value)
        for unit, slot in self._shardwise.places:
            unit.rebind(slot)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, because there is no storage to set."""
        raise refusal(self, "set_")

    @property
    def requires_grad(self) -> bool:
        """As `Tensor.requires_grad`; its tiles follow."""
        flag: bool = REQUIRES_GRAD.__get__(self)
        return flag

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        REQUIRES_GRAD.__set__(self, value)
        for unit, slot in self._shardwise.places:
            unit.params[slot].requires_grad = value

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Refused: the whole gradient never exists."""
        raise self._refuse_hooks("register_hook()")

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        """Refused: the whole gradient never exists."""
        raise self._refuse_hooks("register_post_accumulate_grad_hook()")

    def _refuse_hooks(self, what: str) -> FreedParameterError:
        name = self._shardwise.unit.layout.slots[0].name
        return FreedParameterError(
            f"{what} on parameter {name!r}: it is cut into tiles, whose gradients are reduced one by one, so that the hook would "
            f"never get a whole one. Read run.grad({name!r}) after backward(), or raise Tiling(max_bytes=...) for it."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            raise refusal(self, "deepcopy")
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        unit = self._shardwise.unit
        slot = unit.layout.slots[self._shardwise.slot]
        num_tiles = len(self._shardwise.slots)
        return f"TiledParameter({slot.name!r}, shape={list(slot.param_shape)}, dtype={self.dtype}, tiles={num_tiles})"


class TiledView(_Freed):
    """A tiled parameter as `.data`, `.detach()` or `.t()` give it: the same tiles, seen otherwise, without memory."""

    is_tiled = True
    param: TiledParameter
    is_transposed: bool
    has_history: bool
    """Whether autograd would record operations on it."""

    @staticmethod
    def of(param: TiledParameter, *, is_transposed: bool, has_history: bool) -> TiledView:
        """Make the stand-in; only a matrix can be transposed."""
        shape, stride = param._strides()
        if is_transposed:
            shape, stride = shape[::-1], stride[::-1]
        stand_in: TiledView = torch.Tensor._make_wrapper_subclass(
            TiledView, shape, strides=stride, dtype=param.dtype, device=param.device
        )
        stand_in.param, stand_in.is_transposed, stand_in.has_history = param, is_transposed, has_history
        stand_in._shardwise = param._shardwise
        return stand_in

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations that bypass `__torch_function__`."""
        first = next(value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, TiledView))
        raise refusal(first, f"{getattr(func, '_opname', func)}")

    @property
    def requires_grad(self) -> bool:
        """Whether autograd would record operations on it."""
        return self.has_history and self.param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        raise refusal(self, "training a view")

    def requires_grad_(self, requires_grad: bool = True) -> TiledView:
        """Refused: a view without memory cannot be trained."""
        if requires_grad != self.requires_grad:
            raise refusal(self, "training a view")
        return self

    def seen(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of a copy of the whole parameter."""
        whole = whole if self.has_history else whole.detach()
        return whole.t() if self.is_transposed else whole

    @property
    def data(self) -> torch.Tensor:
        """The view without history."""
        return TiledView.of(self.param, is_transposed=self.is_transposed, has_history=False)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise refusal(self, "set_")

    def _strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.shape), tuple(torch.Tensor.stride(self))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        name = self._shardwise.unit.layout.slots[0].name
        return f"TiledView(of {name!r}, shape={list(self.shape)}, dtype={self.dtype})"


def adopt_tiled(param: nn.Parameter, handle: Handle) -> None:
    """Take over a parameter whose tiles are filled, and release its memory."""
    unit = handle.unit
    blank = torch.full((), float("nan"), dtype=unit.dtypes.compute, device=unit.blueprint.device)
    set_own_grad(param, None)
    conceal(param, blank.expand(unit.layout.slots[handle.slot].param_shape))
    param._shardwise = handle  # type: ignore[attr-defined]


def conceal(param: nn.Parameter, blank: torch.Tensor) -> None:
    """Make a parameter a tiled one that shows nothing but `blank`."""
    point_at(param, blank)
    param.__class__ = _tiled_class(type(param))


def reveal(param: nn.Parameter, whole: torch.Tensor) -> None:
    """Let a tiled parameter show a copy of all its tiles."""
    param.__class__ = managed_classes(type(param))[0]
    point_at(param, whole)


@functools.cache
def _tiled_class(cls: type[nn.Parameter]) -> type[TiledParameter]:
    if issubclass(cls, ShardedParameter):
        cls = cls._user_class
    if cls is nn.Parameter:
        return TiledParameter
    return type(f"Tiled{cls.__name__}", (TiledParameter, cls), {"_user_class": cls})
