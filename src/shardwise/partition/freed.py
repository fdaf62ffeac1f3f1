"""The classes of a parameter while its Unit is gathered and while it is freed.

A parameter is a `ShardedParameter` while its Unit is gathered and a `FreedParameter` while it is freed
(`docs/decisions/0001-freed-parameters.md`). A view that user code takes of a freed parameter (`p.data`, `p.view(-1)`) is a
`FreedView`: it knows where it lies in the parameter, but has no values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

from shardwise.errors import FreedParameterError
from shardwise.partition.dtensors import assign, dtensor_classes, like
from shardwise.partition.lifecycle import Handle
from shardwise.partition.operations import CASTS, CONVERSIONS, GEOMETRY, METADATA, PAST_PYTHON, REMEDIES, is_overwrite, name_of
from shardwise.partition.raw import DATA, REQUIRES_GRAD, address_of, is_dtensor, own_data


class ShardedParameter(nn.Parameter):
    """A parameter of a gathered Unit: an ordinary parameter whose gradient lives in shards."""

    _shardwise: Handle
    _user_class: type[nn.Parameter] = nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """None if there is no gradient; at stage 0 the gradient; else an error, because it is in the shards."""
        return self._shardwise.unit.owner.local_grad(self._shardwise)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._shardwise.unit.owner.set_local_grad(self._shardwise, value)

    @property
    def data(self) -> torch.Tensor:
        """An alias that autograd does not track; the Unit records that user code may write through it."""
        alias: torch.Tensor = DATA.__get__(self)
        self._shardwise.unit.writes.add_alias(self._shardwise.slot, alias)
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:  # `module.to()` assigns a parameter to itself where nothing changes
            assign(self, value)

    @property
    def requires_grad(self) -> bool:
        """As `Tensor.requires_grad`; the owner is told when it is set."""
        flag: bool = REQUIRES_GRAD.__get__(self)
        return flag

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        REQUIRES_GRAD.__set__(self, value)
        self._shardwise.unit.owner.flagged(self._shardwise, value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Freeze or unfreeze."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """A copy is an ordinary parameter with its own memory."""
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary parameter with its own memory."""
        return self._copied().__reduce_ex__(protocol)

    def _copied(self) -> nn.Parameter:
        copied = like(self, own_data(self).clone(memory_format=torch.preserve_format))
        return nn.Parameter(copied, self.requires_grad) if is_dtensor(copied) else self._user_class(copied, self.requires_grad)


