"""The front door: `shard`, `sharded_init` and the handle `Run`."""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Transport, World
from shardwise.config import Offload, Precision, ShardConfig, UnitRule
from shardwise.engine import (
    BUCKET_BYTES,
    MAX_EVICTIONS,
    MAX_IN_FLIGHT,
    Held,
    Runtime,
    assemble,
    constructing,
    digest,
    was_built_on_disk,
)
from shardwise.errors import ConfigError, MemoryBudgetError, ModelError, RanksDifferError, ShardwiseError
from shardwise.observe import EventLog, format_bytes, format_table, process_memory, saved_activation_bytes
from shardwise.optim import NUM_SETS, GradScaler, clone_optimizer, innermost, num_moments, state_bytes
from shardwise.partition import Unit, UnitSpec
from shardwise.planner import MemoryPlan, UnitSize, plan_memory
from shardwise.testing.parity import ParityReport, compare_with_plain
from shardwise.tiers import Kind, Tier


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int | None = None,
    precision: Precision | str | None = None,
    units: UnitRule | None = None,
    max_unit_bytes: int = ShardConfig.max_unit_bytes,
    exchange_bytes: int = ShardConfig.exchange_bytes,
    prefetch_bytes: int | None = ShardConfig.prefetch_bytes,
    methods: str | Sequence[str] = (),
    buffers: str = ShardConfig.buffers,
    transport: str = ShardConfig.transport,
    timeout_s: float = ShardConfig.timeout_s,
    offload: Offload | str | None = None,
    mesh: DeviceMesh | None = None,
    **unknown: Any,
) -> Run:
    """Partition `model` and `optimizer` in place over the ranks of this launch; return the handle.

    `stage` is required: 0, 1, 2 or 3. The other options are explained at the fields of `shardwise.config.ShardConfig`; an
    unknown one is refused and the nearest name suggested. `mesh` is a one-dimensional DeviceMesh (default: all ranks).
    Every rank must call this with the same model and options.
    """
    config = ShardConfig.of(
        {
            **({} if stage is None else {"stage": stage}),
            "precision": precision,
            "units": units,
            "max_unit_bytes": max_unit_bytes,
            "exchange_bytes": exchange_bytes,
            "prefetch_bytes": prefetch_bytes,
            "methods": methods,
            "buffers": buffers,
            "transport": transport,
            "timeout_s": timeout_s,
            "offload": offload,
            **unknown,
        }
    )
    optimizer = innermost(optimizer)
    if getattr(model, "_shardwise_run", None) is not None:
        raise ModelError(
            "this model is sharded already; use the run that sw.shard() returned, or build a new model to shard it otherwise."
        )
    if offload is None and isinstance(model, nn.Module) and was_built_on_disk(model):
        raise ConfigError(
            "the model was built under sharded_init(offload=...) with parameters on disk, and shard() was given no offload: they "
            "would all come back to memory. Pass the same offload= here, or Offload() if that is meant."
        )
    runtime, specs = assemble(model, optimizer, config, mesh, _admission(config, optimizer))
    run = Run(model, optimizer, config, runtime, specs)
    model._shardwise_run = run  # type: ignore[assignment]
    return run


@contextlib.contextmanager
def sharded_init(
    *, mesh: DeviceMesh | None = None, device: torch.device | str = "cpu", offload: Offload | str | None = None
) -> Iterator[None]:
    """Build a model larger than memory: inside, every submodule is partitioned as soon as it is complete.

    Seed every rank alike. Parameters are bit-identical to plain construction; call `shard` afterwards. With
    `offload=Offload(params='disk')` shards go to disk at once, so that the model may be larger than the host's memory.
    """
    with constructing(World.of(mesh, torch.device(device)), Offload.of(offload)):
        yield


