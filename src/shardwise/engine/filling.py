"""Fills a model that is built under `sharded_init(weights=...)`: its own initialisation is skipped, and shards come from files.

Initialisation is skipped where it would be computed: operations that give a Parameter new values whatever its old ones were
return at once while the model is built. Buffers are initialised as ever. When the model is complete its names are known, and
every rank reads the ranges of its own shards.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError, ShardwiseError
from shardwise.partition import Slot, Unit, is_overwrite, list_params, name_of

if TYPE_CHECKING:
    from shardwise.engine.construction import Construction


class Source(Protocol):
    """Where weights are read from."""

    def fit(self, model: nn.Module) -> object:
        """Find the model's parameters and buffers; raise a ShardwiseError if they do not fit."""

    def read_range(self, name: str, slot: Slot, start: int, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Read elements of a parameter, in the slot's storage order, into `out`."""

    def read_whole(self, name: str, value: torch.Tensor) -> None:
        """Read a whole parameter."""

    def read_buffers(self, model: nn.Module) -> None:
        """Read all buffers that a state dict contains."""

    def mark(self, name: str) -> int:
        """A number that is the same on ranks that see the same file."""


class Filling:
    """Knows which modules are built, and fills the model that they are."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._children: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def holds(self, module: nn.Module) -> None:
        """A module has got a parameter."""
        self._seen.add(module)

    def registered(self, parent: nn.Module, module: nn.Module | None) -> None:
        """A module has got a child."""
        self._seen.add(parent)
        if module is not None:
            self._children.add(module)

    def fill(self, construction: Construction) -> None:
        """Read everything into the one model that was built. All ranks must call; if one fails, all raise."""
        outcome = construction.world.try_together(lambda: self._fill(construction), Exception)
        if outcome.problem is not None:
            raise outcome.problem
        if outcome.first is not None:
            raise ShardwiseError(f"sharded_init(weights=...) failed on rank {outcome.first[0]}: {outcome.first[1]}")

    def _fill(self, construction: Construction) -> None:
        model = self._model()
        self._source.fit(model)
        by_unit: dict[Unit, list[tuple[int, str]]] = {}
        for info in list_params(model):
            handle = getattr(info.param, "_shardwise", None)
            if handle is None:  # not partitioned: of a dtype that cannot be
                self._source.read_whole(info.name, info.param)
            else:
                by_unit.setdefault(handle.unit, []).append((handle.slot, info.name))
        for unit, found in by_unit.items():
            self._fill_unit(construction, unit, dict(found))
        self._source.read_buffers(model)

    def _fill_unit(self, construction: Construction, unit: Unit, names: dict[int, str]) -> None:
        with construction.on_device(unit, keeps_changes=True, is_new=True):
            for piece in unit.layout.pieces(unit.rank):
                if piece.slot_index in names:
                    slot = unit.layout.slots[piece.slot_index]
                    out = unit.shard[piece.shard_start : piece.shard_start + piece.numel]
                    self._source.read_range(names[piece.slot_index], slot, piece.param_start, out, unit.dtypes.stored)
        for slot_index, name in names.items():
            construction.digests[unit][slot_index] = self._source.mark(name)
        unit.changed()

    def _model(self) -> nn.Module:
        """The module that holds all others."""
        roots = self._roots()
        if len(roots) > 1:
            gc.collect()  # modules that were built and dropped, in a reference cycle
            roots = self._roots()
        if len(roots) != 1:
            kinds = ", ".join(sorted(type(root).__name__ for root in roots)) or "none"
            raise ModelError(
                f"sharded_init(weights=...) must build one model; {len(roots)} were built: {kinds}. Build and keep one model "
                "inside the context, or use sw.load_pretrained(model, path) after sw.shard()."
            )
        return roots[0]

    def _roots(self) -> list[nn.Module]:
        return [module for module in self._seen if module not in self._children and any(True for _ in module.parameters())]


class SkipInitialisation(TorchFunctionMode):
    """Inside the context, operations that give a Parameter new values whatever its old ones were do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operation, or return its first argument."""
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor")
        if isinstance(first, nn.Parameter) and is_overwrite(func, name_of(func)):
            return first
        return func(*args, **kwargs)
