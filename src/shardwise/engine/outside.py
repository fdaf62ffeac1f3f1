"""What happens to parameters outside a training step: contexts, single operations, loading, whole vectors.

Every read of another rank's shard that ends here is followed by a fence before its owner can write it again, and every write back
happens between two fences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.engine.nested import map_tensors
from shardwise.engine.window import Window
from shardwise.partition import (
    COLLECTIVES,
    FreedView,
    Handle,
    ShardedParameter,
    Unit,
    absorb,
    differs,
    flat_values,
    store,
    write_back,
)
from shardwise.tiers import checksum

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime

_COPIED = ("numpy", "__array__")
"""Results that are no tensors and show the memory they were made from."""


class Outside:
    """Gathers, changes and reads Units of one run while no pass does."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.num_contexts = 0
        """`run.gathered` contexts that are open."""
        self._loading: Window | None = None
        self._loading_depth = 0

    @property
    def is_loading(self) -> bool:
        """Whether a state dict is being loaded."""
        return self._loading is not None

    # -- contexts ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, units: Sequence[Unit]) -> Iterator[None]:
        """Units gathered for a while, to be read or written."""
        runtime = self._runtime
        done: list[Unit] = []
        try:
            for unit in units:
                if not unit.is_gathered:
                    runtime.gathering.gather(unit)
                runtime.gathering.use(unit).scopes += 1
                done.append(unit)
                unit.uncover()
            yield
        finally:
            for unit in done:
                runtime.gathering.use(unit).scopes -= 1
                runtime.gathering.cover(unit)
                runtime.gathering.free(unit)

    @contextlib.contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep Units gathered; on leaving, write changes back to the shards."""
        runtime = self._runtime
        runtime.gathering.settle()
        runtime.changes.absorb()
        runtime.transport.fence()  # whole parameters may live in shared memory: nobody may still read what is written now
        done: list[Unit] = []
        self.num_contexts += 1
        try:
            for unit in units:
                if not unit.is_gathered:
                    runtime.gathering.gather(unit)
                runtime.gathering.use(unit).scopes += 1
                runtime.gathering.use(unit).num_contexts += 1
                done.append(unit)
                unit.uncover()
            with runtime.saved.keeping():
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
            absorb(unit)
        flags = []
        for unit in units:
            is_written = unit.may_be_written()
            if not is_written and not unit.blueprint.holds_alias:  # arrays and collectives change memory without a version: look
                with runtime.offload.on_device(unit, keeps_changes=False):
                    is_written = differs(unit)
            flags.append(int(is_written))
        written = runtime.changes.agree_on(flags)  # and nobody gathers any more
        changed = [unit for unit, (_, is_written) in zip(units, written, strict=True) if is_written]
        if changed:
            runtime.changes.require_alike(changed)
        for unit in changed:
            with runtime.offload.on_device(unit, keeps_changes=True):
                is_changed = write_back(unit)
            if is_changed:
                unit.changed()
            unit.writes.note()

    # -- single operations ------------------------------------------------------------------------------------

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Gather, run one operation, write its changes back, free. Results that are views become places."""
        runtime = self._runtime
        runtime.gathering.discard_kept()
        units = list(dict.fromkeys(handle.unit for handle in touched))
        was_open = [unit for unit in units if unit.is_gathered]
        with self.opened(units):
            looks = name.startswith(COLLECTIVES)
            before = [(unit.full._version, checksum(unit.full) if looks else 0) for unit in units]
            with runtime.saved.keeping() as keeps_places:
                result = function()
            if not keeps_places:  # inside a torch.func transform: values, not places, are in the graph
                for unit in units:
                    runtime.gathering.use(unit).is_pinned = True
            result = without_views(result, touched, name)
            written = [
                unit
                for unit, (version, mark) in zip(units, before, strict=True)
                if unit not in was_open
                and (unit.full._version != version or unit.may_be_written() or (looks and checksum(unit.full) != mark))
            ]
            if written:
                for unit in written:
                    absorb(unit)
                    runtime.gathering.use(unit).is_written = True
                runtime.gathering.settle()
                runtime.changes.store(written)
        return result

    # -- whole vectors ----------------------------------------------------------------------------------------

    def full_grad(self, unit: Unit) -> torch.Tensor:
        """The whole reduced gradient of a Unit, in new memory unless it is whole here."""
        runtime = self._runtime
        with runtime.gradients.home.on_device(unit) as grad:
            full = self.whole(unit, grad)
            return full.clone() if full is grad and runtime.gradients.home.is_offloaded else full

    def whole(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        """The whole of a vector of which `shard` is this rank's span; itself if that is the whole. All ranks must ask."""
        if shard.numel() == unit.layout.numel:
            return shard
        runtime = self._runtime
        runtime.gathering.settle()
        full = torch.empty(unit.layout.numel, dtype=shard.dtype, device=shard.device)
        runtime.transport.fence()  # a slower rank may still be writing its parameters by hand
        runtime.transport.gather(unit.index, shard, full).wait()
        runtime.transport.fence()  # and a faster one must not begin to before this is read
        return full

    # -- loading ----------------------------------------------------------------------------------------------

    def begin_loading(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """A module is about to copy its part of a state dict in: keep what is exact, let every touch gather its Unit."""
        runtime = self._runtime
        if self._loading is not None and not prefix:
            runtime.start_afresh()  # the load before this one raised
        if self._loading is None:
            runtime.gathering.settle()
            runtime.changes.absorb()
            runtime.transport.fence()
            self._loading = Window(self._open_window, self._close_window)
        self._loading_depth += 1
        for name, param in module._parameters.items():
            value, handle = state.get(prefix + name), getattr(param, "_shardwise", None)
            if (
                handle is not None
                and isinstance(value, torch.Tensor)
                and value.shape == handle.unit.layout.slots[handle.slot].shape
            ):
                stride = handle.unit.layout.slots[handle.slot].stride
                with runtime.offload.on_device(handle.unit, keeps_changes=True):
                    store(handle.unit, handle.slot, flat_values(value.to(handle.unit.blueprint.device), stride))

    def end_loading(self) -> None:
        """Write what was loaded back to the shards; graphs built before are out of date."""
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
        """A load raised in its middle: end it."""
        if self._loading is not None:
            self._loading_depth = 1
            self.end_loading()

    def touch(self, units: Sequence[Unit]) -> bool:
        """While a state dict is loaded every touch gathers."""
        if self._loading is not None:
            self._loading.touch(units)
        return self._loading is not None

    def _open_window(self, unit: Unit) -> None:
        runtime = self._runtime
        runtime.transport.fence()  # every rank has stored its part
        runtime.gathering.use(unit).scopes += 1
        runtime.gathering.gather(unit)
        unit.uncover()

    def _close_window(self, unit: Unit) -> None:
        runtime = self._runtime
        runtime.transport.fence()
        absorb(unit)
        with runtime.offload.on_device(unit, keeps_changes=True):
            write_back(unit)
        unit.writes.note()
        runtime.transport.fence()
        runtime.gathering.use(unit).scopes -= 1
        runtime.gathering.free(unit)


def without_views(result: Any, touched: Sequence[Handle], name: str) -> Any:
    """What one operation may hand out when its Units are freed after it: views without history become places."""
    if name in _COPIED:
        copied = result.copy()
        copied.flags.writeable = False  # what is written there would not reach the parameter
        return copied
    units = list(dict.fromkeys(handle.unit for handle in touched))
    places = [(unit.full.data_ptr(), unit.full.data_ptr() + unit.full_bytes, unit) for unit in units]

    def checked(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, ShardedParameter) or not tensor.numel():
            return tensor
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # the wrapper of a torch.func transform
            return tensor
        unit, start = next(((unit, start) for start, end, unit in places if start <= address < end), (None, 0))
        if unit is None:
            return tensor
        if tensor.requires_grad:
            return tensor  # part of a graph: its Unit stays gathered for as long as it is used
        slot = unit.layout.slot_at((address - start) // unit.dtypes.compute.itemsize)
        return FreedView.of(next(h for h in touched if h.unit is unit).at(slot), tensor)

    return map_tensors(checked, result)
