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

from shardwise.engine.digest import digest
from shardwise.engine.nested import map_tensors
from shardwise.engine.window import Window
from shardwise.partition import COLLECTIVES, FreedView, Handle, ShardedParameter, Unit, flat_values

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
                    runtime.gather(unit)
                unit.scopes += 1
                done.append(unit)
                unit.uncover()
            yield
        finally:
            for unit in done:
                unit.scopes -= 1
                unit.cover()
                runtime.free(unit)

    @contextlib.contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep Units gathered; on leaving, write changes back to the shards."""
        runtime = self._runtime
        runtime.settle()
        runtime.absorb_writes()
        runtime.transport.fence()  # whole parameters may live in shared memory: nobody may still read what is written now
        done: list[Unit] = []
        self.num_contexts += 1
        try:
            for unit in units:
                if not unit.is_gathered:
                    runtime.gather(unit)
                unit.scopes += 1
                unit.num_contexts += 1
                done.append(unit)
                unit.uncover()
            with runtime.saved.keeping():
                yield
        finally:
            self.num_contexts -= 1
            for unit in done:
                unit.scopes -= 1
                unit.num_contexts -= 1
            try:
                if not runtime.transport.watch.has_failed:
                    self._store(done)
            finally:
                for unit in done:
                    unit.cover()
                    runtime.free(unit)
                runtime.transport.fence()

    def _store(self, units: Sequence[Unit]) -> None:
        """Write what user code changed back to the shards; all ranks must have made the same change."""
        runtime = self._runtime
        for unit in units:
            unit.absorb()
        flags = []
        for unit in units:
            is_written = unit.may_be_written()
            if not is_written and not unit.holds_alias:  # arrays and collectives change memory without a version: look
                with runtime.offload.resident(unit, keeps_changes=False):
                    is_written = unit.differs()
            flags.append(int(is_written))
        written = runtime.agree_on(flags)  # and nobody gathers any more
        changed = [unit for unit, (_, is_written) in zip(units, written, strict=True) if is_written]
        if changed:
            runtime.require_alike(changed)
        for unit in changed:
            with runtime.offload.resident(unit, keeps_changes=True):
                is_changed = unit.store_from_full()
            if is_changed:
                unit.changed()
            unit.note_versions()

    # -- single operations ------------------------------------------------------------------------------------

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Gather, run one operation, write its changes back, free. Results that are views become places."""
        runtime = self._runtime
        runtime.free_lingering()
        units = list(dict.fromkeys(handle.unit for handle in touched))
        was_open = [unit for unit in units if unit.is_gathered]
        with self.opened(units):
            looks = name.startswith(COLLECTIVES)
            before = [(unit.full._version, digest(unit.full) if looks else 0) for unit in units]
            with runtime.saved.keeping() as keeps_places:
                result = function()
            if not keeps_places:  # inside a torch.func transform: values, not places, are in the graph
                for unit in units:
                    unit.is_pinned = True
            result = without_views(result, touched, name)
            written = [
                unit
                for unit, (version, mark) in zip(units, before, strict=True)
                if unit not in was_open
                and (unit.full._version != version or unit.may_be_written() or (looks and digest(unit.full) != mark))
            ]
            if written:
                for unit in written:
                    unit.absorb()
                    unit.is_written = True
                runtime.settle()
                runtime.store_written(written)
        return result

    # -- whole vectors ----------------------------------------------------------------------------------------

    def full_master(self, unit: Unit) -> torch.Tensor:
        """All masters of a Unit, in new memory unless they are whole here."""
        runtime = self._runtime
        with runtime.offload.resident(unit, keeps_changes=False):
            full = self._full_vector(unit, unit.master)
            is_lent = (unit.shard_is_away or unit.master_is_away) and full is unit.master
            return full.clone() if is_lent else full

    def full_grad(self, unit: Unit) -> torch.Tensor:
        """The whole reduced gradient of a Unit, in new memory unless it is whole here."""
        runtime = self._runtime
        with runtime.offload.resident_grad(unit) as grad:
            assert grad is not None
            full = self._full_vector(unit, grad)
            return full.clone() if full is grad and runtime.offload.grads_are_away else full

    def _full_vector(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        if shard.numel() == unit.layout.numel:
            return shard
        runtime = self._runtime
        runtime.settle()
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
            runtime.settle()
            runtime.absorb_writes()
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
                with runtime.offload.resident(handle.unit, keeps_changes=True):
                    handle.unit.store(handle.slot, flat_values(value.to(handle.unit.device), stride))

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
                with runtime.offload.resident(unit, keeps_changes=True):
                    unit.store_from_full()
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
        unit.scopes += 1
        runtime.gather(unit)
        unit.uncover()

    def _close_window(self, unit: Unit) -> None:
        runtime = self._runtime
        runtime.transport.fence()
        unit.absorb()
        with runtime.offload.resident(unit, keeps_changes=True):
            unit.store_from_full()
        unit.note_versions()
        runtime.transport.fence()
        unit.scopes -= 1
        runtime.free(unit)


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
