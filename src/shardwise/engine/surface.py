"""Hooks for other calls of a model than forward: loading, `zero_grad`, methods chosen by the user; and for input dtypes."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.gathering import Entry
from shardwise.engine.nested import map_tensors
from shardwise.engine.runtime import Runtime
from shardwise.errors import ConfigError, ModelError


class Hook:
    """A hook of one model. Its copies do nothing, because a deep copy of the model must not gather the original's Units."""

    def __init__(self, runtime: Runtime | None, entries: tuple[Entry, ...] = ()) -> None:
        self._runtime = runtime
        self._entries = entries

    def __deepcopy__(self, memo: Any) -> Hook:
        return type(self)(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            "pickling a sharded model (torch.save(model)): it is bound to this rank's run. Save run.full_state_dict() "
            "instead, and load it into a model built anew."
        )


class BeginLoading(Hook):
    """Runs before a module loads its part of a state dict."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Store the exact values, and let touches gather."""
        if self._runtime is not None:
            self._runtime.outside.begin_loading(module, state, prefix)


class EndLoading(Hook):
    """Runs after a module has loaded its part of a state dict."""

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Write values back; raise if parameters were replaced."""
        if self._runtime is not None:
            self._runtime.outside.end_loading()
            strangers = [name for name, param in module.named_parameters() if not hasattr(param, "_shardwise")]
            if strangers:
                raise ModelError(
                    f"load_state_dict(assign=True) replaced {len(strangers)} parameters (first {strangers[0]!r}) by tensors that "
                    "are not sharded. Load without assign=True."
                )


class CastInputs(Hook):
    """Casts floating-point inputs of the model to the compute dtype."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the inputs to use instead."""
        if self._runtime is None:
            return None
        dtype = self._runtime.units[0].dtypes.compute

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(cast, args), map_tensors(cast, kwargs)


class ZeroGrad:
    """`model.zero_grad()`: drops or zeroes the reduced gradients, which live in shards."""

    def __init__(self, model: nn.Module, runtime: Runtime, *, is_part: bool = False) -> None:
        """`is_part`: the run has other stages of the model too, whose gradients stay."""
        self._model = model
        self._runtime = runtime
        self._is_part = is_part

    def __call__(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`."""
        slots = None
        if self._is_part:
            handles = [param._shardwise for param in self._model.parameters()]  # type: ignore[attr-defined]
            slots = {(unit.index, slot) for handle in handles for unit, slot in handle.places}
        self._runtime.gradients.clear(slots, set_to_none=set_to_none)

    def __deepcopy__(self, memo: Any) -> Any:
        return types.MethodType(type(self._model).zero_grad, memo[id(self._model)])


class Method:
    """A method that gathers and frees Units as the forward of its module does."""

    def __init__(self, owner: nn.Module, method: Callable[..., Any], runtime: Runtime, entries: tuple[Entry, ...]) -> None:
        functools.update_wrapper(self, method)
        self._owner, self._method, self._runtime, self._entries = owner, method, runtime, entries

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method between `enter` and `leave`, and return its result."""
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
    """Raise for names that are not methods of the model or its submodules."""
    for path in paths:
        owner_path, _, name = path.rpartition(".")
        try:
            method = getattr(model.get_submodule(owner_path), name)
        except AttributeError as error:
            raise ConfigError(f"methods: {type(model).__name__} has no method {path!r} ({error}).") from None
        if not callable(method) or isinstance(method, nn.Module):
            raise ConfigError(f"methods: {path!r} is a {type(method).__name__}, not a method.")
