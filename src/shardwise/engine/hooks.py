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

from shardwise.engine.runtime import Entry, Runtime, map_tensors
from shardwise.errors import ConfigError, ModelError
from shardwise.partition import Unit


class _Hook:
    """A hook bound to one model; a deep copy of the model must not drive the original's Units, so copies do nothing."""

    def __init__(self, runtime: Runtime | None, entries: tuple[Entry, ...] = ()) -> None:
        self._runtime = runtime
        self._entries = entries

    def __deepcopy__(self, memo: Any) -> _Hook:
        return type(self)(None)


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._runtime is not None:
            self._runtime.enter(self._entries, (args, kwargs))


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._runtime is not None:
            self._runtime.leave(output)


class _LeaveLookup(_Hook):
    """After a plain embedding look-up, whose backward does not read the table."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._runtime is not None:
            self._runtime.leave(output, needs_params_in_backward=False)


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
        dtype = self._runtime.units[0].dtypes.compute

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
    entries = _entries(model, units)
    for unit in units:
        unit.is_lookup = all(_is_lookup(m) for m, opened in entries.items() if any(u is unit for u, _ in opened))
    for module, its_entries in entries.items():
        leave = _LeaveLookup(runtime) if _is_lookup(module) else _Leave(runtime)
        module.register_forward_pre_hook(_Enter(runtime, its_entries), prepend=True, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)
    dtypes = {(unit.dtypes.original, unit.dtypes.compute) for unit in units}
    if len(dtypes) == 1 and units[0].dtypes.original != units[0].dtypes.compute:
        model.register_forward_pre_hook(_CastInputs(runtime), with_kwargs=True)
    if runtime.scaler is not None:
        model.register_forward_hook(_ScaleOutputs(runtime))
    for path in methods:
        _wrap_method(model, runtime, path, entries)
    model.zero_grad = _make_zero_grad(runtime)  # type: ignore[method-assign]
    model.register_load_state_dict_pre_hook(_BeginLoading(runtime))
    model.register_load_state_dict_post_hook(_EndLoading(runtime))


def _is_lookup(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None


def _entries(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, tuple[Entry, ...]]:
    """Which Units each module opens: those placed at it and, where parameters come and go, those it holds parts of."""
    found: dict[nn.Module, dict[Unit, list[int]]] = defaultdict(dict)
    for unit in units:
        found[unit.module].setdefault(unit, [])
    for module in model.modules():
        for param in module._parameters.values():
            handle = getattr(param, "_shardwise", None)
            if handle is not None and not handle.unit.is_always_full:
                found[module].setdefault(handle.unit, []).append(handle.index)
    return {module: tuple((u, tuple(slots)) for u, slots in opened.items()) for module, opened in found.items()}


def _wrap_method(
    model: nn.Module, runtime: Runtime, path: str, entries: dict[nn.Module, tuple[Entry, ...]]
) -> None:
    owner_path, _, name = path.rpartition(".")
    try:
        owner = model.get_submodule(owner_path)
        method = getattr(owner, name)
    except AttributeError as error:
        raise ConfigError(f"methods: {type(model).__name__} has no method {path!r} ({error}).") from None
    if not callable(method):
        raise ConfigError(f"methods: {path!r} is a {type(method).__name__}, not a method.")
    its_entries = entries.get(owner, ())
    scale = _ScaleOutputs(runtime)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        runtime.enter(its_entries, (args, kwargs))
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