class _Freed(torch.Tensor):
    """Base class of freed parameters and their views: passes operations to the owner."""

    _shardwise: Handle
    is_tiled = False
    """Whether it stands for several Units: a parameter that is cut into tiles, or a view of one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Answer metadata from the placeholder; have the owner gather and run any other operation."""
        kwargs = kwargs or {}
        name = name_of(func)
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _differentiate(func, args, kwargs)
        if name in METADATA:
            if name.startswith("new_") and isinstance(args[0], FreedView):
                args = (torch.empty((), dtype=args[0].dtype, device=args[0].device), *args[1:])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        touched = [value for value in _flatten((args, kwargs)) if isinstance(value, _Freed)]
        first = touched[0]
        if name in GEOMETRY and len(touched) == 1 and first is args[0]:
            with torch._C.DisableTorchFunctionSubclass():
                return func(first._twin(), *args[1:], **kwargs)
        if name.endswith("_like") and first is args[0] and len(touched) == 1:
            with torch._C.DisableTorchFunctionSubclass():
                if is_dtensor(first):
                    return func(*args, **kwargs)
                return func(torch.empty_strided(*first._strides(), dtype=first.dtype, device=first.device), *args[1:], **kwargs)
        if name in CASTS and first is args[0] and len(touched) == 1 and first._is_cast_to_itself(func, args, kwargs):
            return first
        if name == "untyped_storage" and torch._guards.TracingContext.try_get() is not None:
            # torch.compile describes an input of a graph. This has it leave the operation out, which then runs here.
            raise UnsupportedFakeTensorException(f"{first!r} has no memory while it is freed: its operations are not compiled")
        if name in REMEDIES:
            raise refusal(first, name)
        tiled = next((value for value in touched if value.is_tiled), None)
        if tiled is not None:
            return tiled._shardwise.unit.owner.operate_tiled(func, name, args, kwargs)
        is_target = first is (args[0] if args else kwargs.get("tensor"))
        if is_target and len(touched) == 1 and isinstance(first, FreedParameter) and is_overwrite(func, name):
            handle = first._shardwise
            if handle.unit.owner.overwrite(handle, lambda new: func(*_swapped(args, first, new), **_swapped(kwargs, first, new))):
                return first
        handles = [value._shardwise for value in touched]
        by_owner = {id(handle.unit.owner): handle.unit.owner for handle in handles}
        for owner in by_owner.values():
            mine = [handle for handle in handles if handle.unit.owner is owner]
            if not owner.touch(list(dict.fromkeys(handle.unit for handle in mine))):
                return owner.operate(lambda: _call(func, args, kwargs), mine, name)
        return _call(func, args, kwargs)

    def _strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of the gathered tensor."""
        raise NotImplementedError

    def _twin(self) -> torch.Tensor:
        """A meta tensor with this shape and these strides."""
        return torch.empty_strided(*self._strides(), device="meta")

    def _real(self) -> torch.Tensor:
        """The tensor with its values, while its Unit is gathered."""
        raise NotImplementedError

    def _is_cast_to_itself(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            if name_of(func) == "contiguous":
                return bool(self._twin().is_contiguous(*args[1:], **kwargs))
            twin = torch.empty((0,), dtype=self.dtype, device=self.device)
            try:
                found = func(twin, *args[1:], **kwargs)
            except Exception:
                return False  # the operation itself will raise
            return found is twin or found == twin.type()

    def __deepcopy__(self, memo: Any) -> Any:
        raise refusal(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal(self, "pickle")


def _differentiate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad` or `backward`, which need no values; `grad` of a tiled parameter would be whole, and is refused."""
    tiled = next((value for value in _flatten((args, kwargs)) if isinstance(value, _Freed) and value.is_tiled), None)
    if tiled is not None and func is torch.autograd.grad:
        raise refusal(tiled, "torch.autograd.grad")
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation while its Units are gathered."""
    return func(*_replaced(args), **_replaced(kwargs))


def _replaced(value: Any) -> Any:
    """Replace every `FreedView` by a real view; parameters are real tensors while gathered."""
    return map_leaves(value, lambda leaf: leaf._real() if isinstance(leaf, FreedView) else leaf)


def _swapped(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return map_leaves(value, lambda leaf: new if leaf is old else leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change every leaf of an operation's arguments."""
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_leaves(item, change) for item in value)
    return change(value)


