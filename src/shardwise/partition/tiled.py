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
from shardwise.partition.raw import point_at, set_own_grad


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


class _StandIn(_Freed):
    """A view of a tiled parameter, without memory."""

    is_tiled = True
    param: TiledParameter
    has_history: bool
    """Whether autograd would record operations on it."""

    def _begin(self, param: TiledParameter, *, has_history: bool) -> None:
        self.param, self.has_history, self._shardwise = param, has_history, param._shardwise

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations that bypass `__torch_function__`."""
        first = next(value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, _StandIn))
        raise refusal(first, f"{getattr(func, '_opname', func)}")

    def detached(self) -> _StandIn:
        """The same view, without history."""
        raise NotImplementedError

    @property
    def requires_grad(self) -> bool:
        """Whether autograd would record operations on it."""
        return self.has_history and self.param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        raise refusal(self, "training a view")

    def requires_grad_(self, requires_grad: bool = True) -> _StandIn:
        """Refused: a view without memory cannot be trained."""
        if requires_grad != self.requires_grad:
            raise refusal(self, "training a view")
        return self

    @property
    def data(self) -> torch.Tensor:
        """The view without history."""
        return self.detached()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise refusal(self, "set_")

    def _strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.shape), tuple(torch.Tensor.stride(self))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        name = self._shardwise.unit.layout.slots[0].name
        return f"{type(self).__name__}(of {name!r}, shape={list(self.shape)}, dtype={self.dtype})"


class TiledView(_StandIn):
    """A tiled parameter as `.data`, `.detach()` or `.t()` give it: the same tiles, seen otherwise."""

    is_transposed: bool

    @staticmethod
    def of(param: TiledParameter, *, is_transposed: bool, has_history: bool) -> TiledView:
        """Make the stand-in; only a matrix can be transposed."""
        shape, stride = param._strides()
        if is_transposed:
            shape, stride = shape[::-1], stride[::-1]
        stand_in: TiledView = torch.Tensor._make_wrapper_subclass(
            TiledView, shape, strides=stride, dtype=param.dtype, device=param.device
        )
        stand_in._begin(param, has_history=has_history)
        stand_in.is_transposed = is_transposed
        return stand_in

    def detached(self) -> TiledView:
        """The same view, without history."""
        return TiledView.of(self.param, is_transposed=self.is_transposed, has_history=False)

    def seen(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of a copy of the whole parameter."""
        whole = whole if self.has_history else whole.detach()
        return whole.t() if self.is_transposed else whole


class TiledRow(_StandIn):
    """`weight[3]` of a tiled parameter, as a loop over experts reads it, or a view of that. One tile has all of it."""

    row: int
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    """The views to take of the row, one after the other."""

    @staticmethod
    def of(
        param: TiledParameter,
        row: int,
        *,
        has_history: bool,
        steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
        twin: torch.Tensor | None = None,
    ) -> TiledRow:
        """Make the stand-in. `twin`: a meta tensor with its shape and strides, if it is not the row itself."""
        shape, stride = (size[1:] for size in param._strides())
        if twin is not None:
            shape, stride = tuple(twin.shape), tuple(twin.stride())
        stand_in: TiledRow = torch.Tensor._make_wrapper_subclass(
            TiledRow, shape, strides=stride, dtype=param.dtype, device=param.device
        )
        stand_in._begin(param, has_history=has_history)
        stand_in.row, stand_in.steps = row, steps
        return stand_in

    def detached(self) -> TiledRow:
        """The same view, without history."""
        return TiledRow.of(self.param, self.row, has_history=False, steps=self.steps, twin=self._twin())

    def viewed(self, take: Callable[[torch.Tensor], Any]) -> TiledRow | None:
        """What `take` gives, as another stand-in; None if that is not one view."""
        twin = self._twin()
        found = take(twin)
        if not isinstance(found, torch.Tensor) or found.dtype != twin.dtype or not (found is twin or found._is_view()):
            return None
        return TiledRow.of(self.param, self.row, has_history=self.has_history, steps=(*self.steps, take), twin=found)

    def seen(self, row: torch.Tensor) -> torch.Tensor:
        """The same view of the row's values."""
        for take in self.steps:
            row = take(row)
        return row


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
