"""Attaches the runtime to an unmodified model by module hooks: which module gathers which Units.

Called once, by assembly. Hooks only report that something happened; the runtime decides what to do.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.engine.gathering import Entry
from shardwise.engine.lookups import is_lookup
from shardwise.engine.runtime import Runtime
from shardwise.engine.surface import BeginLoading, CastInputs, EndLoading, Hook, Method, ZeroGrad
from shardwise.partition import Unit


class _Enter(Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._runtime is None else self._runtime.enter(self._entries, (args, kwargs))


class _EnterLookup(Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._runtime is None else self._runtime.enter(self._entries, (args, kwargs), is_lookup=True)


class _EnterModel(Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._runtime is None else self._runtime.enter(self._entries, (args, kwargs), is_root=True)


class _Leave(Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._runtime is not None:
            self._runtime.leave(self._entries, output)


_UNCOMPILED = ("comm", "engine", "observe", "optim", "partition", "schedule", "ticket", "tiers", "tiling")


@functools.cache
def _hide_from_compiler() -> None:
    """Have torch.compile skip this library's code: gathering and freeing must not become part of a graph.

    Not done at import, because importing the compiler is slow; an optimizer's first step would import it anyway.
    """
    from torch._dynamo import trace_rules

    for room in _UNCOMPILED:
        trace_rules.add(f"shardwise.{room}")


def attach(
    model: nn.Module, runtime: Runtime, units: Sequence[Unit], methods: Sequence[str], stages: Sequence[nn.Module] = ()
) -> None:
    """Register every hook; called once, after the Units have adopted the parameters.

    `stages`: the modules that are called, if `model` is a tree of several.
    """
    _hide_from_compiler()
    entries = _entries(model, units)
    called = stages or [model]
    for stage in stages:
        entries[stage] = entries[model]
    for module, its_entries in entries.items():
        kind = _EnterModel if module in called else _EnterLookup if is_lookup(module) else _Enter
        if its_entries or module in called:
            module.register_forward_pre_hook(kind(runtime, its_entries), prepend=True, with_kwargs=True)
            module.register_forward_hook(_Leave(runtime, its_entries), always_call=True)
        module.register_load_state_dict_pre_hook(BeginLoading(runtime))
        module.register_load_state_dict_post_hook(EndLoading(runtime))
    dtypes = {(unit.dtypes.original, unit.dtypes.compute) for unit in units}
    if len(dtypes) == 1 and units[0].dtypes.original != units[0].dtypes.compute:
        for module in called:
            module.register_forward_pre_hook(CastInputs(runtime), with_kwargs=True)
    for path in methods:
        owner_path, _, name = path.rpartition(".")
        owner = model.get_submodule(owner_path)
        setattr(owner, name, Method(owner, getattr(owner, name), runtime, entries.get(owner, ())))
    model.zero_grad = ZeroGrad(model, runtime)  # type: ignore[method-assign]
    for stage in stages:
        stage.zero_grad = ZeroGrad(stage, runtime, is_part=True)  # type: ignore[method-assign]


def _entries(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, tuple[Entry, ...]]:
    """Which Units each module opens: those placed at it, and covered Units whose parameter it holds.

    Units that stay full are never opened, and tiles only by operations. Modules below a Unit's module need no hook: if user code
    calls one directly, its freed parameters notice that they are touched.
    """
    found: dict[nn.Module, dict[Unit, list[int]]] = defaultdict(dict)
    for unit in units:
        if not unit.is_always_full and not unit.blueprint.tile_of:
            opened_by = {model.get_submodule(path) for path in unit.blueprint.joined_paths} or {unit.module}
            if unit.is_overlaid and unit.blueprint.joined_paths:
                opened_by.add(model)  # costs no memory, and calls below it find the Unit open
            for module in opened_by:
                found[module].setdefault(unit, [])
    found[model].update({})  # the model gets hooks even if it opens nothing: parameters may be touched in its forward
    for module in model.modules():
        for param in module._parameters.values():
            handle = getattr(param, "_shardwise", None)
            if handle is not None:
                found[module].update({})  # it gets loading hooks, because a state dict may be loaded into it alone
                if handle.unit.is_covered:
                    found[module].setdefault(handle.unit, []).append(handle.slot)
    return {module: tuple((u, tuple(slots)) for u, slots in opened.items()) for module, opened in found.items()}