class Run:
    """The one handle for everything that is not the user's own loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: ShardConfig,
        runtime: Runtime,
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
        self.scaler = GradScaler(config.precision.loss_scale, runtime, optimizer, runtime.world.device.type)
        """A `torch.amp.GradScaler` for this model; it passes everything through unless `Precision(loss_scale=...)` asks for
        it."""
        self.config = config
        """What was asked for, frozen."""
        self.ledger = runtime.ledger
        """Bytes per tier and kind."""

    # -- training ---------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the global gradient norm, as `torch.nn.utils.clip_grad_norm_`; returns the norm before clipping.

        Raises NonFiniteGradientError, with nothing changed, if a gradient is infinite or NaN. Under loss scaling call
        `run.scaler.unscale_(optimizer)` first; an infinite norm is then returned, and the scaler skips the step.
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
        with self._runtime.outside.gathered(list(units.values())):
            yield

    # -- reading ----------------------------------------------------------------------------------------------

    def iter_full_state(self) -> Iterator[tuple[str, Any]]:
        """(name, full value) of parameters, one Unit in memory at a time, then of buffers and extra state. All ranks must
        iterate.

        Trainable values come from the masters, in the parameter's original dtype. A tensor is only valid until the
        next one is asked for.
        """
        self._runtime.absorb_writes()
        by_unit: dict[int, list[tuple[str, int]]] = {}
        others: list[tuple[str, Any]] = []
        for name, value in self._model.state_dict(keep_vars=True).items():
            handle = getattr(value, "_shardwise", None)
            if handle is None:
                others.append((name, value))
            else:
                by_unit.setdefault(handle.unit.index, []).append((name, handle.slot))
        self._check_replicas(others)
        for unit in self._runtime.units:
            full = self._runtime.outside.full_master(unit)
            for name, slot in by_unit.get(unit.index, ()):
                yield name, _param_view(unit, slot, full).to(unit.dtypes.original)
        yield from others

    def _check_replicas(self, others: Sequence[tuple[str, Any]]) -> None:
        """What every rank has whole must be the same on all of them: saved from slices it would be a patchwork."""
        runtime = self._runtime
        whole = [unit for unit in runtime.units if unit.is_always_full]
        strangers = [(name, value) for name, value in others if isinstance(value, nn.Parameter)]
        marks = [digest(unit.full) for unit in whole] + [digest(value) for _, value in strangers]
        found = runtime.agree_on(marks) if marks and runtime.world.world_size > 1 else []
        names = [unit.layout.slots[0].name for unit in whole] + [name for name, _ in strangers]
        for name, (low, high) in zip(names, found, strict=False):
            if low != high:
                raise RanksDifferError(
                    f"parameter {name!r}, or one gathered with it, has different values on different ranks: it was changed by "
                    "hand on some of them, or never averaged. Make the same change on every rank before saving."
                )

    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """The whole state dict on the CPU, streamed Unit by Unit; empty on other ranks unless `rank0_only=False`.

        Keys, buffers and extra state are those of `model.state_dict()`.
        """
        wanted = self._runtime.world.rank == 0 or not rank0_only
        found: dict[str, Any] = {}
        tied: dict[int, torch.Tensor] = {}
        entries = self._model.state_dict(keep_vars=True)
        for name, value in self.iter_full_state():
            if not wanted:
                continue
            if not isinstance(value, torch.Tensor):
                found[name] = copy.deepcopy(value)  # a module's extra state
                continue
            key = id(entries[name])
            if key not in tied:
                tied[key] = value.detach().to("cpu", copy=True).contiguous()
            found[name] = tied[key]
        return {name: found[name] for name in entries if name in found}

    def grad(self, name: str) -> torch.Tensor | None:
        """The full reduced gradient of a parameter, or None if nothing used it (or it is empty). All ranks must call."""
        unit, slot = self._place(name)
        if not self._runtime.gradients.holds(unit, slot) or not unit.layout.slots[slot].numel:
            return None
        return _param_view(unit, slot, self._runtime.outside.full_grad(unit)).clone()

    def iter_grads(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, full reduced gradient or None) of every parameter, one Unit in memory at a time. All ranks must iterate.

        A tensor is only valid until the next one is asked for.
        """
        gradients = self._runtime.gradients
        for unit, names in self._by_unit():
            held = {slot for slot in names if gradients.holds(unit, slot) and unit.layout.slots[slot].numel}
            full = self._runtime.outside.full_grad(unit) if held else None
            for slot, name in names.items():
                yield name, _param_view(unit, slot, full) if full is not None and slot in held else None

    def iter_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full value that the optimizer updates) of every parameter, one Unit in memory at a time. All ranks must
        iterate.
        """
        self._runtime.absorb_writes()
        for unit, names in self._by_unit():
            full = self._runtime.outside.full_master(unit)
            for slot, name in names.items():
                yield name, _param_view(unit, slot, full)

    def _by_unit(self) -> Iterator[tuple[Unit, dict[int, str]]]:
        """Every Unit with the first name of each of its parameters."""
        for unit, spec in zip(self._runtime.units, self._specs, strict=True):
            yield unit, {slot: info.name for slot, info in enumerate(spec.infos)}

    def master(self, name: str) -> torch.Tensor:
        """The full value the optimizer updates (fp32 or wider). All ranks must call."""
        self._runtime.absorb_writes()
        unit, slot = self._place(name)
        return _param_view(unit, slot, self._runtime.outside.full_master(unit)).clone()

    def _place(self, name: str) -> tuple[Unit, int]:
        if name not in self._places:
            near = difflib.get_close_matches(name, self._places, n=1)
            raise ModelError(f"no parameter {name!r} in the model{f' (did you mean {near[0]!r}?)' if near else ''}.")
        return self._places[name]

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
        return float(self.scaler.get_scale())

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
        runtime = self._runtime
        return _plan(
            self.config,
            runtime.units,
            self._specs,
            num_moments=len(runtime.offload.states) or num_moments(self._optimizer),
            exchange_bytes=runtime.transport.planned_exchange_bytes,
            activation_bytes=self._activation_bytes if activation_bytes is None else activation_bytes,
            prefetch_bytes=0 if runtime.runner is None else runtime.runner.budget_bytes,
        )

    def measured_memory(self) -> dict[str, int]:
        """Peak bytes by kind as the ledger saw them on this rank."""
        if self._optimizer is not None and self._runtime.offload.step is None:
            self.ledger.set(self._tier, Kind.MOMENT, state_bytes(self._optimizer))
        found = {kind.value: self.ledger.peak(self._tier, kind) for kind in Kind}
        found["buffer"] += self._runtime.transport.exchange_bytes
        return found

    def placement(self) -> list[str]:
        """Where states live, how the step streams and what went through the disk; no lines if nothing is offloaded."""
        return self._runtime.offload.describe()

    def report(self, *, activation_bytes: int | None = None) -> str:
        """Bytes by kind, predicted and measured, and traffic, as text for this rank."""
        runtime = self._runtime
        predicted = self.predicted_memory(activation_bytes=activation_bytes).by_kind()
        measured = self.measured_memory()
        rows = [[kind, format_bytes(predicted[kind]), format_bytes(measured[kind])] for kind in predicted]
        for column, figures, word in ((1, predicted, "not given"), (2, measured, "not measured")):
            if not figures["activation"]:
                rows[list(predicted).index("activation")][column] = word
        rows.append(["sum", format_bytes(sum(predicted.values())), format_bytes(sum(measured[k] for k in predicted))])
        first = runtime.units[0].dtypes
        lines = [
            f"shardwise: stage {self.config.stage}, rank {runtime.world.rank} of {runtime.world.world_size}, "
            f"{len(runtime.units)} Units, transport {runtime.transport.label}",
            f"stored {_short(first.stored)}, compute {_short(first.compute)}, reduce {_short(first.reduce)}, "
            f"master {_short(first.master)}" + self._emulation_note(),
            "",
            format_table(["bytes per rank", "predicted", "measured peak"], rows),
        ]
        with contextlib.suppress(OSError):  # the kernel's account is Linux's
            now = format_bytes(process_memory().total)
            lines += ["", f"process memory now {now} (interpreter and libraries included)"]
        if runtime.threads:
            lines.append(f"threads {runtime.threads}")
        lines += self.placement()
        if runtime.transport.note and runtime.stage.params is Held.SHARD:
            lines.append(runtime.transport.note)
        if runtime.runner is not None:
            lines.append(
                f"prefetch: {runtime.runner.depth.now} ahead within {format_bytes(runtime.runner.budget_bytes)}, "
                f"{runtime.runner.num_early} gathers started early, {runtime.runner.num_on_demand} on demand, "
                f"{runtime.stall_percent}% of the last step waited for gathers"
            )
        counters = runtime.transport.counters
        for operation in sorted(counters.calls):
            lines.append(
                f"{operation}: {counters.calls[operation]} calls, {counters.elements[operation]} elements "
                f"({format_bytes(counters.bytes[operation])}) sent"
            )
        if runtime.needs_scaling:
            lines.append(f"loss scale {self.loss_scale:g}, {runtime.num_skipped_steps} steps skipped")
        return "\n".join(lines)

    def _emulation_note(self) -> str:
        dtypes = self._runtime.units[0].dtypes
        if self.config.precision.compute is None and dtypes.stored.itemsize < dtypes.compute.itemsize:
            return f" (this CPU emulates {_short(dtypes.stored)} products, so compute runs in {_short(dtypes.compute)})"
        return ""

    def selfcheck(
        self, loss_of: Callable[[nn.Module, int], torch.Tensor], *, steps: int = 3, max_norm: float | None = None
    ) -> ParityReport:
        """Compare sharded with plain replicated training of this very model, on copies; prints the differences.

        `loss_of(model, step)` returns this rank's loss. The model and optimizer in training are not touched. Needs
        memory for two whole copies. All ranks must call.
        """
        if self._optimizer is None:
            raise ConfigError("selfcheck() needs the optimizer that was given to shard().")
        plain, plain_optimizer = self._plain_copy()
        other, other_optimizer = self._plain_copy()
        run = Run(other, other_optimizer, self.config, *self._assembled(other, other_optimizer))
        report = compare_with_plain(run, other, other_optimizer, plain, plain_optimizer, loss_of, steps=steps, max_norm=max_norm)
        run.close()
        if self._runtime.world.rank == 0:
            print(report)
        return report

    def _assembled(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Runtime, list[UnitSpec]]:
        return assemble(model, optimizer, self.config, self._runtime.world.mesh, _admission(self.config, optimizer))

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
        """End background threads and give disk space back: parameters and states on disk are gone then."""
        with contextlib.suppress(ShardwiseError):  # a failed run has nothing left to settle
            self._runtime.settle()
        self._runtime.transport.close()
        self._runtime.offload.close()

    def __deepcopy__(self, memo: Any) -> None:
        """A copied model has no run."""
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            "pickling a run, or a sharded model (torch.save(model)): it is bound to this rank. Save run.full_state_dict() "
            "instead, and load it into a model built anew."
        )


def _plan(
    config: ShardConfig,
    units: Sequence[Unit],
    specs: Sequence[UnitSpec],
    *,
    num_moments: int,
    exchange_bytes: int,
    activation_bytes: int,
    prefetch_bytes: int,
) -> MemoryPlan:
    """The formula for these Units."""
    sizes = [
        UnitSize(
            path=spec.module_path,
            full_numel=unit.layout.numel,
            shard_numel=unit.layout.shard_numel,
            stored_itemsize=unit.dtypes.stored.itemsize,
            compute_itemsize=unit.dtypes.compute.itemsize,
            master_itemsize=unit.dtypes.master.itemsize,
            is_trainable=unit.is_trainable,
            gathers_in_place=unit.is_overlaid,
            shared_numel=max((i.param.numel() for i in spec.infos if len(i.names) > 1), default=0),
        )
        for unit, spec in zip(units, specs, strict=True)
    ]
    return plan_memory(
        sizes,
        stage=config.stage,
        num_moments=num_moments,
        exchange_bytes=exchange_bytes,
        activation_bytes=activation_bytes,
        reductions_in_flight=MAX_IN_FLIGHT + 1,
        bucket_bytes=BUCKET_BYTES * units[0].layout.world_size,
        prefetch_bytes=prefetch_bytes,
        away=config.offload.kinds_away(host_is_away=units[0].device.type != "cpu"),
        step_bytes=config.offload.step_bytes,
        step_sets=NUM_SETS,
        evictions_in_flight=MAX_EVICTIONS,
    )


def _admission(
    config: ShardConfig, optimizer: torch.optim.Optimizer | None
) -> Callable[[Sequence[Unit], Sequence[UnitSpec]], None]:
    """Refuses, before anything is changed, what its budget of host memory cannot hold."""
    budget = config.offload.host_bytes

    def admit(units: Sequence[Unit], specs: Sequence[UnitSpec]) -> None:
        if budget is None or units[0].device.type != "cpu":
            return  # beside an accelerator the ledger refuses what the host cannot hold, as it is reserved
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if budget > physical:
            raise MemoryBudgetError(
                f"Offload(host_bytes={budget}) is more than this machine's memory, {physical} bytes. Give a smaller budget, or "
                "None."
            )
        largest = max(units, key=lambda unit: unit.full_bytes)
        plan = _plan(
            config,
            units,
            specs,
            num_moments=num_moments(optimizer),
            exchange_bytes=config.exchange_bytes if units[0].layout.world_size > 1 else _one_ranks_exchange(config, units),
            activation_bytes=0,
            prefetch_bytes=largest.full_bytes if config.prefetch_bytes is None else config.prefetch_bytes,
        )
        if plan.total > budget:
            parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in plan.by_kind().items() if size)
            raise MemoryBudgetError(
                f"Offload(host_bytes={budget}) does not suffice: {plan.total} bytes are needed beside activations ({parts}). The "
                f"largest Unit, {largest.name!r}, takes {format_bytes(largest.full_bytes)} when gathered. Raise the budget, move "
                "more states to disk, lower Offload(step_bytes=...) or prefetch_bytes, or use smaller Units (max_unit_bytes)."
            )

    return admit


def _one_ranks_exchange(config: ShardConfig, units: Sequence[Unit]) -> int:
    """A rank alone needs no larger exchange buffer than its largest gradient."""
    return min(config.exchange_bytes, max(unit.layout.shard_numel * unit.dtypes.reduce.itemsize for unit in units))


def _param_view(unit: Unit, slot: int, full: torch.Tensor) -> torch.Tensor:
    place = unit.layout.slots[slot]
    return full.as_strided(place.shape, place.stride, full.storage_offset() + place.offset)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
