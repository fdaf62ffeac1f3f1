"""One training step, in the order in which it happens. The first file to read.

    forward   enter -> gather -> (user code) -> leave -> free
    backward  before_backward -> gather -> (autograd) -> gradients arrive -> reduce -> release -> free -> after_backward
    step      before_step -> (user's optimizer) -> after_step -> gather again where parameters stay whole

The runtime decides *when*; Units own tensors, the transport moves bytes, `Gradients` reduces. It must never hold a full
vector longer than its stage allows, and never let user code see one that is not filled.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from shardwise.comm import Transport, World
from shardwise.engine.gradients import Gradients
from shardwise.engine.nested import map_tensors, tensors_in
from shardwise.engine.offload import Offloading
from shardwise.engine.passage import Frame, Inside, Passage, saving_for_inside
from shardwise.engine.stages import Stage
from shardwise.engine.window import Window
from shardwise.errors import (
    FreedParameterError,
    LifecycleError,
    ModelError,
    NonFiniteGradientError,
    OptimizerError,
    ShardwiseError,
    StaleGraphError,
    UnannouncedBackwardError,
)
from shardwise.observe import EventLog, pause
from shardwise.optim.scaler import LossScaler
from shardwise.partition import Handle, Unit, UnitState, flat_values
from shardwise.schedule import Runner
from shardwise.ticket import Ticket
from shardwise.tiers import Ledger, SparePages

_P = ParamSpec("_P")
_R = TypeVar("_R")

Entry = tuple[Unit, tuple[int, ...]]
"""A Unit a module opens, and which of its parameters the module itself holds."""


def _hook(method: Callable[Concatenate[Runtime, _P], _R]) -> Callable[Concatenate[Runtime, _P], _R]:
    """Called from a hook on the hot path: record its time if asked to."""

    @functools.wraps(method)
    def timed(self: Runtime, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not self.events.is_detailed:
            return method(self, *args, **kwargs)
        begin = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.events.emit("hook", method.__name__, since=begin)

    return timed


class Runtime:
    """Carries out the stage table for the Units of one model."""

    allows_optimizer = False

    def __init__(
        self,
        world: World,
        stage: Stage,
        events: EventLog,
        scaler: LossScaler | None,
        ledger: Ledger,
        offload: Offloading,
    ) -> None:
        self.world = world
        self.transport: Transport
        self.stage = stage
        self.events = events
        self.scaler = scaler
        self.ledger = ledger
        self.offload = offload
        self.units: Sequence[Unit] = ()
        self.gradients: Gradients
        self._nodes: list[torch.autograd.graph.Node] = []
        self._frames: list[Frame] = []
        self._in_backward = False
        self._end_of_backward: weakref.ref[_EndOfBackward] | None = None
        self._scaled: set[Passage] = set()  # outermost calls whose backward runs now, between loss scale and its inverse
        self._num_gathered_contexts = 0
        self._loading: Window | None = None
        self._loading_depth = 0
        self._skips_step = False
        self.runner: Runner | None = None
        self.spare_pages: SparePages | None = None
        self._tickets: dict[int, Ticket] = {}  # gathers started early, by Unit
        self._stall_s = 0.0
        self._step_began = self._update_began = time.perf_counter()
        self.stall_percent = 0
        """Share of the last step in which some rank waited for gathers."""
        self.threads = ""
        """How many threads this rank computes with, and why."""
        self.num_steps = 0
        self.num_skipped_steps = 0

    def start(self, units: Sequence[Unit], transport: Transport, prefetch_bytes: int | None) -> None:
        """Take charge of the Units and listen for their gradients."""
        self.units = units
        self.transport = transport
        sizes = {unit.index: unit.full_bytes for unit in units if not unit.is_always_full}
        if sizes and (transport.gathers_ahead or self.offload.params_are_away) and prefetch_bytes != 0:
            budget = max(sizes.values()) if prefetch_bytes is None else prefetch_bytes
            self.runner = Runner(sizes, budget, self._start_early, self._drop)
            if self.world.device.type == "cpu":
                self.spare_pages = SparePages(max(sizes.values()), self.ledger)
                for unit in units:
                    unit.spare_pages = self.spare_pages
        self.gradients = Gradients(units, self.world, self.transport, self.stage, self.events, self.ledger, self.offload)
        if self.scaler is not None:
            self.gradients.loss_scale = self.scaler.scale
        for unit in units:
            if unit.is_trainable:
                for slot, param in enumerate(unit.params):
                    self._listen(unit, slot, param)

    def _listen(self, unit: Unit, slot: int, param: nn.Parameter) -> None:
        """Take the gradient where autograd would accumulate it: nothing is copied, `.grad` is never set."""
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():  # looks at the graph, not at values
            node = torch.autograd.graph.get_gradient_edge(param).node

        def take(grads: tuple[torch.Tensor | None, ...]) -> tuple[None]:
            self._arrive(unit, slot, grads[0])
            return (None,)

        node.register_prehook(take)
        self._nodes.append(node)  # autograd holds the node weakly: without this a new one, unheard, would take its place

    @_hook
    def _arrive(self, unit: Unit, slot: int, grad: torch.Tensor | None) -> None:
        self.begin_backward()
        if grad is not None:
            self._check_opened(unit, slot)
            self.gradients.arrive(unit, slot, grad.detach() if grad.requires_grad else grad)

    # -- forward ----------------------------------------------------------------------------------------------

    @_hook
    def enter(self, entries: Sequence[Entry], inputs: Any, *, is_root: bool = False) -> Any:
        """A module's forward begins: make its Units usable. Returns the inputs to use instead, or None."""
        if self._frames and not is_root and self._is_all_open(entries):
            self._frames.append(Frame(None, is_inside=True))
            return None
        was_interrupted = is_root and any(frame.is_root for frame in self._frames)
        if not _is_inside_autograd() and (self._in_backward or self._loading is not None or was_interrupted):
            self._start_afresh()  # the last backward, load or forward was cut short
        if self.runner is not None and not self._frames and not self._in_backward and not _is_inside_autograd():
            self.runner.begin_forward(is_new=is_root, leads_to_backward=torch.is_grad_enabled())
        frame = Frame(Passage(self) if torch.is_grad_enabled() else None, is_root=is_root)
        frame.is_scaled = self.scaler is not None and not self._frames and not self._scaled
        self._frames.append(frame)
        for unit, slots in entries:
            self._open(unit, slots, frame)
        if frame.passage is not None and (frame.units or frame.is_scaled):
            return frame.passage.watch(inputs, self._unscale if frame.is_scaled else None)
        return None

    @staticmethod
    def _is_all_open(entries: Sequence[Entry]) -> bool:
        for unit, _ in entries:  # noqa: SIM110  a plain loop: this runs for every module call
            if unit.scopes == 0 or unit.is_covered or not unit.is_gathered:
                return False
        return True

    def _open(self, unit: Unit, slots: Sequence[int], frame: Frame) -> None:
        is_nested = unit.scopes > 0 and not unit.is_covered
        unit.scopes += 1
        frame.opened.append(unit)
        if unit.is_covered and not slots:
            return  # a module above the holders: kept until this call ends, gathered by whoever uses it
        if not unit.is_gathered:
            self.gather(unit)
        unit.uncover()
        (frame.nested if is_nested else frame.units).append(unit)

    @_hook
    def leave(self, entries: Sequence[Entry], inputs: Any, output: Any, *, reads_params_in_backward: bool = True) -> Any:
        """A module's forward ended: watch for its backward, then free what nobody else is inside of.

        `inputs` are the positional ones. Returns the output to hand out instead, or None.
        """
        if not self._frames:
            return None  # this call's enter raised: torch calls the hook after forward all the same
        frame = self._frames.pop()
        if frame.is_inside:
            if torch.is_grad_enabled():
                self._watch_inside(entries, inputs, output, reads_params_in_backward)
            if not frame.opened:
                return None
        if frame.passage is not None:
            frame.passage.guard(output, frame.units, frame.nested, reads_params=reads_params_in_backward)
        is_recomputing = _is_inside_autograd()  # then Units stay: their backward comes next
        for unit in frame.opened:
            unit.scopes -= 1
            unit.cover()
            if is_recomputing:
                unit.was_opened = True
            else:
                self._free(unit)
        if self.runner is not None and not self._frames and frame.passage is None and not is_recomputing:
            self.runner.stop()  # no backward will follow
        if frame.is_scaled and frame.passage is not None:
            return map_tensors(functools.partial(self._scale_gradient_of, frame.passage), output)
        return None

    def _watch_inside(self, entries: Sequence[Entry], inputs: Any, output: Any, reads_params: bool) -> None:
        """A call ended that ran inside an outer call's open Units; tensors that it only handed through are not its own."""
        units = tuple((unit, unit.version) for unit, _ in entries)
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            node = tensor.grad_fn
            if node is not None and units and not any(tensor is given for given in inputs):
                node.register_prehook(Inside(self, units) if reads_params else functools.partial(self._announce_inside, units))

    def _announce_inside(self, units: Sequence[tuple[Unit, int]], _: Any) -> None:
        self.announce(unit for unit, _ in units)

    def _unscale(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients that leave the model through its inputs are the user's: not scaled."""
        return grad / self.gradients.loss_scale

    def _scale_gradient_of(self, passage: Passage, output: torch.Tensor) -> torch.Tensor:
        """The same values; the gradient that enters the model here is multiplied by the loss scale, the loss is not."""
        if not output.requires_grad:
            return output
        # A tensor of its own, so that outputs that depend on each other are scaled once; not a view, because autograd
        # would route around its hook if the caller changed it in place.
        own = output.clone()

        def scale(grad: torch.Tensor) -> torch.Tensor:
            self._scaled.add(passage)
            return grad * self.gradients.loss_scale

        own.register_hook(scale)
        return own

    def gather(self, unit: Unit) -> None:
        """Shards to full, and the parameters become usable; often the gather was started early."""
        begin = time.perf_counter()
        if self.runner is not None:
            self.runner.use(unit.index)
        if unit.index not in self._tickets:
            self._start_gather(unit)
        ticket = self._tickets.pop(unit.index)
        try:
            pause("gather.wait")
            ticket.wait()
        except Exception:
            unit.cancel_gather()
            raise
        except BaseException:
            self._tickets[unit.index] = ticket  # interrupted: it goes on, for the next who asks or for `settle`
            raise
        pause("gather.expose")
        unit.expose()
        self.events.emit("gathered", unit.name, since=begin)
        self.events.emit_span("gather", unit.name, ticket.span, "gather")
        if self.runner is not None:
            self._stall_s += time.perf_counter() - begin
            self.runner.pump()

    def _start_gather(self, unit: Unit) -> None:
        begin = time.perf_counter()
        full = unit.begin_gather()
        try:
            if unit.shard_is_away:
                self._tickets[unit.index] = self.offload.gather(unit, full, self.transport)
            else:
                self._tickets[unit.index] = self.transport.gather(unit.index, unit.shard, full)
        except BaseException:
            unit.cancel_gather()
            raise
        self.events.emit("gather", unit.name, since=begin)

    def _start_early(self, index: int) -> bool:
        unit = self.units[index]
        if unit.state is not UnitState.SHARDED:
            return False
        self._start_gather(unit)
        return True

    def _drop(self, index: int) -> None:
        """Give up a gather that was started early: its Unit was not used after all."""
        ticket = self._tickets.pop(index)
        try:
            ticket.wait()
        finally:
            self.events.emit("drop", self.units[index].name)
            self.units[index].cancel_gather()

    def settle(self) -> None:
        """Something other than the expected pass comes next: hold nothing that was started early."""
        if self.runner is not None:
            self.runner.stop()
        for index in list(self._tickets):
            self._drop(index)
        if self.spare_pages is not None:
            self.spare_pages.drop()

    def _free(self, unit: Unit) -> None:
        is_needed = unit.scopes > 0 or unit.is_pinned or bool(unit.passages)
        if unit.is_gathered and not unit.is_always_full and not is_needed:
            self.events.emit("free", unit.name)
            unit.free()
            if self.runner is not None and not self.transport.watch.has_failed:
                self.runner.pump()
            if self.spare_pages is not None and not (self.runner is not None and self.runner.expects_more):
                self.spare_pages.drop()

    # -- backward ---------------------------------------------------------------------------------------------

    def _check_opened(self, unit: Unit, slot: int) -> None:
        """A gradient of a Unit that no output announced was computed from placeholders."""
        if not (unit.is_always_full or unit.was_opened or unit.is_gathered):
            raise UnannouncedBackwardError(
                f"backward reached parameter {unit.layout.slots[slot].name!r} of Unit {unit.name!r} (rank {self.world.rank}), "
                f"but the outputs of {type(unit.module).__name__}.forward are not part of this loss, so its parameters were not "
                "in memory. The loss uses a tensor that a forward pass left on the side: return it from forward instead."
            )

    @_hook
    def before_backward(
        self, units: Sequence[tuple[Unit, int]], nested: Sequence[tuple[Unit, int]], passage: Passage | None
    ) -> None:
        """Autograd is about to run the backward of a forward call that used these Units."""
        self.begin_backward()
        for unit, version in (*units, *nested):
            if unit.version != version:
                raise StaleGraphError(
                    f"backward reached Unit {unit.name!r} on rank {self.world.rank}, whose parameters changed since the "
                    "forward pass that built this graph (an optimizer step, or a write through run.gathered or "
                    "load_state_dict). Run the forward pass again before this backward."
                )
            if not unit.is_gathered:
                self.gather(unit)
            unit.was_opened = True
            if torch.is_grad_enabled() and not unit.is_always_full:
                unit.is_pinned = True  # create_graph: the new graph saves these parameters, and nothing tells when it dies
        if passage is not None:
            for unit, _ in units:
                unit.passages.add(passage)

    @_hook
    def announce(self, units: Iterable[Unit]) -> None:
        """Gradients are about to come of Units whose parameters their backward does not read."""
        self.begin_backward()
        for unit in units:
            unit.was_opened = True

    @_hook
    def release(self, units: Iterable[Unit], passage: Passage) -> None:
        """The backward of a forward call is over."""
        self._scaled.discard(passage)
        for unit in units:
            unit.passages.discard(passage)
            self._free(unit)

    def begin_backward(self) -> None:
        """Autograd runs: note it if that is news, and have the end of it reported."""
        if self._in_backward and self._end_of_backward is not None and self._end_of_backward() is None:
            self._start_afresh()  # the last backward raised: autograd has dropped the callback that would have ended it
        if not self._in_backward:
            self._in_backward = True
            self.events.emit("backward")
            if self.runner is not None:
                self.runner.begin_backward()
            # Runs when autograd has finished this backward, also if it was started by autograd.grad.
            end = _EndOfBackward(self.after_backward)
            self._end_of_backward = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def after_backward(self) -> None:
        """Autograd has finished: reduce what is left and free everything."""
        begin = time.perf_counter()
        if self.runner is not None:
            self.runner.end_backward()
        self.stall_percent = self.gradients.finish(self._stall_share())
        if self.runner is not None:
            self.runner.observe(self.stall_percent)
        self._in_backward = False
        self._scaled.clear()
        for unit in self.units:
            unit.passages.clear()
            unit.was_opened = False
            self._free(unit)
        self.events.emit("backward end", since=begin)

    def _stall_share(self) -> int:
        """Whole percent of the time since the last backward ended that this rank waited for gathers."""
        now = time.perf_counter()
        share = 100.0 * self._stall_s / max(now - self._step_began, 1e-9)
        self._stall_s, self._step_began = 0.0, now
        return min(int(share), 255)

    def _start_afresh(self) -> None:
        """A forward, backward or load was cut short by an exception: drop what it left open."""
        was_in_backward, self._in_backward = self._in_backward, False
        self.settle()
        if was_in_backward:
            self.gradients.abandon()
        self._scaled.clear()
        if self._loading is not None:
            self._loading_depth = 1
            self.end_loading()
        for frame in self._frames:
            for unit in frame.opened:
                unit.scopes -= 1
        self._frames.clear()
        for unit in self.units:
            unit.was_opened = False
            unit.passages.clear()
            self._free(unit)

    # -- step -------------------------------------------------------------------------------------------------

    def before_step(self, has_closure: bool = False) -> None:
        """The optimizer is about to update shards: refuse what would be lost, and skip on overflow."""
        if has_closure and self.scaler is not None:
            raise OptimizerError(
                "optimizer.step(closure) with loss scaling: gradients that the closure makes would not be checked for overflow. "
                "Call backward() first, then optimizer.step()."
            )
        if self._num_gathered_contexts:
            raise ShardwiseError(
                "optimizer.step() was called inside run.gathered(...): the update would be overwritten. Leave the context first."
            )
        if self._in_backward or self._frames or self._loading is not None:
            self._start_afresh()
        self.settle()
        for unit in self.units:
            if unit.was_written_past_masters():
                raise ModelError(
                    f"parameters of Unit {unit.name!r} were changed in place, but the optimizer updates their masters, so the "
                    "change would be lost. Make it inside `with run.gathered(module):`."
                )
            if not unit.is_intact():
                raise ModelError(
                    f"a parameter of Unit {unit.name!r} was given other memory after sharding (model.to(), .half(), or an "
                    "assignment to .data), so updates would not reach it. Convert the model before sw.shard()."
                )
        if self.scaler is not None:
            self._skips_step = not self.gradients.is_finite()
            if self._skips_step:
                self.gradients.clear()
        self.offload.settle()
        self._fence()  # a slower rank may still be gathering the shards that change now
        self._update_began = time.perf_counter()

    def after_closure(self) -> None:
        """The closure that the optimizer called may have run forward passes: nobody updates before all have ended."""
        self.settle()
        self._fence()

    def _fence(self) -> None:
        begin = time.perf_counter()
        self.transport.fence()
        self.events.emit("fence", since=begin)

    def after_step(self) -> None:
        """Shards are new: round masters into them, and refresh parameters that stay whole."""
        self.events.emit("update", since=self._update_began)
        for unit in self.units:
            unit.is_pinned = False
            self._free(unit)
        if self.scaler is not None:
            self.scaler.update(found_overflow=self._skips_step)
            self.gradients.loss_scale = self.scaler.scale
        if self._skips_step:
            self._skips_step = False
            self.num_skipped_steps += 1
            self.events.emit("step skipped")
            return
        self.num_steps += 1
        self.transport.watch.step = self.num_steps
        self.publish([unit for unit in self.units if unit.is_trainable])
        self.events.emit("step")

    def publish(self, units: Sequence[Unit]) -> None:
        """Make changed masters visible to every rank's next forward."""
        for unit in units:
            if unit.is_gathered and not unit.is_always_full:
                raise LifecycleError(f"Unit {unit.name!r} is still gathered after a step: it would keep its old values.")
            if self.offload.step is None:
                unit.publish_master()
        self._fence()  # every rank's shards are new from here on
        if self.stage.gathers_after_step:
            begin = time.perf_counter()
            for ticket in [self.transport.gather(unit.index, unit.shard, unit.full) for unit in units]:
                ticket.wait()
            self.events.emit("refresh", since=begin)
        for unit in units:
            unit.changed()

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before."""
        norm = self.gradients.norm(norm_type)
        if not bool(torch.isfinite(norm)):
            if self.scaler is not None:
                return norm  # the coming step sees the overflow and is skipped
            names = self.gradients.non_finite()
            raise NonFiniteGradientError(
                f"clip_grad_norm_: the gradient norm is {norm.item()} at step {self.num_steps}; infinite or NaN gradients "
                f"in {', '.join(repr(n) for n in names[:5]) or 'no single parameter (the sum overflowed)'}"
                f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}. Gradients and parameters are unchanged: "
                "skip this step (optimizer.zero_grad()) or find the cause."
            )
        self.gradients.scale(clip_factor(norm, max_norm))
        return norm

    # -- outside the step -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep Units gathered; on leaving, write in-place changes back to the shards."""
        versions: dict[int, list[int]] = {}
        self._num_gathered_contexts += 1
        self.settle()
        try:
            self.transport.fence()  # whole parameters may live in shared memory: nobody may still read what is written now
            for unit in units:
                if not unit.is_gathered:
                    self.gather(unit)
                unit.scopes += 1
                unit.num_contexts += 1
                unit.uncover()
                versions[unit.index] = [param._version for param in unit.params]
            with saving_for_inside(units):
                yield
        finally:
            self._num_gathered_contexts -= 1
            self.transport.fence()  # others may still be gathering
            for unit in units:
                if unit.index not in versions:
                    continue  # the gather that failed, and those behind it
                with self.offload.resident(unit, keeps_changes=True):
                    is_changed = unit.store_from_full()
                if is_changed or versions[unit.index] != [param._version for param in unit.params]:
                    unit.changed()
                unit.scopes -= 1
                unit.num_contexts -= 1
                self._free(unit)
            self.transport.fence()

    def full_master(self, unit: Unit) -> torch.Tensor:
        """All masters of a Unit, in new memory unless they are whole here."""
        with self.offload.resident(unit, keeps_changes=False):
            full = self._full_vector(unit, unit.master)
            is_lent = (unit.shard_is_away or unit.master_is_away) and full is unit.master
            return full.clone() if is_lent else full

    def full_grad(self, unit: Unit) -> torch.Tensor:
        """The whole reduced gradient of a Unit, in new memory unless it is whole here."""
        with self.offload.resident_grad(unit) as grad:
            assert grad is not None
            full = self._full_vector(unit, grad)
            return full.clone() if full is grad and self.offload.grads_are_away else full

    def _full_vector(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        if shard.numel() == unit.layout.numel:
            return shard
        self.settle()
        full = torch.empty(unit.layout.numel, dtype=shard.dtype, device=shard.device)
        self.transport.gather(unit.index, shard, full).wait()
        return full

    def begin_loading(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """A module is about to copy its part of a state dict in: keep what is exact, let every touch gather its Unit."""
        if self._loading is not None and not prefix:
            self._start_afresh()  # the load before this one raised
        if self._loading is None:
            self.settle()
            self.transport.fence()
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
                with self.offload.resident(handle.unit, keeps_changes=True):
                    handle.unit.store(handle.slot, flat_values(value.to(handle.unit.device), stride))

    def end_loading(self) -> None:
        """Write what was loaded back to the shards; graphs built before are out of date."""
        self._loading_depth -= 1
        if self._loading_depth > 0:
            return
        if self._loading is not None:
            self._loading.close()
            self._loading = None
        for unit in self.units:
            if unit.is_always_full:
                with self.offload.resident(unit, keeps_changes=True):
                    unit.store_from_full()
            unit.changed()
        self.transport.fence()

    def _open_window(self, unit: Unit) -> None:
        self.transport.fence()  # every rank has stored its part
        unit.scopes += 1
        self.gather(unit)
        unit.uncover()

    def _close_window(self, unit: Unit) -> None:
        self.transport.fence()
        with self.offload.resident(unit, keeps_changes=True):
            unit.store_from_full()
        self.transport.fence()
        unit.scopes -= 1
        self._free(unit)

    # -- Owner: what a touch of a freed parameter means -------------------------------------------------------

    def touch(self, units: Sequence[Unit]) -> bool:
        """Inside a forward pass a touch gathers, as if the running module owned the parameter."""
        if self._loading is not None:
            self._loading.touch(units)
            return True
        if not self._frames or any(u.state is UnitState.GATHERING and u.index not in self._tickets for u in units):
            return False
        frame = self._frames[-1]
        if frame.is_inside and frame.passage is None and torch.is_grad_enabled():
            frame.passage = Passage(self)
        for unit in units:
            self._open(unit, range(len(unit.params)), frame)
        return True

    def remedy(self) -> str:
        """How to reach full parameters."""
        return (
            "Read or change it inside `with run.gathered(module):`, save with run.full_state_dict(), or, if a method other "
            "than forward uses it, name that method in sw.shard(..., methods=(...))."
        )

    def local_grad(self, handle: Handle) -> torch.Tensor | None:
        """`parameter.grad`: None before a backward, the gradient at stage 0, else an error: it is in the shards."""
        unit, slot = handle.unit, handle.slot
        if not self.gradients.holds(unit, slot):
            return None
        if self.stage.gathers_grads:
            view = unit.layout.slots[slot]
            held = next((p.master.grad for p in unit.pieces if p.piece.slot_index == slot), None)
            return None if held is None else held.as_strided(view.shape, view.stride)
        raise FreedParameterError(
            f".grad of parameter {unit.layout.slots[slot].name!r} (rank {self.world.rank}): the gradient was reduced and only "
            "this rank's shard of it is kept. Use run.clip_grad_norm_() to clip, run.grad(name) to read, "
            "optimizer.zero_grad() to clear."
        )

    def set_local_grad(self, handle: Handle, grad: torch.Tensor | None) -> None:
        """`parameter.grad = None` clears the shard's gradient too; any other value is refused."""
        unit, slot = handle.unit, handle.slot
        if grad is not None:
            raise FreedParameterError(
                f"setting .grad of parameter {unit.layout.slots[slot].name!r}: gradients live in shards and come from "
                "backward() only; None clears them."
            )
        for piece in unit.pieces:
            if piece.piece.slot_index == slot:
                piece.master.grad = None


class _EndOfBackward:
    """What autograd calls when a backward has ended; if that raises instead, autograd drops it and it is gone."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self) -> None:
        self._function()


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The number gradients are multiplied by: torch's own formula, never above one."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _is_inside_autograd() -> bool:
    return torch._C._current_graph_task_id() != -1
