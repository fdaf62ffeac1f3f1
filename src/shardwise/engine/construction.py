"""Builds a model larger than memory: every submodule is partitioned as soon as it is complete.

torch calls the registration hooks used here when a module or parameter is registered; no torch function is replaced. Every
rank draws the same random numbers and keeps its slice, so parameters are bit-identical to plain construction. A later
operation on a parameter (a framework's own initialisation, `apply`, tying) gathers its Unit, runs, and is written back.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.comm import Transport, World, make_transport
from shardwise.config import Offload
from shardwise.engine.filling import Filling, SkipInitialisation, Source
from shardwise.engine.nested import tensors_in
from shardwise.engine.outside import without_views
from shardwise.engine.window import ROOM_BYTES, Window
from shardwise.errors import FreedParameterError, LifecycleError, ShardwiseError
from shardwise.partition import (
    Blueprint,
    Handle,
    Slot,
    Unit,
    UnitDtypes,
    copy_assigned,
    flat_values,
    make_layout,
    storage_stride,
    store,
    write_back,
)
from shardwise.tiers import DiskFile, DiskShelf, Heap, Kind, Ledger, Mover, Shelf, checksum

_EXCHANGE_BYTES = 8 << 20
_TIMEOUT_S = 600.0
_ONLY = 0  # key of the only Unit on a shelf


class Construction:
    """Owns the shards of a model between its construction and `shard`."""

    allows_optimizer = True

    def __init__(self, world: World, offload: Offload, filling: Filling | None = None) -> None:
        """`filling`: where values will come from; the model's own initialisation is lost then."""
        self.world = world
        self._filling = filling
        self.transport: Transport = make_transport("auto", world, (), _EXCHANGE_BYTES, _TIMEOUT_S)[0]
        self.ledger = Ledger()
        self.digests: weakref.WeakKeyDictionary[Unit, list[int]] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, weakref.ref[nn.Module]] = {}  # modules with parameters to be partitioned, in order
        self._loaded: dict[int, weakref.ref[nn.Module]] = {}  # those of them in which weights replace meta parameters
        me = weakref.proxy(self)  # no reference cycle: a Construction ends with the last of its models
        self._window = Window(lambda unit: me.gather(unit), lambda unit: me._write_back(unit))
        self._is_open = True
        self._num_units = 0
        self._read: tuple[Unit, torch.Tensor] | None = None
        self._disk = DiskFile(offload.path or tempfile.gettempdir(), checks=offload.checks) if offload.params == "disk" else None
        self._shelves: weakref.WeakKeyDictionary[Unit, Shelf] = weakref.WeakKeyDictionary()  # if shards go to disk
        self._mover = Mover(world.device, self.ledger)
        self._heap = Heap()
        self._scratch: torch.Tensor | None = None

    @property
    def is_on_disk(self) -> bool:
        """Whether shards are kept on disk."""
        return self._disk is not None

    # -- registration hooks -----------------------------------------------------------------------------------

    def on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Registration hook: a parameter of `module` is to be partitioned once the module is complete."""
        if param is None:
            return
        if self._filling is not None:
            self._filling.holds(module)
        before = module._parameters.get(name)
        if before is not None and before.is_meta:  # weights are loaded into a model on the meta device
            for other in _alive(self._loaded):
                if other is not module and not any(p is not None and p.is_meta for p in other._parameters.values()):
                    self.partition(other)
            self._loaded[id(module)] = weakref.ref(module)
        self._waiting[id(module)] = weakref.ref(module)

    def on_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """Registration hook: a module is complete when its parent registers it, so partition it."""
        if self._filling is not None:
            self._filling.registered(parent, module)
        for part in () if module is None else module.modules():
            if part._parameters and id(part) not in self._loaded:
                self.partition(part)

    def partition(self, module: nn.Module) -> None:
        """Partition the parameters that a module itself holds: keep this rank's shard of them."""
        self._waiting.pop(id(module), None)
        self._loaded.pop(id(module), None)
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, param in module._parameters.items():
            if param is None or hasattr(param, "_shardwise") or param.is_meta or not param.is_floating_point():
                continue
            by_dtype.setdefault(param.dtype, []).append((name, param))
        for dtype, params in by_dtype.items():
            self._make_unit(module, dtype, params)

    def _make_unit(self, module: nn.Module, dtype: torch.dtype, params: list[tuple[str, nn.Parameter]]) -> None:
        distinct = list({id(param): (name, param) for name, param in params}.values())
        layout = make_layout(
            [(name, tuple(p.shape), storage_stride(p.shape, p.stride())) for name, p in distinct],
            dtype.itemsize,
            self.world.shard.size,
        )
        blueprint = Blueprint(
            index=self._num_units,
            name=type(module).__name__,
            path="",
            layout=layout,
            rank=self.world.shard.rank,
            dtypes=UnitDtypes(dtype, dtype, dtype, dtype, dtype),
            device=distinct[0][1].device,
            is_trainable=False,
            is_always_full=False,
            offloads_shard=self._disk is not None,
        )
        self._num_units += 1
        self.transport.watch.know(blueprint.index, blueprint.name, [name for name, _ in distinct])
        memory = torch.zeros(0 if blueprint.offloads_shard else layout.shard_numel, dtype=dtype, device=blueprint.device)
        unit = Unit(blueprint, module, [p for _, p in distinct], self, self.ledger, memory)
        if self._disk is not None:
            self._shelves[unit] = DiskShelf(self._disk, Kind.PARAM, dtype, {_ONLY: layout.shard_numel}, self.ledger, self._mover)
        if self._filling is None:
            values = [flat_values(p, slot.stride) for p, slot in zip(unit.params, layout.slots, strict=True)]
            with self.on_device(unit, keeps_changes=True, is_new=True):
                for slot, value in enumerate(values):
                    store(unit, slot, value)
            self.digests[unit] = [checksum(value) for value in values]
            del values
        else:
            self.digests[unit] = [0] * len(distinct)
        unit.adopt(keeps_unit=True)
        self._heap.freed(unit.full_bytes)

    @contextlib.contextmanager
    def on_device(self, unit: Unit, *, keeps_changes: bool, is_new: bool = False) -> Iterator[None]:
        """Have a Unit's shard in memory inside the context: borrowed from its shelf if it is on disk."""
        shelf = self._shelves.get(unit)
        if shelf is None:
            yield
            return
        offloaded = unit.shard
        with shelf.borrowed(_ONLY, keeps_changes=keeps_changes, is_new=is_new) as shard:
            unit.shard = unit.master = shard
            try:
                yield
            finally:
                unit.shard = unit.master = offloaded

    # -- touches ----------------------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """Make a Unit's parameters usable."""
        with self.on_device(unit, keeps_changes=False):
            self.transport.gather(unit.index, unit.shard, unit.begin_gather()).wait()
        unit.expose()

    def _write_back(self, unit: Unit) -> None:
        copy_assigned(unit)
        with self.on_device(unit, keeps_changes=True):
            write_back(unit)
        self.digests[unit] = [checksum(unit.full[slot.offset : slot.end]) for slot in unit.layout.slots]
        unit.free()

    def release(self) -> None:
        """After `shard` has taken over a model: free buffers and end threads."""
        self._read = None
        self._mover.close()
        for buffers in (self._mover.buffers, self._mover.device_buffers):
            buffers.drop_free()
        self.transport.close()  # the disk file is kept for other models of this construction, and closed with the last

    def finish(self, *, completed: bool) -> None:
        """Partition modules that no parent has registered (the model itself), fill them if `completed`, end the construction."""
        for module in _alive(self._waiting):
            self.partition(module)
        self._window.close()
        self._is_open = False
        for unit in self.digests:
            if unit.was_any_page_written():
                raise ShardwiseError(
                    f"sharded_init(): a tensor taken from a parameter of {unit.name} ({unit.layout.slots[0].name!r} or its "
                    "siblings, through .data or a view) was written after others had been touched, and the write was lost. "
                    "Write through the parameter itself, such as param.copy_(...) under torch.no_grad()."
                )
        self._scratch = None
        if self._filling is not None and completed:
            self._filling.fill(self)
        self._filling = None
        for unit in list(self.digests):
            if not _is_used(unit):
                unit.params.clear()  # ends the reference cycle of a Unit and its parameters, which tying has replaced
        self._heap.give_back()

    def touch(self, units: Sequence[Unit]) -> bool:
        """Gather touched Units and return True during construction; after it return False."""
        if self._is_open:
            self._window.touch(units)
        return self._is_open

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Run one operation between construction and `shard`: gather, run, write back, free."""
        self._window.touch([handle.unit for handle in touched])
        try:
            result = without_views(function(), touched, name)
        finally:
            self._window.close()
        if any(tensor.requires_grad and not tensor.is_leaf for tensor in tensors_in(result)):
            first = touched[0].unit
            raise FreedParameterError(
                f"{name} on parameter {first.layout.slots[touched[0].slot].name!r} of {first.name}: autograd would record it, "
                f"but its values are not kept. {self.remedy()}"
            )
        return result

    def operate_tiled(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Never called: parameters are cut into tiles by `shard`."""
        raise LifecycleError("an operation on a tiled parameter during construction: a broken invariant.")

    def overwrite(self, handle: Handle, write: Callable[[torch.Tensor], object]) -> bool:
        """Initialise a parameter again: every rank makes the whole value and keeps its slice, so that nothing is gathered."""
        unit, place = handle.unit, handle.unit.layout.slots[handle.slot]
        if self._filling is not None and self._is_open:
            return True
        unit.discard_kept()
        if not self._is_open or unit.keeps_memory:  # user code holds a view, which must show the new values
            return False
        value = self._scratch_for(unit, place)
        write(value)
        flat = flat_values(value, place.stride)
        with self.on_device(unit, keeps_changes=True):
            store(unit, handle.slot, flat)
        self.digests[unit][handle.slot] = checksum(flat)
        unit.changed([handle.slot])
        return True

    def _scratch_for(self, unit: Unit, slot: Slot) -> torch.Tensor:
        """Memory for one parameter's new value. Small ones share it: clearing new pages would take as long as filling them."""
        dtype, device = unit.dtypes.stored, unit.blueprint.device
        num_bytes = slot.numel * dtype.itemsize
        if num_bytes > ROOM_BYTES:
            self._heap.freed(num_bytes)  # when the caller has stored it
            return torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=device)
        if self._scratch is None or self._scratch.numel() < num_bytes or self._scratch.device != device:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._scratch[:num_bytes].view(dtype).as_strided(slot.shape, slot.stride)

    def flagged(self, handle: Handle, requires_grad: bool) -> None:
        """Nothing to do: `shard` looks at which parameters require gradients."""

    def owns(self, address: int) -> bool:
        """Whether an address lies in the full vector of a Unit, gathered or freed."""
        return any(unit.has_address(address) for unit in self.digests)

    def copied(self, handle: Handle) -> nn.Parameter:
        """A copy of a parameter, which is partitioned too."""
        unit, slot = handle.unit, handle.unit.layout.slots[handle.slot]
        original = unit.params[handle.slot]
        values = self.full_values(unit, handle.slot).as_strided(slot.shape, slot.stride)
        param: nn.Parameter = original._user_class(values.clone(memory_format=torch.preserve_format), original.requires_grad)  # type: ignore[attr-defined]
        self._read = None
        self._make_unit(unit.module, param.dtype, [(slot.name, param)])
        return param

    def number(self, units: Sequence[Unit], names: Sequence[str]) -> None:
        """Number and name Units by the finished model, because ranks may have partitioned them in different orders."""
        self._window.close()
        for index, (unit, name) in enumerate(zip(units, names, strict=True)):
            unit.renumber(index)
            self.transport.watch.know(index, name.rpartition(".")[0] or name, [name])

    def full_values(self, unit: Unit, slot: int) -> torch.Tensor:
        """One parameter's full value, flat. Its Unit is gathered into a temporary vector; the parameters stay freed."""
        if self._is_open:
            self._window.close()  # write back what was touched first
        if self._read is None or self._read[0] is not unit:
            self._read = None  # free the last vector before the next one is allocated
            full = torch.empty(unit.layout.numel, dtype=unit.dtypes.stored, device=unit.blueprint.device)
            with self.on_device(unit, keeps_changes=False):
                self.transport.gather(unit.index, unit.shard, full).wait()
            self._read = (unit, full)
        place = unit.layout.slots[slot]
        return self._read[1][place.offset : place.end]

    def remedy(self) -> str:
        """What to do with a model that is built but not yet sharded."""
        return "It was built under sharded_init(): call sw.shard(model, optimizer, ...) first, then use the run."

    def local_grad(self, handle: Handle) -> torch.Tensor | None:
        """Always None: there are no gradients before `shard`."""
        return None

    def set_local_grad(self, handle: Handle, grad: torch.Tensor | None) -> None:
        """Accept None; refuse gradients before `shard`."""
        if grad is not None:
            raise ShardwiseError(f"setting .grad under sharded_init(): {self.remedy()}")


