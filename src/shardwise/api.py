"""The front door: `shard`, `sharded_init` and the handle `Run`."""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Reservation, Transport, World, make_transport
from shardwise.config import ShardConfig
from shardwise.engine import (
    STAGES,
    Held,
    Runtime,
    attach,
    check_methods,
    constructing,
    digest,
    emulates_16_bit,
    resolve_dtypes,
)
from shardwise.engine.gradients import MAX_IN_FLIGHT
from shardwise.errors import ConfigError, ModelError, RanksDifferError
from shardwise.observe import EventLog, format_bytes, format_table, process_memory, saved_activation_bytes
from shardwise.optim import (
    LossScaler,
    adopt_optimizer,
    check_optimizer,
    clone_optimizer,
    make_pieces,
    num_moments,
    state_bytes,
)
from shardwise.partition import (
    ParamInfo,
    Unit,
    UnitSpec,
    find_units,
    flat_values,
    list_params,
    make_layout,
    storage_stride,
)
from shardwise.planner import MemoryPlan, UnitSize, plan_memory
from shardwise.testing.parity import ParityReport, compare_with_plain
from shardwise.tiers import Kind, Ledger, Tier


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, mesh: DeviceMesh | None = None, **options: Any
) -> Run:
    """Partition `model` and `optimizer` in place over the ranks of this launch; return the handle.

    Options are the fields of `shardwise.config.ShardConfig`; `stage` is required. `mesh` is a one-dimensional
    DeviceMesh (default: all ranks). Every rank must call this with the same model and options.
    """
    config = ShardConfig.of(options)
    infos = _check_model(model)
    check_methods(model, config.methods)
    specs = find_units(model, config.units, config.max_unit_bytes)
    if optimizer is not None:
        check_optimizer(optimizer, infos)
    world = World.of(mesh, infos[0].param.device)
    _check_ranks_agree(world, config, infos, specs)
    _broadcast_buffers(world, model)
    transport = make_transport(config.transport, world, config.exchange_bytes, config.timeout_s)
    scaler = LossScaler(config.precision.loss_scale) if config.precision.loss_scale is not None else None
    ledger = Ledger()
    runtime = Runtime(world, transport, STAGES[config.stage], EventLog(), scaler, ledger)
    emulated = _emulated(world, config)
    units = [_make_unit(i, spec, model, runtime, config, emulated) for i, spec in enumerate(specs)]
    memory = transport.reserve([Reservation(u.index, u.reserved_numel, u.dtypes.stored, u.holds_alias) for u in units])
    for unit, spec, vector in zip(units, specs, memory, strict=True):
        _fill_unit(unit, spec, vector)
    transport.fence()  # no rank reads shards that a slower one is still filling
    make_pieces(units)
    if optimizer is not None:
        adopt_optimizer(optimizer, units, runtime.before_step, runtime.after_step)
    runtime.start(units)
    attach(model, runtime, units, config.methods)
    model._shardwise_run = Run(model, optimizer, config, runtime, ledger, specs)  # type: ignore[assignment]
    run: Run = model._shardwise_run  # type: ignore[assignment]
    return run


@contextlib.contextmanager
def sharded_init(*, mesh: DeviceMesh | None = None, device: torch.device | str = "cpu") -> Iterator[None]:
    """Build a model larger than memory: inside, every submodule is partitioned as soon as it is complete.

    Seed every rank alike. Parameters are bit-identical to plain construction; call `shard` afterwards.
    """
    with constructing(World.of(mesh, torch.device(device))):
        yield


