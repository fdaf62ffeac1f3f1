"""Attaches the runtime to an unmodified model: which modules open which Units, and what their outputs pass through.

Hooks only say *that* something happened; the runtime decides what to do.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.nested import map_tensors
from shardwise.engine.runtime import Entry, Runtime
from shardwise.errors import ConfigError, ModelError
from shardwise.partition import Unit


class _Hook:
    """A hook bound to one model; a deep copy of the model must not drive the original's Units, so copies do nothing."""

    def __init__(self, runtime: Runtime | None, entries: tuple[Entry, ...] = ()) -> None:
        self._runtime = runtime
        self._entries = entries

    def __deepcopy__(self, memo: Any) -> _Hook:
        return type(self)(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            "pickling a sharded model (torch.save(model)): it is bound to this rank's run. Save run.full_state_dict() "
            "instead, and load it into a model built anew."
        )


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._runtime is None else self._runtime.enter(self._entries, (args, kwargs))


class _EnterModel(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._runtime is None else self._runtime.enter(self._entries, (args, kwargs), is_root=True)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._runtime is not None:
            self._runtime.leave(self._entries, output)


class _LeaveLookup(_Hook):
    """After a plain embedding look-up, whose backward does not read the table."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._runtime is not None:
            self._runtime.leave(self._entries, output, reads_params_in_backward=False)


class _BeginLoading(_Hook):
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self._runtime is not None:
            self._runtime.outside.begin_loading(module, state, prefix)


class _EndLoading(_Hook):
    def __call__(self, module: nn.Module, _: Any) -> None:
        if self._runtime is not None:
            self._runtime.outside.end_loading()
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


class _ZeroGrad:
    """`model.zero_grad()`: drops or zeroes the reduced gradients, which live in shards."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self._model = model
        self._runtime = runtime

    def __call__(self, set_to_none: bool = True) -> None:
        self._runtime.gradients.clear(set_to_none=set_to_none)

    def __deepcopy__(self, memo: Any) -> Any:
        return types.MethodType(type(self._model).zero_grad, memo[id(self._model)])


class _Method:
    """A method that counts as a forward pass of its module."""

    def __init__(self, owner: nn.Module, method: Callable[..., Any], runtime: Runtime, entries: tuple[Entry, ...]) -> None:
        functools.update_wrapper(self, method)
        self._owner, self._method, self._runtime, self._entries = owner, method, runtime, entries

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            replaced = self._runtime.enter(self._entries, (args, kwargs))
            args, kwargs = (args, kwargs) if replaced is None else replaced
            output = self._method(*args, **kwargs)
        finally:
            self._runtime.leave(self._entries, output)
        return output

    def __deepcopy__(self, memo: Any) -> Any:
        function = getattr(self._method, "__func__", None)
        return self._method if function is None else types.MethodType(function, memo[id(self._owner)])


def check_methods(model: nn.Module, paths: Sequence[str]) -> None:
    """Refuse names that are not methods of the model or its submodules, before anything is changed."""
    for path in paths:
        owner_path, _, name = path.rpartition(".")
        try:
            method = getattr(model.get_submodule(owner_path), name)
        except AttributeError as error:
            raise ConfigError(f"methods: {type(model).__name__} has no method {path!r} ({error}).") from None
        if not callable(method) or isinstance(method, nn.Module):
            raise ConfigError(f"methods: {path!r} is a {type(method).__name__}, not a method.")


_UNCOMPILED = ("comm", "engine", "observe", "optim", "partition", "schedule", "ticket", "tiers")


@functools.cache
def _hide_from_compiler() -> None:
    """Have torch.compile run this library's own code as it is: what hooks do (gather, free) is not part of any graph.

    Not at import, because it imports the compiler, which takes a moment; an optimizer's first step would import it too.
    """
    from torch._dynamo import trace_rules

    for room in _UNCOMPILED:
        trace_rules.add(f"shardwise.{room}")
    for hook in (_Enter, _EnterModel, _Leave, _LeaveLookup, _CastInputs):
        hook.__call__ = torch.compiler.disable(hook.__call__)  # type: ignore[method-assign]


def attach(model: nn.Module, runtime: Runtime, units: Sequence[Unit], methods: Sequence[str]) -> None:
    """Register every hook; called once, after the Units have adopted the parameters."""
    _hide_from_compiler()
    entries = _entries(model, units)
    for module, its_entries in entries.items():
        enter = _EnterModel(runtime, its_entries) if module is model else _Enter(runtime, its_entries)
        leave = _LeaveLookup(runtime, its_entries) if _is_lookup(module) else _Leave(runtime, its_entries)
        if its_entries or module is model:
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(leave, always_call=True)
        module.register_load_state_dict_pre_hook(_BeginLoading(runtime))
        module.register_load_state_dict_post_hook(_EndLoading(runtime))
    dtypes = {(unit.dtypes.original, unit.dtypes.compute) for unit in units}
    if len(dtypes) == 1 and units[0].dtypes.original != units[0].dtypes.compute:
        model.register_forward_pre_hook(_CastInputs(runtime), with_kwargs=True)
    for path in methods:
        owner_path, _, name = path.rpartition(".")
        owner = model.get_submodule(owner_path)
        setattr(owner, name, _Method(owner, getattr(owner, name), runtime, entries.get(owner, ())))
    model.zero_grad = _ZeroGrad(model, runtime)  # type: ignore[method-assign]


def _is_lookup(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None


def _entries(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, tuple[Entry, ...]]:
    """Which Units each module opens: those placed at it and, of shared parameters placed above their holders, those it holds.

    Where parameters stay whole nothing is opened. Modules below a Unit's own have no hook: if one is called by itself,
    the touch of its freed parameters is noticed.
    """
    found: dict[nn.Module, dict[Unit, list[int]]] = defaultdict(dict)
    for unit in units:
        if not unit.is_always_full:
            found[unit.module].setdefault(unit, [])
    found[model].update({})  # the whole model's forward counts even if it opens nothing: touches happen inside it
    for module in model.modules():
        for param in module._parameters.values():
            handle = getattr(param, "_shardwise", None)
            if handle is not None:
                found[module].update({})  # a state dict may be loaded into it alone
                if handle.unit.is_covered:
                    found[module].setdefault(handle.unit, []).append(handle.slot)
    return {module: tuple((u, tuple(slots)) for u, slots in opened.items()) for module, opened in found.items()}
