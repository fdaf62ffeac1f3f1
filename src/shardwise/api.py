"""The public interface for training scripts: `shard`, `sharded_init` and the handle `Run`."""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import checkpoint
from shardwise.comm import Transport, World
from shardwise.config import Offload, Precision, ShardConfig, UnitRule
from shardwise.engine import Runtime, Survivors, assemble, constructing, was_built_on_disk
from shardwise.errors import ConfigError, ModelError, RanksDifferError, ShardwiseError
from shardwise.observe import EventLog, saved_activation_bytes
from shardwise.optim import GradScaler, innermost, state_bytes
from shardwise.partition import Handle, Unit
from shardwise.planner import MemoryPlan, admission, predict_run
from shardwise.report import format_report
from shardwise.testing import ParityReport, compare_with_plain, fill_replica, group_names
from shardwise.tiers import Kind, checksum, device_tier


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int | None = None,
    precision: Precision | str | None = None,
    units: UnitRule | None = None,
    max_unit_bytes: int = ShardConfig.max_unit_bytes,
    min_unit_bytes: int = ShardConfig.min_unit_bytes,
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

    `stage` is required: 0, 1, 2 or 3. The other options are documented at the fields of `shardwise.config.ShardConfig`; an
    unknown one raises ConfigError, which suggests the nearest name. `mesh` is a one-dimensional DeviceMesh (default: all ranks).
    Every rank must call this with the same model and options.
    """
    config = ShardConfig.of(
        {
            **({} if stage is None else {"stage": stage}),
            "precision": precision,
            "units": units,
            "max_unit_bytes": max_unit_bytes,
            "min_unit_bytes": min_unit_bytes,
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
    runtime = assemble(model, optimizer, config, mesh, admission(config, optimizer))
    run = Run(model, optimizer, config, runtime)
    model._shardwise_run = run  # type: ignore[assignment]
    return run


@contextlib.contextmanager
def sharded_init(
    *, mesh: DeviceMesh | None = None, device: torch.device | str = "cpu", offload: Offload | str | None = None
) -> Iterator[None]:
    """Build a model larger than memory: inside the context every submodule is partitioned as soon as it is complete.

    Use the same seed on every rank, and call `shard` afterwards. Parameters are bit-identical to plain construction. With
    `offload=Offload(params='disk')` shards are written to disk at once, so that the model may be larger than the host's memory.
    """
    with constructing(World.of(mesh, torch.device(device)), Offload.of(offload)):
        yield


class Run:
    """The handle that `shard` returns: clipping, full parameters, gradients and state dicts, loss scaling, reports."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: ShardConfig,
        runtime: Runtime,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._runtime = runtime
        self._activation_bytes = 0
        self._survivors = Survivors(runtime, optimizer)
        named: Iterable[tuple[str, Any]] = model.named_parameters(remove_duplicate=False)
        handles: dict[str, Handle] = {name: param._shardwise for name, param in named}
        self._places = {name: (handle.unit, handle.slot) for name, handle in handles.items()}
        self.scaler = GradScaler(config.precision.loss_scale, runtime, optimizer, runtime.world.device.type)
        """A `torch.amp.GradScaler` for this model; without `Precision(loss_scale=...)` it scales
        nothing."""
        self._subject = checkpoint.Subject(model, optimizer, runtime, self._survivors, self.scaler)
        self.config = config
        """The options given to `shard`, frozen."""
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
        return self._runtime.norms.clip(float(max_norm), float(norm_type))

    @contextlib.contextmanager
    def gathered(self, module: nn.Module | None = None) -> Iterator[None]:
        """Inside the context `module` (default: the model) has full parameters; in-place changes are kept. All ranks must enter.

        Every rank must make the same change, because each stores only its own slice.
        """
        module = self._model if module is None else module
        handles = [getattr(param, "_shardwise", None) for param in module.parameters()]
        if any(handle is None or handle.unit.owner is not self._runtime.units[0].owner for handle in handles):
            raise ModelError(f"gathered(): {type(module).__name__} has parameters that this run does not manage.")
        units = {handle.unit.index: handle.unit for handle in handles if handle is not None}
        with self._runtime.outside.gathered(list(units.values())):
            yield

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Use it around all backwards of a step but the last: gradients are summed locally and reduced once, by the last.

        Without it every backward reduces into the gradient shard, and no rank keeps more than a few Units' local gradients. With
        it a step sends its gradients once, but every rank keeps local gradients of the whole model until the last backward. All
        ranks must use it in the same backwards.
        """
        with self._runtime.outside.accumulating():
            yield

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None, scheduler: Any = None) -> None:
        """Save everything that training needs to go on to the directory `path`, which must not exist. All ranks must call.

        `extra`: None, numbers, strings, tensors, and lists, tuples and dicts of them; rank 0's is saved.
        """
        checkpoint.save(self._subject, path, extra, scheduler)

    def load(self, path: str | os.PathLike[str], *, scheduler: Any = None, strict: bool = True) -> checkpoint.Loaded:
        """Load a checkpoint, whatever world size, stage and placement it was saved at. All ranks must call.

        If it is missing, damaged or does not fit, all ranks raise CheckpointError and nothing has changed. With `strict=False`
        parameters that are only in one of the two are left out and listed in the result.
        """
        return checkpoint.load(self._subject, path, scheduler, strict=strict)

    @property
    def rank(self) -> int:
        """This rank's number among those of the run."""
        return self._runtime.world.rank

    # -- reading ----------------------------------------------------------------------------------------------

    def iter_full_state(self) -> Iterator[tuple[str, Any]]:
        """(name, full value) of parameters, one Unit in memory at a time, then of buffers and extra state. All ranks must
        iterate.

        Trainable values come from the masters, in the parameter's original dtype. A tensor is only valid until the
        next one is asked for.
        """
        self._runtime.changes.store_written()
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
            full = self._survivors.full_masters(unit)
            for name, slot in by_unit.get(unit.index, ()):
                yield name, _param_view(unit, slot, full).to(unit.dtypes.original)
        yield from others

    def _check_replicas(self, others: Sequence[tuple[str, Any]]) -> None:
        """Raise if a parameter that every rank holds in full has different values on different ranks."""
        runtime = self._runtime
        whole = [unit for unit in runtime.units if unit.is_always_full]
        strangers = [(name, value) for name, value in others if isinstance(value, nn.Parameter)]
        marks = [checksum(unit.full) for unit in whole] + [checksum(value) for _, value in strangers]
        found = runtime.changes.agree_on(marks) if marks and runtime.world.world_size > 1 else []
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
        self._runtime.gradients.accumulated.require_reduced("run.grad()")
        unit, slot = self._place(name)
        if not self._runtime.gradients.holds(unit, slot) or not unit.layout.slots[slot].numel:
            return None
        return _param_view(unit, slot, self._runtime.outside.full_grad(unit)).clone()

    def iter_grads(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, full reduced gradient or None) of every parameter, one Unit in memory at a time. All ranks must iterate.

        A tensor is only valid until the next one is asked for.
        """
        gradients = self._runtime.gradients
        gradients.accumulated.require_reduced("run.iter_grads()")
        for unit, names in self._by_unit():
            held = {slot for slot in names if gradients.holds(unit, slot) and unit.layout.slots[slot].numel}
            full = self._runtime.outside.full_grad(unit) if held else None
            for slot, name in names.items():
                yield name, _param_view(unit, slot, full) if full is not None and slot in held else None

    def iter_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full value that the optimizer updates) of every parameter, one Unit at a time. All ranks must iterate."""
        self._runtime.changes.store_written()
        for unit, names in self._by_unit():
            full = self._survivors.full_masters(unit)
            for slot, name in names.items():
                yield name, _param_view(unit, slot, full)

    def _by_unit(self) -> Iterator[tuple[Unit, dict[int, str]]]:
        """Every Unit with the first name of each of its parameters."""
        for unit in self._runtime.units:
            yield unit, {number: slot.name for number, slot in enumerate(unit.layout.slots)}

    def master(self, name: str) -> torch.Tensor:
        """The full value of a parameter that the optimizer updates (fp32 or wider). All ranks must call."""
        self._runtime.changes.store_written()
        unit, slot = self._place(name)
        return _param_view(unit, slot, self._survivors.full_masters(unit)).clone()

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
        """The current loss scale (1.0 without loss scaling)."""
        return float(self.scaler.get_scale())

    @property
    def num_skipped_steps(self) -> int:
        """Optimizer steps skipped because a gradient overflowed."""
        return self._runtime.num_skipped_steps

    @contextlib.contextmanager
    def measuring_activations(self) -> Iterator[None]:
        """Count what autograd keeps for backward inside the context; the report shows it."""
        units = self._runtime.units
        with saved_activation_bytes(lambda address: any(unit.has_address(address) for unit in units)) as count:
            yield
        self._activation_bytes = max(self._activation_bytes, count())
        self.ledger.set(device_tier(self._runtime.world.device), Kind.ACTIVATION, self._activation_bytes)

    def predicted_memory(self, *, activation_bytes: int | None = None) -> MemoryPlan:
        """Bytes per rank that the memory formula predicts for this model and configuration."""
        activations = self._activation_bytes if activation_bytes is None else activation_bytes
        return predict_run(self.config, self._runtime, self._optimizer, activations)

    def measured_memory(self) -> dict[str, int]:
        """Peak bytes by kind as the ledger saw them on this rank."""
        tier = device_tier(self._runtime.world.device)
        if self._optimizer is not None and self._runtime.offload.step is None:
            self.ledger.set(tier, Kind.MOMENT, state_bytes(self._optimizer))
        found = {kind.value: self.ledger.peak(tier, kind) for kind in Kind}
        found["buffer"] += self._runtime.transport.exchange_bytes
        return found

    def placement(self) -> list[str]:
        """Lines on where states are kept, how the step is streamed and how much the disk moved; empty without offload."""
        return self._runtime.offload.describe()

    def report(self, *, activation_bytes: int | None = None) -> str:
        """Bytes by kind, predicted and measured, and traffic, as text for this rank."""
        predicted = self.predicted_memory(activation_bytes=activation_bytes)
        return format_report(self.config, self._runtime, predicted, self.measured_memory(), self.loss_scale)

    def selfcheck(
        self, loss_of: Callable[[nn.Module, int], torch.Tensor], *, steps: int = 3, max_norm: float | None = None
    ) -> ParityReport:
        """Compare sharded with plain replicated training of this model, on copies; rank 0 prints the differences.

        `loss_of(model, step)` returns this rank's loss. The model and optimizer in training are not touched. Needs
        memory for two whole copies. All ranks must call.
        """
        if self._optimizer is None:
            raise ConfigError("selfcheck() needs the optimizer that was given to shard().")
        plain, plain_optimizer = self._plain_copy(self._optimizer)
        other, other_optimizer = self._plain_copy(self._optimizer)
        mesh = self._runtime.world.mesh
        runtime = assemble(other, other_optimizer, self.config, mesh, admission(self.config, other_optimizer))
        run = Run(other, other_optimizer, self.config, runtime)
        report = compare_with_plain(run, other, other_optimizer, plain, plain_optimizer, loss_of, steps=steps, max_norm=max_norm)
        run.close()
        if self._runtime.world.rank == 0:
            print(report)
        return report

    def _plain_copy(self, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        with self.gathered():
            replica = copy.deepcopy(self._model)
        groups = group_names(optimizer, self._runtime.units, self._runtime.world)
        return replica, fill_replica(replica, self.iter_full_state(), optimizer, groups)

    def close(self) -> None:
        """End background threads and free disk space; parameters and states on disk are lost."""
        with contextlib.suppress(ShardwiseError):  # a failed run has nothing left to settle
            self._runtime.gathering.settle()
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


def _param_view(unit: Unit, slot: int, full: torch.Tensor) -> torch.Tensor:
    place = unit.layout.slots[slot]
    return full.as_strided(place.shape, place.stride, full.storage_offset() + place.offset)