class FreedParameter(_Freed, ShardedParameter):
    """A parameter whose Unit is freed. It keeps its shape, dtype and identity; the owner runs operations on it."""

    def _strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        slot = self._shardwise.unit.layout.slots[self._shardwise.slot]
        return slot.shape, slot.stride

    def _real(self) -> torch.Tensor:
        return self

    @property
    def data(self) -> torch.Tensor:
        """An alias that autograd does not track: a `FreedView`, or inside a pass a real tensor."""
        unit = self._shardwise.unit
        if unit.owner.touch([unit]):
            alias: torch.Tensor = ShardedParameter.data.fget(self)  # type: ignore[attr-defined]
            return alias
        with torch.no_grad():
            view: torch.Tensor = torch.Tensor.detach(self)
        return view

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return
        unit, slot = self._shardwise.unit, self._shardwise.slot
        if unit.owner.touch([unit]):
            ShardedParameter.data.fset(self, value)  # type: ignore[attr-defined]
            return
        if isinstance(value, _Freed) and value._shardwise.slot == slot and value._shardwise.unit is unit:
            if isinstance(value, FreedView):
                value.check()
            return  # a view of this parameter: nothing changes
        if isinstance(value, _Freed) or (isinstance(value, torch.Tensor) and unit.owner.owns(address_of(value))):
            raise refusal(self, "tying through .data")
        if (
            not isinstance(value, torch.Tensor)
            or value.shape != self.shape
            or value.dtype != self.dtype
            or value.device != self.device
        ):
            raise refusal(self, "setting .data")
        if unit.is_overlaid and unit.writes.is_held(slot, is_shown=True):  # a graph, which reads the overlay in backward
            raise refusal(self, "setting .data while a graph needs the old values")
        with torch.no_grad():
            torch.Tensor.copy_(self, value)
        unit.rebind(slot)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # torch does not pass it to __torch_function__
        """Refused, because there is no storage to set; inside a pass the parameter is gathered and set."""
        if not self._shardwise.unit.owner.touch([self._shardwise.unit]):
            raise refusal(self, "set_")
        return torch.Tensor.set_(self, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Freeze or unfreeze; this needs no values."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().requires_grad_(requires_grad)

    def __deepcopy__(self, memo: Any) -> Any:
        """Before `shard` a copy is partitioned too; inside a pass it is an ordinary parameter; else it is refused."""
        if id(self) not in memo:
            unit = self._shardwise.unit
            if unit.owner.allows_optimizer:
                memo[id(self)] = unit.owner.copied(self._shardwise)
            elif unit.owner.touch([unit]):
                return ShardedParameter.__deepcopy__(self, memo)
            else:
                raise refusal(self, "deepcopy")
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        unit = self._shardwise.unit
        slot = unit.layout.slots[self._shardwise.slot]
        return f"FreedParameter({slot.name!r}, shape={list(slot.shape)}, dtype={self.dtype}, unit={unit.name!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal(self, "pickle")


class FreedView(_Freed):
    """A view of a freed parameter, without autograd history: it has an offset and strides, but no values."""

    _geometry: tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
    _epoch: int

    @staticmethod
    def of(handle: Handle, view: torch.Tensor) -> FreedView:
        """Make the stand-in for `view`, which lies in the full vector of the handle's Unit."""
        unit = handle.unit
        place = (view.data_ptr() - unit.full.data_ptr()) // view.element_size()
        # It has no memory, so that code that bypasses `__torch_function__` (collectives, torch.func) is noticed.
        stand_in: FreedView = torch.Tensor._make_wrapper_subclass(
            FreedView, view.shape, strides=view.stride(), dtype=view.dtype, device=view.device
        )
        stand_in._shardwise = handle
        stand_in._geometry = (tuple(view.shape), tuple(view.stride()), place, view.dtype)
        stand_in._epoch = unit.writes.epochs[handle.slot]
        return stand_in

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations that bypass `__torch_function__`: collectives, and operations inside a torch.func transform."""
        first = next(value for value in _flatten((args, kwargs)) if isinstance(value, FreedView))
        raise refusal(first, f"{getattr(func, '_opname', func)} {PAST_PYTHON}")

    def requires_grad_(self, requires_grad: bool = True) -> FreedView:
        """True is refused: a view without memory cannot be trained."""
        if requires_grad:
            raise refusal(self, "training a view")
        return self

    @property
    def requires_grad(self) -> bool:
        """Always False: it has no history."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def is_shared(self) -> bool:
        """Always False: it has no memory."""
        return False

    def _strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._geometry[:2]

    def check(self) -> None:
        """Raise if `.data` of the parameter was assigned since: the values of this view are gone."""
        unit, slot = self._shardwise.unit, self._shardwise.slot
        if unit.writes.epochs[slot] != self._epoch:
            raise FreedParameterError(
                f"a view of parameter {unit.layout.slots[slot].name!r} was taken before `.data` was assigned, and its old values "
                "are not kept. Take a copy first: `.data.clone()`."
            )

    def _real(self) -> torch.Tensor:
        self.check()
        shape, stride, place, dtype = self._geometry
        unit = self._shardwise.unit
        full = unit.full if unit.full.dtype == dtype else unit.full.view(dtype)
        return full.as_strided(shape, stride, full.storage_offset() + place)

    @property
    def data(self) -> torch.Tensor:
        """The view itself, because it has no history."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise refusal(self, "set_")

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        unit = self._shardwise.unit
        name = unit.layout.slots[self._shardwise.slot].name
        return f"FreedView(of {name!r}, shape={list(self._geometry[0])}, dtype={self._geometry[3]}, unit={unit.name!r})"


def refusal(param: _Freed, what: str) -> FreedParameterError:
    """The error for an operation that a freed parameter refuses, with what to do instead."""
    unit = param._shardwise.unit
    slot = unit.layout.slots[param._shardwise.slot]
    remedy = REMEDIES.get(what)
    if what.endswith(PAST_PYTHON):
        remedy = "Do it inside `with torch.no_grad(), run.gathered(module):`, on every rank."
    if what in CONVERSIONS:
        remedy = "Convert or move the model before sw.shard(); sw.shard(precision=...) sets the stored and computing dtypes."
    where = "only this rank's shard is in memory outside the forward pass."
    if param.is_tiled:
        where = "it is cut into tiles and has no memory of its own."
    return FreedParameterError(
        f"{what} on parameter {slot.name!r} (shape {list(slot.param_shape)}, Unit {unit.name!r}, rank {unit.rank}): {where} "
        f"{remedy or unit.owner.remedy()}"
    )


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
    if cls.__module__ == "torch.distributed.tensor":
        return dtensor_classes(cls, ShardedParameter, FreedParameter)
    gathered = type(f"Sharded{cls.__name__}", (ShardedParameter, cls), {"_user_class": cls})
    freed = type(f"Freed{cls.__name__}", (FreedParameter, cls), {"_user_class": cls})
    return gathered, freed
