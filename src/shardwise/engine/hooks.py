"""Attaches the runtime to an unmodified model: which modules open which Units, and what their outputs pass through.

Hooks only say *that* something happened; the runtime decides what to do.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.runtime import Runtime, map_tensors
from shardwise.errors import ConfigError, ModelError
from shardwise.partition import Unit


class _Hook:
    """A hook bound to one model; a deep copy of the model must not drive the original's Units, so copies do nothing."""

    def __init__(self, runtime: Runtime | None, units: tuple[Unit, ...], frozen: tuple[Unit, ...]) -> None:
        self._runtime = runtime
        self._units = units
        self._frozen = frozen

    def __deepcopy__(self, memo: Any) -> _Hook:
        return type(self)(None, (), ())


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._runtime is not None:
            self._runtime.enter(self._units)
            if self._frozen and torch.is_grad_enabled():
                self._runtime.watch_inputs(self._frozen, (args, kwargs))


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._runtime is not None:
            self._runtime.leave(output)


class _BeginLoading(_Hook):
    def __call__(self, *_: Any) -> None:
        if self._runtime is not None:
            self._runtime.begin_loading()


class _EndLoading(_Hook):
    def __call__(self, module: nn.Module, _: Any) -> None:
        if self._runtime is not None:
            self._runtime.end_loading()
            strangers = [name for name, param in module.named_parameters() if not hasattr(param, "_shardwise")]
            if strangers:
                raise ModelError(
                    f"load_state_dict(assign=True) replaced {len(strangers)} parameters (first {strangers[0]!r}) by tensors that "
                    "are not sharded. Load without assign=True."
                )


class _CastInputs(_Hook):
    """Floating inputs of the whole model take the compute dtype."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._runtime is None:
            return None
        dtype = self._units[0].dtypes.compute

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(cast, args), map_tensors(cast, kwargs)


class _ScaleOutputs(_Hook):
    """Gradients that enter the model are multiplied by the loss scale; the loss itself is not."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._runtime is None or self._runtime.scaler is None or not torch.is_grad_enabled():
            return None
        gradients = self._runtime.gradients
        return map_tensors(
            lambda t: _ScaleGradient.apply(t, gradients) if t.requires_grad else t,  # type: ignore[no-untyped-call]
            output,
        )


class _ScaleGradient(torch.autograd.Function):
    """The identity; its gradient is multiplied by the scale in force when backward runs."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradients: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.gradients = gradients
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * ctx.gradients.loss_scale, None


def attach(model: nn.Module, runtime: Runtime, units: Sequence[Unit], methods: Sequence[str]) -> None:
    """Register every hook; called once, after the Units have adopted the parameters."""
    opened: dict[nn.Module, list[Unit]] = defaultdict(list)
    for unit in units:
        opened[unit.module].append(unit)
    if any(not unit.is_always_full for unit in units):
        _add_holders(model, opened)
    for module, its_units in opened.items():
        frozen = tuple(u for u in its_units if not u.is_trainable and not u.is_always_full)
        module.register_forward_pre_hook(_Enter(runtime, tuple(its_units), frozen), prepend=True, with_kwargs=True)
        module.register_forward_hook(_Leave(runtime, tuple(its_units), ()), always_call=True)
    _attach_to_root(model, runtime, units)
    for path in methods:
        _wrap_method(model, runtime, path, opened)
    model.zero_grad = _make_zero_grad(runtime)  # type: ignore[method-assign]
    model.register_load_state_dict_pre_hook(_BeginLoading(runtime, (), ()))
    model.register_load_state_dict_post_hook(_EndLoading(runtime, (), ()))


def _add_holders(model: nn.Module, opened: dict[nn.Module, list[Unit]]) -> None:
    """A module that holds parameters opens their Units too, so that it can be called on its own."""
    for module in model.modules():
        for param in module._parameters.values():
            handle = getattr(param, "_shardwise", None)
            if handle is not None and handle.unit not in opened[module]:
                opened[module].append(handle.unit)
        if not opened[module]:
            del opened[module]


def _attach_to_root(model: nn.Module, runtime: Runtime, units: Sequence[Unit]) -> None:
    dtypes = {(unit.dtypes.original, unit.dtypes.compute) for unit in units}
    if len(dtypes) == 1 and units[0].dtypes.original != units[0].dtypes.compute:
        model.register_forward_pre_hook(_CastInputs(runtime, (units[0],), ()), with_kwargs=True)
    if runtime.scaler is not None:
        model.register_forward_hook(_ScaleOutputs(runtime, (), ()))


def _wrap_method(
    model: nn.Module, runtime: Runtime, path: str, opened: dict[nn.Module, list[Unit]]
) -> None:
    owner_path, _, name = path.rpartition(".")
    try:
        owner = model.get_submodule(owner_path)
        method = getattr(owner, name)
    except AttributeError as error:
        raise ConfigError(f"methods: {type(model).__name__} has no method {path!r} ({error}).") from None
    if not callable(method):
        raise ConfigError(f"methods: {path!r} is a {type(method).__name__}, not a method.")
    its_units = tuple(opened.get(owner, ()))
    scale = _ScaleOutputs(runtime, (), ())

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        runtime.enter(its_units)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            runtime.leave(output)
        scaled = scale(owner, args, output)
        return output if scaled is None else scaled

    call._shardwise_bound = True  # type: ignore[attr-defined]
    setattr(owner, name, call)


def _make_zero_grad(runtime: Runtime) -> Callable[..., None]:
    def zero_grad(set_to_none: bool = True) -> None:
        """Clear the reduced gradients of every parameter (they live in shards, so both settings drop them)."""
        runtime.gradients.clear()

    zero_grad._shardwise_bound = True  # type: ignore[attr-defined]
    return zero_grad


def detach_copy(model: nn.Module) -> nn.Module:
    """Remove from a deep copy what was bound to the original instance; its hooks copied themselves as inert ones."""
    for module in model.modules():
        for name in [n for n, value in vars(module).items() if hasattr(value, "_shardwise_bound")]:
            delattr(module, name)
    return model