def _alive(modules: dict[int, weakref.ref[nn.Module]]) -> list[nn.Module]:
    """The modules that still exist, in order."""
    return [module for ref in list(modules.values()) if (module := ref()) is not None]


def _is_used(unit: Unit) -> bool:
    """Whether anything but the Unit itself holds one of its parameters."""
    alone = [object()]
    (num_alone,) = [sys.getrefcount(entry) for entry in alone]
    if any(count > num_alone for count in [sys.getrefcount(param) for param in unit.params]):
        return True
    return any(param._use_count() > 1 for param in unit.params if hasattr(param, "_use_count"))  # held by a graph


def was_built_on_disk(model: nn.Module) -> bool:
    """Whether a model was built under `sharded_init` with its shards on disk, and not sharded since."""
    owners = [p._shardwise.unit.owner for p in model.parameters() if hasattr(p, "_shardwise")]
    return any(isinstance(owner, Construction) and owner.is_on_disk for owner in owners)


@contextlib.contextmanager
def constructing(world: World, offload: Offload, source: Source | None = None) -> Iterator[Construction]:
    """Partition every module that is built inside the context; at its end fill the model from `source`, if there is one."""
    construction = Construction(world, offload, None if source is None else Filling(source))
    handles = [
        register_module_parameter_registration_hook(construction.on_parameter),
        register_module_module_registration_hook(construction.on_module),
    ]
    completed = False
    try:
        with contextlib.nullcontext() if source is None else SkipInitialisation():
            yield construction
        completed = True
    finally:
        for handle in handles:
            handle.remove()
        construction.finish(completed=completed)