class Run:
    """The one handle for everything that is not the user's own loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: ShardConfig,
        runtime: Runtime,
        ledger: Ledger,
        specs: list[UnitSpec],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._runtime = runtime
        self._activation_bytes = 0
        self._places = {
            name: (unit, slot)
            for unit, spec in zip(runtime.units, specs, strict=True)
            for slot, info in enumerate(spec.infos)
            for name in info.names
        }
        self._specs = specs
        self.config = config
        """What was asked for, frozen."""
        self.ledger = ledger
        """Bytes per tier and kind."""

    # -- training ---------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the global gradient norm, as `torch.nn.utils.clip_grad_norm_`; returns the norm before clipping.

        Raises NonFiniteGradientError, with nothing changed, if a gradient is infinite or NaN (under loss scaling
        the coming step is skipped instead).
        """
        if not (max_norm > 0 and norm_type > 0):
            raise ConfigError(f"clip_grad_norm_({max_norm}, {norm_type}): both must be positive.")
        return self._runtime.clip_grad_norm_(float(max_norm), float(norm_type))

    @contextlib.contextmanager
    def gathered(self, module: nn.Module | None = None) -> Iterator[None]:
        """Full parameters of `module` (default: the model) inside; in-place changes are kept. All ranks must enter.

        Every rank must make the same change: each keeps its own slice of what it sees.
        """
        module = self._model if module is None else module
        handles = [getattr(param, "_shardwise", None) for param in module.parameters()]
        if any(handle is None or handle.unit.owner is not self._runtime for handle in handles):
            raise ModelError(f"gathered(): {type(module).__name__} has parameters that this run does not manage.")
        units = {handle.unit.index: handle.unit for handle in handles if handle is not None}
        with self._runtime.gathered(list(units.values())):
            yield

    # -- reading ----------------------------------------------------------------------------------------------

    def iter_full_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full value) of parameters, one Unit in memory at a time, then of buffers. All ranks must iterate.

        Trainable values come from the masters, in the parameter's original dtype. A tensor is only valid until the
        next one is asked for.
        """
        by_unit: dict[int, list[tuple[str, int]]] = {}
        for name, (unit, slot) in self._places.items():
            by_unit.setdefault(unit.index, []).append((name, slot))
        for unit in self._runtime.units:
            full = self._runtime.full_vector(unit, unit.master)
            for name, slot in by_unit[unit.index]:
                yield name, _param_view(unit, slot, full).to(unit.dtypes.original)
        persistent = {name for name in self._buffer_names()}
        for name, buffer in self._model.named_buffers():
            if name in persistent:
                yield name, buffer

    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, torch.Tensor]:
        """The whole state dict on the CPU, streamed Unit by Unit; empty on other ranks unless `rank0_only=False`."""
        wanted = self._runtime.world.rank == 0 or not rank0_only
        found: dict[str, torch.Tensor] = {}
        tied: dict[tuple[int, int], torch.Tensor] = {}
        for name, value in self.iter_full_state():
            if not wanted:
                continue
            place = self._places.get(name)
            key = None if place is None else (place[0].index, place[1])
            if key is not None and key in tied:
                found[name] = tied[key]
                continue
            found[name] = value.detach().to("cpu", copy=True).contiguous()
            if key is not None:
                tied[key] = found[name]
        order = [*self._model_order(), *found]
        return {name: found[name] for name in dict.fromkeys(order) if name in found}

    def grad(self, name: str) -> torch.Tensor | None:
        """The full reduced gradient of a parameter, or None if nothing used it (or it is empty). All ranks must call."""
        unit, slot = self._place(name)
        if not unit.is_trainable or unit.grad is None:
            return None
        has = any(p.piece.slot_index == slot and p.master.grad is not None for p in unit.pieces)
        flag = self._runtime.world.all_reduce(
            torch.tensor([int(has)], device=self._runtime.world.device), torch.distributed.ReduceOp.MAX
        )
        if not flag.item():
            return None
        return _param_view(unit, slot, self._runtime.full_vector(unit, unit.grad)).clone()

    def master(self, name: str) -> torch.Tensor:
        """The full value the optimizer updates (fp32 or wider). All ranks must call."""
        unit, slot = self._place(name)
        return _param_view(unit, slot, self._runtime.full_vector(unit, unit.master)).clone()

    def _place(self, name: str) -> tuple[Unit, int]:
        if name not in self._places:
            near = difflib.get_close_matches(name, self._places, n=1)
            raise ModelError(f"no parameter {name!r} in the model{f' (did you mean {near[0]!r}?)' if near else ''}.")
        return self._places[name]

    def _buffer_names(self) -> set[str]:
        names = set()
        for path, module in self._model.named_modules():
            for name in module._buffers:
                if name not in module._non_persistent_buffers_set:
                    names.add(f"{path}.{name}" if path else name)
        return names

    def _model_order(self) -> list[str]:
        order: list[str] = []
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            order += [prefix + name for name in module._parameters]
            order += [prefix + name for name in module._buffers]
        return order

    # -- looking back -----------------------------------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        """The transport in use, with its counters."""
        return self._runtime.transport

    @property
    def units(self) -> list[str]:
        """Names of the Units, in order."""
        return [unit.name for unit in self._runtime.units]

    @property
    def events(self) -> EventLog:
        """Named events, oldest first."""
        return self._runtime.events

    @property
    def loss_scale(self) -> float:
        """The loss scale in force (1.0 without loss scaling)."""
        return self._runtime.scaler.scale if self._runtime.scaler is not None else 1.0

    @property
    def num_skipped_steps(self) -> int:
        """Optimizer steps skipped because a gradient overflowed."""
        return self._runtime.num_skipped_steps

    @contextlib.contextmanager
    def measuring_activations(self) -> Iterator[None]:
        """Count what autograd keeps for backward inside the context; the report shows it."""
        pointers = {unit.full.untyped_storage().data_ptr() for unit in self._runtime.units}
        with saved_activation_bytes(pointers.__contains__) as count:
            yield
        self._activation_bytes = max(self._activation_bytes, count())
        self.ledger.set(self._tier, Kind.ACTIVATION, self._activation_bytes)

    @property
    def _tier(self) -> Tier:
        return Tier.HOST if self._runtime.world.device.type == "cpu" else Tier.DEVICE

    def predicted_memory(self, *, activation_bytes: int | None = None) -> MemoryPlan:
        """The formula's bytes per rank for this model and configuration."""
        sizes = [
            UnitSize(
                path=spec.module_path,
                full_numel=unit.layout.numel,
                shard_numel=unit.layout.shard_numel,
                stored_itemsize=unit.dtypes.stored.itemsize,
                compute_itemsize=unit.dtypes.compute.itemsize,
                master_itemsize=unit.dtypes.master.itemsize,
                is_trainable=unit.is_trainable,
                shared_numel=max((i.param.numel() for i in spec.infos if len(i.names) > 1), default=0),
            )
            for unit, spec in zip(self._runtime.units, self._specs, strict=True)
        ]
        return plan_memory(
            sizes,
            stage=self.config.stage,
            num_moments=num_moments(self._optimizer),
            exchange_bytes=self._runtime.transport.planned_exchange_bytes,
            activation_bytes=self._activation_bytes if activation_bytes is None else activation_bytes,
            reductions_in_flight=MAX_IN_FLIGHT + 1,
        )

    def measured_memory(self) -> dict[str, int]:
        """Peak bytes by kind as the ledger saw them on this rank."""
        if self._optimizer is not None:
            self.ledger.set(self._tier, Kind.MOMENT, state_bytes(self._optimizer))
        found = {kind.value: self.ledger.peak(self._tier, kind) for kind in Kind}
        found["buffer"] += self._runtime.transport.exchange_bytes
        return found

    def report(self, *, activation_bytes: int | None = None) -> str:
        """Bytes by kind, predicted and measured, and traffic, as text for this rank."""
        runtime = self._runtime
        predicted = self.predicted_memory(activation_bytes=activation_bytes).by_kind()
        measured = self.measured_memory()
        rows = [[kind, format_bytes(predicted[kind]), format_bytes(measured[kind])] for kind in predicted]
        rows.append(["sum", format_bytes(sum(predicted.values())), format_bytes(sum(measured[k] for k in predicted))])
        first = runtime.units[0].dtypes
        lines = [
            f"shardwise: stage {self.config.stage}, rank {runtime.world.rank} of {runtime.world.world_size}, "
            f"{len(runtime.units)} Units, transport {runtime.transport.name}",
            f"stored {_short(first.stored)}, compute {_short(first.compute)}, reduce {_short(first.reduce)}, "
            f"master {_short(first.master)}" + self._emulation_note(),
            "",
            format_table(["bytes per rank", "predicted", "measured peak"], rows),
            "",
            f"process memory now {format_bytes(process_memory().total)} (interpreter and libraries included)",
        ]
        counters = runtime.transport.counters
        for operation in sorted(counters.calls):
            lines.append(
                f"{operation}: {counters.calls[operation]} calls, {counters.elements[operation]} elements "
                f"({format_bytes(counters.bytes[operation])}) sent"
            )
        if runtime.scaler is not None:
            lines.append(f"loss scale {runtime.scaler.scale:g}, {runtime.num_skipped_steps} steps skipped")
        return "\n".join(lines)

    def _emulation_note(self) -> str:
        dtypes = self._runtime.units[0].dtypes
        if self.config.precision.compute is None and dtypes.stored.itemsize < dtypes.compute.itemsize:
            return f" (this CPU emulates {_short(dtypes.stored)} products, so compute runs in {_short(dtypes.compute)})"
        return ""

    def selfcheck(
        self, batch_fn: Callable[[nn.Module, int], torch.Tensor], *, steps: int = 3, max_norm: float | None = None
    ) -> ParityReport:
        """Compare sharded with plain replicated training of this very model, on copies; prints the differences.

        `batch_fn(model, step)` returns this rank's loss. The model and optimizer in training are not touched. Needs
        memory for two whole copies. All ranks must call.
        """
        if self._optimizer is None:
            raise ConfigError("selfcheck() needs the optimizer that was given to shard().")
        options = {
            "stage": self.config.stage,
            "precision": self.config.precision,
            "units": self.config.units,
            "max_unit_bytes": self.config.max_unit_bytes,
            "exchange_bytes": self.config.exchange_bytes,
            "methods": self.config.methods,
            "transport": self.config.transport,
            "timeout_s": self.config.timeout_s,
        }
        plain, plain_optimizer = self._plain_copy()
        other, other_optimizer = self._plain_copy()
        run = shard(other, other_optimizer, mesh=self._runtime.world.mesh, **options)
        report = compare_with_plain(
            run, other, other_optimizer, plain, plain_optimizer, batch_fn, steps=steps, max_norm=max_norm
        )
        run.close()
        if self._runtime.world.rank == 0:
            print(report)
        return report

    def _plain_copy(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """An ordinary replica of the model and a fresh optimizer with the same groups."""
        assert self._optimizer is not None
        with self.gathered():
            replica = copy.deepcopy(self._model)
        params = dict(replica.named_parameters())
        with torch.no_grad():
            for name, value in self.iter_full_state():
                if name in params:
                    params[name].data = params[name].data.to(value.dtype)
                    params[name].copy_(value)
        names = {
            id(update.master): unit.layout.slots[update.piece.slot_index].name
            for unit in self._runtime.units
            for update in unit.pieces
        }
        groups: list[list[nn.Parameter]] = []
        for number in range(len(self._optimizer.param_groups)):
            groups.append([params[name] for name in self._group_names(number, names)])
        return replica, clone_optimizer(self._optimizer, groups)

    def _group_names(self, number: int, names: dict[int, str]) -> list[str]:
        """Parameter names of one optimizer group: the union of every rank's pieces, in the model's order."""
        assert self._optimizer is not None
        mine = {names[id(piece)] for piece in self._optimizer.param_groups[number]["params"]}
        everyone = set().union(*self._runtime.world.gather_objects(mine))
        return [name for name in self._places if name in everyone]

    def close(self) -> None:
        """End background threads. The model stays as it is."""
        self._runtime.transport.close()

    def __deepcopy__(self, memo: Any) -> None:
        """A copied model has no run."""
        return None


# -- construction of a run ------------------------------------------------------------------------------------


def _check_model(model: nn.Module) -> list[ParamInfo]:
    if not isinstance(model, nn.Module):
        raise ModelError(f"shard() was given a {type(model).__name__}; a torch.nn.Module is needed.")
    if getattr(model, "_shardwise_run", None) is not None:
        raise ModelError(
            "this model is sharded already; use the run that sw.shard() returned, or build a new model to shard it otherwise."
        )
    infos = list_params(model)
    for info in infos:
        handle = getattr(info.param, "_shardwise", None)
        if handle is not None and not handle.unit.owner.allows_optimizer:
            raise ModelError(f"parameter {info.name!r} belongs to a model that is sharded already.")
        if info.param.is_meta:
            raise ModelError(
                f"parameter {info.name!r} is on the meta device and has no values. Build the model under sw.sharded_init() "
                "instead: it needs no more memory than the shards."
            )
        if not info.param.is_floating_point():
            raise ModelError(
                f"parameter {info.name!r} has dtype {info.param.dtype}; only floating parameters can be partitioned. "
                "Register it as a buffer."
            )
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ModelError(
                f"{path!r} is an embedding with sparse=True; its gradients cannot be reduced into flat shards. Use sparse=False."
            )
    devices = {info.param.device for info in infos}
    if len(devices) > 1:
        raise ModelError(f"parameters are on several devices ({', '.join(map(str, devices))}); move the model to one.")
    return infos


def _check_ranks_agree(world: World, config: ShardConfig, infos: list[ParamInfo], specs: list[UnitSpec]) -> None:
    """Compare options, names, shapes and values over ranks; name the first difference."""
    mine = {
        "options": repr((config.stage, config.precision, config.max_unit_bytes, config.exchange_bytes, config.transport)),
        "units": [(spec.name, [info.name for info in spec.infos]) for spec in specs],
        "params": [
            (info.name, tuple(info.param.shape), str(info.param.dtype), info.param.requires_grad, _digest_of(info))
            for info in infos
        ],
    }
    everyone = world.gather_objects(mine)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other["options"] != first["options"]:
            raise RanksDifferError(f"rank {rank} asks for {other['options']}, rank 0 for {first['options']}.")
        for a, b in zip(first["params"], other["params"], strict=False):
            if a != b:
                what = next(w for w, x, y in zip(_COMPARED, a, b, strict=True) if x != y)
                shown = "" if what == "values" else f": {dict(zip(_COMPARED, a))[what]} against {dict(zip(_COMPARED, b))[what]}"
                raise RanksDifferError(
                    f"the models of rank 0 and rank {rank} differ in the {what} of parameter {a[0]!r}{shown}. Build the same "
                    "model on every rank: the same code, and the same seed (torch.manual_seed) or checkpoint."
                )
        if len(first["params"]) != len(other["params"]):
            raise RanksDifferError(
                f"rank 0 has {len(first['params'])} parameters, rank {rank} has {len(other['params'])}."
            )
        if other["units"] != first["units"]:
            raise RanksDifferError(f"rank {rank} found other Units than rank 0; pass the same units= on every rank.")


_COMPARED = ("name", "shape", "dtype", "requires_grad", "values")


def _digest_of(info: ParamInfo) -> int:
    handle = getattr(info.param, "_shardwise", None)
    if handle is not None:
        found: int = handle.unit.owner.digests[handle.unit][handle.index]
        return found
    return digest(info.param)


def _broadcast_buffers(world: World, model: nn.Module) -> None:
    for buffer in model.buffers():
        world.broadcast(buffer.data)


def _emulated(world: World, config: ShardConfig) -> bool:
    """Whether any rank's CPU emulates the stored dtype: one answer for all ranks."""
    dtype = config.precision.param
    mine = dtype is not None and config.precision.compute is None and emulates_16_bit(world.device.type, dtype)
    flag = torch.tensor([int(mine)], device=world.device)
    return bool(world.all_reduce(flag, torch.distributed.ReduceOp.MAX).item())


def _make_unit(
    index: int, spec: UnitSpec, model: nn.Module, runtime: Runtime, config: ShardConfig, emulated: bool
) -> Unit:
    first = spec.infos[0].param
    stage = STAGES[config.stage]
    dtypes = resolve_dtypes(first.dtype, config.precision, first.device, emulated)
    layout = make_layout(
        [(i.name, tuple(i.param.shape), storage_stride(i.param.shape, i.param.stride())) for i in spec.infos],
        dtypes.stored.itemsize,
        runtime.world.world_size,
    )
    return Unit(
        index=index,
        name=spec.name,
        module=model.get_submodule(spec.module_path),
        params=[info.param for info in spec.infos],
        layout=layout,
        rank=runtime.world.rank,
        dtypes=dtypes,
        device=first.device,
        owner=runtime,
        ledger=runtime.ledger,
        is_trainable=spec.is_trainable,
        is_always_full=stage.params is Held.FULL,
        updates_full=stage.states is Held.FULL,
    )


def _fill_unit(unit: Unit, spec: UnitSpec, memory: torch.Tensor) -> None:
    """Take the parameters' values into the Unit; the parameters' own memory is given up one Unit at a time."""
    unit.allocate(memory)
    for slot, info in enumerate(spec.infos):
        unit.store(slot, _values_of(info, unit.layout.slots[slot].stride))
    unit.adopt()


def _values_of(info: ParamInfo, stride: tuple[int, ...]) -> torch.Tensor:
    """A parameter's whole value, gathered from its construction shard if it was built under sharded_init."""
    handle = getattr(info.param, "_shardwise", None)
    if handle is None:
        return flat_values(info.param, stride)
    values: torch.Tensor = handle.unit.owner.full_values(handle.unit, handle.index)
    return values


def _param_view(unit: Unit, slot: int, full: torch.Tensor) -> torch.Tensor:
    place = unit.layout.slots[slot]
    return full.as_strided(place.shape, place.stride, full.storage_offset() + place.offset)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
