"""Gathers and changes parameters outside a training step: contexts, single operations, loading, full vectors.

Called by `Run`, the hooks and `Answers`. No rank may write its shard before a fence shows that all ranks have read it, and every
write back happens between two fences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.engine.backward import is_inside_autograd
from shardwise.engine.nested import map_tensors
from shardwise.engine.window import Window
from shardwise.errors import ShardwiseError
from shardwise.partition import (
    COLLECTIVES,
    FreedView,
    Handle,
    ShardedParameter,
    Unit,
    address_of,
    copy_assigned,
    differs,
    flat_values,
    is_dtensor,
    local_of,
    set_local,
    store,
    write_back,
)
from shardwise.tiers import checksum

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime

_COPIED = ("numpy", "__array__")
"""Operations whose result is an array over the parameter's memory."""


class Outside:
    """Gathers, changes and reads Units of one run outside forward and backward passes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.num_contexts = 0
        """How many `run.gathered` contexts are open."""
        self._loading: Window | None = None
        self._loading_depth = 0

    @property
    def is_loading(self) -> bool:
        """Whether a state dict is being loaded."""
        return self._loading is not None

    # -- contexts ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep Units gathered inside the context; it does not write changes back."""
        runtime = self._runtime
        done: list[Unit] = []
        try:
            for unit in units:
                if not unit.is_gathered:
                    runtime.gathering.gather(unit)
                runtime.gathering.use(unit).scopes += 1
                done.append(unit)
                runtime.gathering.uncover(unit)
            yield
        finally:
            for unit in done:
                runtime.gathering.use(unit).scopes -= 1
                runtime.gathering.cover(unit)
                runtime.gathering.free(unit)

    @contextlib.contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep Units gathered inside the context; at its end, write changes back to the shards."""
        runtime = self._runtime
        runtime.gathering.settle()
        runtime.changes.store_written()
        runtime.transport.fence()  # full parameters may be in shared memory: no rank may still read what is written now
        done: list[Unit] = []
        self.num_contexts += 1
        try:
            for unit in units:
                if not unit.is_gathered:
                    runtime.gathering.gather(unit)
                runtime.gathering.use(unit).scopes += 1
                runtime.gathering.use(unit).num_contexts += 1
                done.append(unit)
                runtime.gathering.uncover(unit)
            with runtime.saved.keeping(), runtime.tiles.shown(done):
                yield
        finally:
            self.num_contexts -= 1
            for unit in done:
                runtime.gathering.use(unit).scopes -= 1
                runtime.gathering.use(unit).num_contexts -= 1
            try:
                if not runtime.transport.watch.has_failed:
                    self._store(done)
            finally:
                for unit in done:
                    runtime.gathering.cover(unit)
                    runtime.gathering.free(unit)
                runtime.transport.fence()

    def _store(self, units: Sequence[Unit]) -> None:
        """Write what user code changed back to the shards; all ranks must have made the same change."""
        runtime = self._runtime
        for unit in units:
            copy_assigned(unit)
        flags = []
        for unit in units:
            is_written = unit.may_be_written()
            if not is_written and not unit.blueprint.holds_alias:  # arrays and collectives count no versions: compare
                with runtime.offload.on_device(unit, keeps_changes=False):
                    is_written = differs(unit)
            flags.append(int(is_written))
        written = runtime.changes.agree_on(flags)  # after this no rank gathers any more
        changed = [unit for unit, (_, is_written) in zip(units, written, strict=True) if is_written]
        if changed:
            runtime.changes.require_alike(changed)
        for unit in changed:
            with runtime.offload.on_device(unit, keeps_changes=True):
                is_changed = write_back(unit)
            if is_changed:
                unit.changed()
            unit.writes.note()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards inside add to local gradients; the first one outside reduces the sums."""
        runtime = self._runtime
        if is_inside_autograd():
            raise ShardwiseError("run.accumulating() was entered inside a backward. Enter it around whole backwards.")
        if runtime.in_backward:
            runtime.start_afresh()  # the last backward raised
        with runtime.gradients.accumulated.opened():
            yield

    # -- single operations ------------------------------------------------------------------------------------

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Gather, run one operation, write its changes back, free. Results that are views become `FreedView`s."""
        runtime = self._runtime
        runtime.gathering.discard_kept()
        units = list(dict.fromkeys(handle.unit for handle in touched))
        was_open = [unit for unit in units if unit.is_gathered]
        with self.opened(units):
            looks = name.startswith(COLLECTIVES)
            before = [(unit.full._version, checksum(unit.full) if looks else 0) for unit in units]
            with runtime.saved.keeping() as keeps_places:
                result = function()
            if not keeps_places:  # inside a torch.func transform: the graph holds views instead of Places
                for unit in units:
                    runtime.gathering.use(unit).is_pinned |= not unit.is_overlaid
            result = without_views(result, touched, name)
            written = [
                unit
                for unit, (version, mark) in zip(units, before, strict=True)
                if unit not in was_open
                and (_is_changed(unit, mark) if looks else unit.full._version != version or unit.may_be_written())
            ]
            if written:
                for unit in written:
                    copy_assigned(unit)
                    runtime.gathering.use(unit).is_written = True
                runtime.gathering.settle()
                runtime.changes.store(written)
        return result

    # -- full vectors -----------------------------------------------------------------------------------------

    def full_grad(self, unit: Unit) -> torch.Tensor:
        """The full reduced gradient of a Unit: a new tensor, unless this rank holds all of it in memory. All ranks must call."""
        runtime = self._runtime
        with runtime.gradients.home.on_device(unit) as grad:
            full = self.whole(unit, grad)
            return full.clone() if full is grad and runtime.gradients.home.is_offloaded else full

    def whole(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        """Gather the full vector of which `shard` is this rank's span; `shard` itself if that is full. All ranks must call."""
        if shard.numel() == unit.layout.numel:
            return shard
        runtime = self._runtime
        runtime.gathering.settle()
        full = torch.empty(unit.layout.numel, dtype=shard.dtype, device=shard.device)
        runtime.transport.fence()  # user code on a slower rank may still be writing to its parameters
        runtime.transport.gather(unit.index, shard, full).wait()
        runtime.transport.fence()  # a faster rank must not write before all ranks have read
        return full

    # -- loading ----------------------------------------------------------------------------------------------

    def begin_loading(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Before a module loads its part of a state dict: store the exact values; until the load ends every touch gathers."""
        runtime = self._runtime
        if self._loading is not None and not prefix:
            runtime.start_afresh()  # the load before this one raised
        if self._loading is None:
            runtime.gathering.settle()
            runtime.changes.store_written()
            runtime.transport.fence()
            self._loading = Window(self._open_window, self._close_window)
        self._loading_depth += 1
        for name, param in module._parameters.items():
            value, handle = state.get(prefix + name), getattr(param, "_shardwise", None)
            if handle is None or not isinstance(value, torch.Tensor) or handle.unit.blueprint.tile_of:
                continue  # a tiled parameter stores what is copied into it
            if value.shape == handle.unit.layout.slots[handle.slot].shape:
                stride = handle.unit.layout.slots[handle.slot].stride
                with runtime.offload.on_device(handle.unit, keeps_changes=True):
                    store(handle.unit, handle.slot, flat_values(value.to(handle.unit.blueprint.device), stride))

    def end_loading(self) -> None:
        """After a module has loaded: at the end of the whole load write values back; graphs built before are out of date."""
        self._loading_depth -= 1
        if self._loading_depth > 0:
            return
        runtime = self._runtime
        if self._loading is not None:
            self._loading.close()
            self._loading = None
        for unit in runtime.units:
            if unit.is_always_full:
                with runtime.offload.on_device(unit, keeps_changes=True):
                    write_back(unit)
            unit.changed()
        runtime.transport.fence()

    def end_interrupted_load(self) -> None:
        """End a load that raised."""
        if self._loading is not None:
            self._loading_depth = 1
            self.end_loading()

    def touch(self, units: Sequence[Unit]) -> bool:
        """Gather touched Units and return True while a state dict is loaded; else return False."""
        if self._loading is not None:
            self._loading.touch(units)
        return self._loading is not None

    def _open_window(self, unit: Unit) -> None:
        runtime = self._runtime
        runtime.transport.fence()  # every rank has stored its part
        runtime.gathering.use(unit).scopes += 1
        runtime.gathering.gather(unit)
        runtime.gathering.uncover(unit)

    def _close_window(self, unit: Unit) -> None:
        runtime = self._runtime
        runtime.transport.fence()
        copy_assigned(unit)
        with runtime.offload.on_device(unit, keeps_changes=True):
            write_back(unit)
        unit.writes.note()
        runtime.transport.fence()
        runtime.gathering.use(unit).scopes -= 1
        runtime.gathering.free(unit)


def _is_changed(unit: Unit, mark: int) -> bool:
    """Whether a collective has changed values: a broadcast writes on some ranks only, and to all of them the same values."""
    if checksum(unit.full) != mark:
        return True
    unit.drop_own_pages()
    return False


def without_views(result: Any, touched: Sequence[Handle], name: str) -> Any:
    """Make an operation's result safe to keep when its Units are freed: views without history become `FreedView`s."""
    if name in _COPIED:
        copied = result.copy()
        copied.flags.writeable = False  # a write to the copy would not reach the parameter
        return copied
    units = list(dict.fromkeys(handle.unit for handle in touched))
    places = [(unit.full.data_ptr(), unit.full.data_ptr() + unit.full_bytes, unit) for unit in units]

    def checked(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, ShardedParameter) or not tensor.numel():
            return tensor
        try:
            address = address_of(tensor)
        except RuntimeError:  # the wrapper of a torch.func transform
            return tensor
        unit, start = next(((unit, start) for start, end, unit in places if start <= address < end), (None, 0))
        if unit is None:
            return tensor
        if tensor.grad_fn is not None:
            return tensor  # part of a graph: its memory is kept for as long as it is used
        slot = unit.layout.slot_at((address - start) // unit.dtypes.compute.itemsize)
        stand_in = FreedView.of(next(h for h in touched if h.unit is unit).at(slot), local_of(tensor))
        if not is_dtensor(tensor):
            return stand_in
        set_local(tensor, stand_in)  # operations on it come to the stand-in, which refuses them
        return tensor

    return map_tensors(checked, result)
