"""The handle that `shard` returns."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise import checkpoint
from shardwise.activations import Keeping, held_by
from shardwise.comm import Transport
from shardwise.config import ShardConfig
from shardwise.engine import Runtime, assemble
from shardwise.errors import ConfigError, ModelError, ShardwiseError
from shardwise.observe import EventLog, MemorySampler, Timeline, draw_html, draw_png, has_matplotlib, noting_saved
from shardwise.optim import GradScaler, state_bytes
from shardwise.planner import MemoryPlan, SavedBytes, admission, predict_activations, predict_run
from shardwise.reading import Reading, called_by_all
from shardwise.report import format_report
from shardwise.testing import ParityReport, compare_with_plain, fill_replica, group_names
from shardwise.ticket import Ticket
from shardwise.tiers import Heap, Kind, device_tier
from shardwise.tiling.operators import OPERATORS

_SAMPLING_S = 0.002
"""Time between two looks at resident memory."""


class Run(Reading):
    """The handle that `shard` returns: clipping, full parameters, gradients and state dicts, loss scaling, reports."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: ShardConfig,
        runtime: Runtime,
        keeping: Keeping | None = None,
    ) -> None:
        super().__init__(model, optimizer, runtime)
        self._keeping = keeping
        self._held = held_by(runtime) if keeping is None else keeping.held
        self._saved = SavedBytes()
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
        units = {unit.index: unit for handle in handles if handle is not None for unit, _ in handle.places}
        with self._runtime.outside.gathered(list(units.values())):
            yield

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Use it around all backwards of a step but the last: gradients are summed locally and reduced once, by the last.

        Without it every backward reduces into the gradient shard, and no rank keeps more than a few Units' local gradients. With
        it a step sends its gradients once, but every rank keeps local gradients of the whole model until the last backward. All
        ranks must use it in the same backwards. Until they are reduced `parameter.grad` is this rank's sum.
        """
        with self._runtime.outside.accumulating():
            yield

    def reduce(self) -> None:
        """Reduce the gradients that `run.accumulating()` has summed, without another backward. All ranks must call.

        For steps whose last backward cannot be told from the others, as in the schedules of a pipeline:
        `with run.accumulating(): schedule.step(...)`, then `run.reduce()`.
        """
        with called_by_all("run.reduce()"):
            self._runtime.reduce()

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        wait: bool = True,
        progress: checkpoint.Progress | None = None,
    ) -> Ticket:
        """Save everything that training needs to go on to the directory `path`, which must not exist. All ranks must call.

        `extra`: None, numbers, strings, tensors, and lists, tuples and dicts of them; rank 0's is saved. With `wait=False` it is
        written in the background: training goes on, and waits only where it would change what has not been read yet. The Ticket's
        `wait()` returns when the checkpoint is complete; if it fails, that, the next save or the next step raises. `progress` is
        called with the bytes that this rank has written so far and will write, by the thread that writes.
        """
        with called_by_all("run.save()"):
            return checkpoint.save(self._subject, path, extra, scheduler, wait=wait, progress=progress)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        scheduler: Any = None,
        strict: bool = True,
        progress: checkpoint.Progress | None = None,
    ) -> checkpoint.Loaded:
        """Load a checkpoint, whatever world size, stage and placement it was saved at. All ranks must call.

        If it is missing, damaged or does not fit, all ranks raise CheckpointError and nothing has changed. With `strict=False`
        parameters that are only in one of the two are left out and listed in the result. `progress` is called with the bytes that
        this rank has read so far and will read; everything is read twice, to verify it and to store it.
        """
        with called_by_all("run.load()"):
            return checkpoint.load(self._subject, path, scheduler, strict=strict, progress=progress)

    @contextlib.contextmanager
    def catching_sigterm(self) -> Iterator[Callable[[], bool]]:
        """Inside the context SIGTERM does not end this process. Ask the function that it yields once per step, on all ranks:
        it says whether the signal has come to any of them, to all at the same step, so that they can save and stop together.
        """
        with checkpoint.noting_sigterm() as has_come:
            yield lambda: self._runtime.changes.agree_on([int(has_come())])[0][1] > 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's ranges of everything that `save` saves, for storage of your own. All ranks must call.

        Plain Python values and CPU tensors, safe for `torch.save` and `torch.load(weights_only=True)`. Only the same rank can
        load it, into the same model at the same world size; `save`, `full_state_dict` and `full_optimizer_state_dict` are for
        others.
        """
        with called_by_all("run.state_dict()"):
            return checkpoint.state_dict(self._subject)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave on this rank. All ranks must call.

        If it is another rank's, another world size's or another model's, all ranks raise CheckpointError and nothing has changed.
        """
        with called_by_all("run.load_state_dict()"):
            checkpoint.load_state_dict(self._subject, state)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        max_file_bytes: int = checkpoint.MAX_FILE_BYTES,
        adapters_only: bool = False,
    ) -> None:
        """Write parameters and buffers as a Hugging Face directory, which must not exist. All ranks must call.

        It has `model.safetensors`, or several files of at most `max_file_bytes` and an index, and the configuration, if the model
        has one; `from_pretrained` loads it. `dtype` is that of floating values (default: each parameter's own); values come from
        the masters. A tied tensor is written once. For a peft model pass `adapters_only=True`: the active adapter is
        written, for `peft.PeftModel.from_pretrained`. If a rank fails, all raise CheckpointError and nothing is left.
        """
        chosen = checkpoint.float_dtype(dtype)
        checkpoint.export(self._subject, path, dtype=chosen, max_file_bytes=max_file_bytes, adapters_only=adapters_only)

    def _load_pretrained(self, path: str | os.PathLike[str], *, strict: bool) -> tuple[str, ...]:
        """For `shardwise.load_pretrained`."""
        return checkpoint.load_into_run(self._subject, path, strict=strict)

    @property
    def rank(self) -> int:
        """This rank's number among those of the run."""
        return self._runtime.world.label

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
        """Count what autograd keeps for backward inside the context: the report, the formula and the ledger's peak include it."""
        self._held.peak_saved_bytes = self._held.saved_bytes
        with noting_saved(functools.partial(self._held.hold, is_saved=True)):
            yield
        sizes = () if self._keeping is None else self._keeping.sizes.stretches
        self._saved.most = max(self._saved.most, self._held.peak_saved_bytes)
        self._saved.before = max([self._saved.before, *(size.saved_before_bytes for size in sizes)])

    def predicted_memory(self, *, activation_bytes: int | None = None) -> MemoryPlan:
        """Bytes per rank that the memory formula predicts for this model and configuration.

        Activations are what `sw.Activations` kept and computed again in the last forward and backward, and what autograd was seen
        to save by `measuring_activations` or `memory_timeline`; `activation_bytes` replaces both.
        """
        if activation_bytes is None:
            activation_bytes = predict_activations(self._keeping, self._saved)
        return predict_run(self.config, self._runtime, self._optimizer, self._keeping, activation_bytes)

    def measured_memory(self) -> dict[str, int]:
        """Peak bytes by kind as the ledger saw them on this rank."""
        self._count_moments()
        tier = device_tier(self._runtime.world.device)
        found = {kind.value: self.ledger.peak(tier, kind) for kind in Kind if kind is not Kind.SPARE}
        found["buffer"] += self._runtime.transport.exchange_bytes
        return found

    def _count_moments(self, *_: Any) -> None:
        """Tell the ledger about states that the user's own optimizer has allocated."""
        if self._optimizer is not None and self._runtime.offload.step is None:
            self.ledger.set(device_tier(self._runtime.world.device), Kind.MOMENT, state_bytes(self._optimizer))

    @contextlib.contextmanager
    def memory_timeline(self, path: str | os.PathLike[str], *, png: bool = True) -> Iterator[Timeline]:
        """Record what the memory of one step is used for, or of whatever runs inside the context; draw it at the end.

        Writes `<path>.html`, a page to look around in that needs no network, and `<path>.png`, which needs matplotlib (the extra
        `shardwise[plot]`). Every rank that enters records itself, alone; with several ranks `-rank0` and so on follow the path.
        The charts show what the ledger counts by kind, per tier, what autograd saves for backward included; the formula's
        prediction; and resident memory. If the context raises, nothing is written. Yields the Timeline: `samples`, `files`.
        """
        base = self._timeline_path(path, png=png)
        tier = device_tier(self._runtime.world.device)
        title = f"{base.name}: stage {self.config.stage}, rank {self.rank} of {self._runtime.world.whole.world_size}"
        timeline = Timeline(title, tier.value, self.events.now)

        def count(*_: Any) -> None:  # what others allocate
            self._count_moments()
            timeline.note(tier.value, "exchange", self._runtime.transport.exchange_bytes)

        with contextlib.ExitStack() as stack:
            stack.enter_context(self.ledger.observed_by(lambda tier, kind, now: timeline.note(tier.value, kind.value, now)))
            if self._optimizer is not None:
                stack.callback(self._optimizer.register_step_post_hook(count).remove)
            stack.enter_context(self.measuring_activations())
            Heap().give_back()  # else what earlier steps have freed would be resident, and be used again unseen
            with contextlib.suppress(OSError):  # only Linux reports resident memory
                stack.enter_context(MemorySampler(_SAMPLING_S, timeline.note_resident))
            count()
            timeline.begin()
            yield timeline
            count()
            timeline.end(self.events)
        timeline.predicted = self.predicted_memory().by_kind()
        drawn = {".html": draw_html(timeline).encode(), **({".png": draw_png(timeline)} if png else {})}
        for suffix, content in drawn.items():
            base.with_name(base.name + suffix).write_bytes(content)
        timeline.files = tuple(base.with_name(base.name + suffix) for suffix in drawn)

    def _timeline_path(self, path: str | os.PathLike[str], *, png: bool) -> Path:
        """Where a recording is written to, without a suffix; raises if it could not be written."""
        base = Path(path)
        if base.suffix in (".html", ".png"):
            base = base.with_suffix("")
        if self._runtime.world.whole.world_size > 1:
            base = base.with_name(f"{base.name}-rank{self.rank}")
        if png and not has_matplotlib():
            raise ConfigError(
                "memory_timeline() draws a picture with matplotlib, which is not installed. Install it (pip install matplotlib, "
                "or the extra shardwise[plot]), or pass png=False to write the page only."
            )
        if not base.parent.is_dir():
            raise ConfigError(
                f"memory_timeline({os.fspath(path)!r}): there is no directory {os.fspath(base.parent)!r}. Make it first."
            )
        if self.ledger.is_observed:
            raise ConfigError("memory_timeline() was entered inside another one of the same run. Leave that first.")
        return base

    def placement(self) -> list[str]:
        """Lines on where states are kept, how the step is streamed and how much the disk moved; empty without offload."""
        return self._runtime.offload.describe()

    def report(self, *, activation_bytes: int | None = None) -> str:
        """Bytes by kind, predicted and measured, and traffic, as text for this rank."""
        predicted = self.predicted_memory(activation_bytes=activation_bytes)
        return format_report(self.config, self._runtime, predicted, self.measured_memory(), self._keeping, self.loss_scale)

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
        world, admit = self._runtime.world, admission(self.config, other_optimizer)
        runtime = assemble(other, other_optimizer, self.config, world.mesh, admit, operators=OPERATORS, roles=world.roles)
        run = Run(other, other_optimizer, self.config, runtime)
        report = compare_with_plain(run, other, other_optimizer, plain, plain_optimizer, loss_of, steps=steps, max_norm=max_norm)
        run.close()
        if self.rank == 0:
            print(report)
        return report

    def _plain_copy(self, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        with self.gathered():
            replica = copy.deepcopy(self._model)
        groups = group_names(optimizer, self._runtime.units, self._runtime.world)
        return replica, fill_replica(replica, self.iter_full_state(), optimizer, groups)

    def close(self) -> None:
        """End background threads and free disk space; parameters and states on disk are lost.

        Waits for a save in the background, and raises if it failed.
        """
        unsaved, self._runtime.offload.unsaved = self._runtime.offload.unsaved, None
        if unsaved is not None:
            unsaved.has_ended_within(None)
        with contextlib.suppress(ShardwiseError):  # a failed run has nothing left to settle
            self._runtime.gathering.settle()
        self._runtime.transport.close()
        if self._keeping is not None:
            self._keeping.close()
        self._runtime.offload.close()
        if unsaved is not None and unsaved.failure is not None and not unsaved.was_told:
            unsaved.was_told = True
            raise unsaved.failure

    def __deepcopy__(self, memo: Any) -> None:
        """A copied model has no run."""
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            "pickling a run, or a sharded model (torch.save(model)): it is bound to this rank. Save run.full_state_dict() "
            "instead, and load it into a model built anew."
        )
