"""One training step, in the order in which it happens. The first file to read.

    forward   enter -> gather -> (user code) -> leave -> free
    backward  before_backward -> gather -> (autograd) -> gradients arrive -> reduce -> release -> free -> after_backward
    step      before_step -> (user's optimizer) -> after_step -> gather again where parameters stay whole

The runtime decides *when*; Units own tensors, the transport moves bytes, `Gradients` reduces. It must never hold a full
vector longer than its stage allows, and never let user code see one that is not filled.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from shardwise.comm import Transport, World
from shardwise.engine.digest import digest
from shardwise.engine.gradients import Gradients
from shardwise.engine.model_buffers import ModelBuffers
from shardwise.engine.nested import tensors_in
from shardwise.engine.offload import Offloading
from shardwise.engine.outside import Outside
from shardwise.engine.passage import Frame, Passage
from shardwise.engine.saved import Place, SavedPlaces
from shardwise.engine.stages import Held, Stage
from shardwise.engine.transforms import outside_transforms
from shardwise.errors import (
    FreedParameterError,
    LifecycleError,
    ModelError,
    NonFiniteGradientError,
    OptimizerError,
    RanksDifferError,
    ShardwiseError,
    StaleGraphError,
)
from shardwise.observe import EventLog, pause
from shardwise.partition import Handle, Unit, UnitState, is_trained, own_grad, set_own_grad
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

    def __init__(self, world: World, stage: Stage, events: EventLog, ledger: Ledger, offload: Offloading) -> None:
        self.world = world
        self.transport: Transport
        self.stage = stage
        self.events = events
        self.ledger = ledger
        self.offload = offload
        self.units: Sequence[Unit] = ()
        self.gradients: Gradients
        self.buffers: ModelBuffers
        self.outside = Outside(self)
        self.saved = SavedPlaces(self._restore)
        self.needs_scaling = False
        """Whether a backward must come from a loss that the run's GradScaler has scaled."""
        self.activate: Callable[[Unit], None] | None = None
        """Makes a Unit that was frozen trainable; set when the model is assembled."""
        self._unfrozen: dict[int, Unit] = {}  # frozen Units with a parameter that was unfrozen in the middle of a backward
        self._keeps_places = self.stage.params is Held.SHARD
        self._nodes: dict[tuple[int, int], torch.autograd.graph.Node] = {}
        self._frames: list[Frame] = []
        self._lingering: dict[int, Unit] = {}  # freed Units whose memory user code's views keep
        self._lent: list[Unit] = []  # those of any rank when the step began
        self._in_backward = False
        self._end_of_backward: weakref.ref[_EndOfBackward] | None = None
        self._is_scaled = False  # the backward that runs came from a scaled loss
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

    def start(self, units: Sequence[Unit], transport: Transport, prefetch_bytes: int | None, buffers: ModelBuffers) -> None:
        """Take charge of the Units and listen for their gradients."""
        self.units = units
        self.transport = transport
        self.buffers = buffers
        sizes = {unit.index: unit.full_bytes for unit in units if not unit.is_always_full}
        if sizes and (transport.gathers_ahead or self.offload.params_are_away) and prefetch_bytes != 0:
            budget = max(sizes.values()) if prefetch_bytes is None else prefetch_bytes
            self.runner = Runner(sizes, budget, self._start_early, self._drop)
            if self.world.device.type == "cpu":
                self.spare_pages = SparePages(max(sizes.values()), self.ledger)
                for unit in units:
                    unit.spare_pages = self.spare_pages
        self.gradients = Gradients(units, self.world, self.transport, self.stage, self.events, self.ledger, self.offload)
        for unit in units:
            for slot, param in enumerate(unit.params):
                self._listen(unit, slot, param)

    def _listen(self, unit: Unit, slot: int, param: nn.Parameter) -> None:
        """Take the gradient where autograd would accumulate it: nothing is copied, `.grad` is never set.

        Frozen parameters too: they may be unfrozen.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():  # looks at the graph, not at values
            is_frozen = not param.requires_grad
            if is_frozen:
                torch.Tensor.requires_grad_(param)
            node = torch.autograd.graph.get_gradient_edge(param).node
            if is_frozen:
                torch.Tensor.requires_grad_(param, False)
        node.register_prehook(_Arrival(self, unit.index, slot))
        self._nodes[unit.index, slot] = node  # autograd holds the node weakly: without this a new one, unheard, would replace it

    @_hook
    def arrive(self, index: int, slot: int, grad: torch.Tensor | None) -> None:
        """Autograd has the whole gradient of a parameter."""
        self.begin_backward()
        unit = self.units[index]
        param = unit.params[slot]
        with torch._C.DisableTorchFunctionSubclass():
            hooks = param._post_accumulate_grad_hooks
        if grad is None or not is_trained(param):  # frozen since the forward: autograd would drop it too
            return
        if hooks:
            raise ModelError(
                f"parameter {unit.layout.slots[slot].name!r} has a hook from register_post_accumulate_grad_hook(), which runs "
                "before gradients are averaged over ranks and finds none in .grad. Use register_hook() to change a gradient "
                "on its way, or run.grad(name) after backward()."
            )
        if not unit.is_trainable:
            raise ModelError(
                f"parameter {unit.layout.slots[slot].name!r} was frozen when the model was sharded and was unfrozen after this "
                "backward's forward pass had begun. Unfreeze it before the forward pass."
            )
        if self.needs_scaling and not self._is_scaled:
            raise OptimizerError(
                "backward() was called on a loss that was not scaled, but this run stores parameters in fp16, where small "
                "gradients would vanish. Call run.scaler.scale(loss).backward()."
            )
        self.gradients.arrive(unit, slot, grad.detach() if grad.requires_grad else grad)

    # -- forward ----------------------------------------------------------------------------------------------

    @_hook
    def enter(self, entries: Sequence[Entry], inputs: Any, *, is_root: bool = False) -> Any:
        """A module's forward begins: make its Units usable. Returns the inputs to use instead, or None."""
        if self._frames and not is_root and self._is_all_open(entries):
            frame = Frame(entries, None)
            self._frames.append(frame)
            self._keep_places(frame)
            return None
        was_interrupted = is_root and any(frame.is_root for frame in self._frames)
        if not _is_inside_autograd() and (self._in_backward or self.outside.is_loading or was_interrupted):
            self.start_afresh()  # the last backward, load or forward was cut short
        if not self._frames and not self._in_backward and not _is_inside_autograd():
            self.free_lingering()
            if is_root:
                self.buffers.before_forward(self.transport)
                self._round_writes()
            if self.runner is not None:
                self.runner.begin_forward(is_new=is_root, leads_to_backward=torch.is_grad_enabled())
        frame = Frame(entries, Passage(self) if self._keeps_places and torch.is_grad_enabled() else None, is_root=is_root)
        self._frames.append(frame)
        for unit, slots in entries:
            self._open(unit, slots, frame)
        self._keep_places(frame)
        return frame.passage.watch(inputs) if frame.passage is not None and frame.units else None

    def _keep_places(self, frame: Frame) -> None:
        """From here to the call's end autograd keeps places of parameters that will be freed, not values."""
        if self._keeps_places and torch.is_grad_enabled():
            try:
                frame.hooks = self.saved.begin()
            except LookupError:
                frame.is_pinning = True

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
        if not is_nested:
            frame.units.append(unit)

    @_hook
    def leave(self, entries: Sequence[Entry], output: Any, *, reads_params_in_backward: bool = True) -> None:
        """A module's forward ended: watch for its backward, then free what nobody else is inside of."""
        if not self._frames or self._frames[-1].entries is not entries:
            return  # this call's enter raised: torch calls the hook after forward all the same
        frame = self._frames.pop()
        if frame.hooks is not None:
            frame.hooks.__exit__(None, None, None)
        if frame.is_root and torch.is_grad_enabled():
            for tensor in tensors_in(output):  # also a rank whose loss reaches no trainable parameter takes part in the backward
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._announced)
        if not frame.opened:
            return
        if frame.passage is not None and reads_params_in_backward:
            frame.passage.guard(output, frame.units)
        is_recomputing = _is_inside_autograd()  # then Units stay: their backward comes next
        for unit in frame.opened:
            unit.scopes -= 1
            unit.cover()
            unit.is_pinned |= frame.is_pinning  # values, not places, are in the graph
            if not is_recomputing:
                self.free(unit)
        if self.runner is not None and not self._frames and not torch.is_grad_enabled() and not is_recomputing:
            self.runner.stop()  # no backward will follow

    def gather(self, unit: Unit) -> None:
        """Shards to full, and the parameters become usable; often the gather was started early."""
        with outside_transforms():
            self._gather(unit)

    def _gather(self, unit: Unit) -> None:
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
        self.saved.know(unit)
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

    def free(self, unit: Unit) -> None:
        """Give a full vector's memory back, unless somebody needs it or it holds what the shards do not have."""
        is_needed = unit.scopes > 0 or unit.is_pinned or unit.is_written or bool(unit.passages)
        if unit.is_gathered and not unit.is_always_full and not is_needed:
            if unit.may_be_written():
                unit.absorb()
                unit.is_written = True  # kept until all ranks are at a point where it can be written back
                return
            self.events.emit("free", unit.name)
            with outside_transforms():
                unit.free()
            if unit.keeps_memory:
                self._lingering[unit.index] = unit
            if self.runner is not None and not self.transport.watch.has_failed:
                self.runner.pump()
            if self.spare_pages is not None and not (self.runner is not None and self.runner.expects_more):
                self.spare_pages.drop()

    def free_lingering(self) -> None:
        """Give back memory that was in use when its Unit was freed, and no longer is."""
        for unit in list(self._lingering.values()):
            unit.give_up_kept()
            if not unit.keeps_memory:
                del self._lingering[unit.index]

    # -- backward ---------------------------------------------------------------------------------------------

    @_hook
    def before_backward(self, units: Iterable[Unit], passage: Passage) -> None:
        """Autograd is about to run the backward of a forward call that used these Units."""
        self.begin_backward()
        for unit in units:
            if not unit.is_gathered:
                self.gather(unit)
            unit.passages.add(passage)

    def _announced(self, _: torch.Tensor) -> None:
        self.begin_backward()

    @_hook
    def release(self, units: Iterable[Unit], passage: Passage) -> None:
        """The backward of a forward call is over."""
        for unit in units:
            unit.passages.discard(passage)
            self.free(unit)

    def _restore(self, place: Place) -> torch.Tensor:
        """Autograd needs a view of a Unit's parameters that a forward pass used."""
        unit = place.unit
        if not place.is_current:
            raise StaleGraphError(
                f"backward needs the values that parameter {unit.layout.slots[place.slot].name!r} (Unit {unit.name!r}, rank "
                f"{self.world.rank}) had in the forward pass, but they have changed since (an optimizer step, or a write by "
                "hand). Run the forward pass again before this backward."
            )
        if not _is_inside_autograd():  # somebody looks at a graph: nobody would tell when to free
            with self.outside.opened([unit]):
                return place.view().clone()
        self.begin_backward()
        if not unit.is_gathered:
            self.gather(unit)
        if torch.is_grad_enabled():
            unit.is_pinned = True  # create_graph: the new graph saves this view, and nothing tells when it dies
        return place.view()

    def scaled(self) -> None:
        """A loss that was scaled is being run backward."""
        self.begin_backward()
        self._is_scaled = True

    def begin_backward(self) -> None:
        """Autograd runs: note it if that is news, and have the end of it reported."""
        if self._in_backward and self._end_of_backward is not None and self._end_of_backward() is None:
            self.start_afresh()  # the last backward raised: autograd has dropped the callback that would have ended it
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
        with outside_transforms():
            self._after_backward()

    def _after_backward(self) -> None:
        begin = time.perf_counter()
        if self.runner is not None:
            self.runner.end_backward()
        self._take_strays()
        written = [unit.is_written for unit in self.units]
        changed = self.buffers.changed()
        is_scaled = self.needs_scaling and self._is_scaled
        self.stall_percent, found, has_grads = self.gradients.finish(self._stall_share(), [*written, *changed])
        self.gradients.is_scaled |= is_scaled and has_grads
        self._is_scaled = False
        if self.runner is not None:
            self.runner.observe(self.stall_percent)
        self._in_backward = False
        self.store_written([unit for unit, is_written in zip(self.units, found, strict=False) if is_written])
        self.buffers.broadcast(self.transport, found[len(self.units) :])
        for unit in self.units:
            unit.passages.clear()
            self.free(unit)
        for unit in self._unfrozen.values():
            self._activate(unit)
        self._unfrozen.clear()
        self.events.emit("backward end", since=begin)

    def _take_strays(self) -> None:
        """Gradients that autograd accumulated itself: some changes of a parameter's memory (`p.set_()`) give it a new node."""
        for unit in self.units:
            for slot, param in enumerate(unit.params):
                grad = own_grad(param)
                if grad is not None:
                    set_own_grad(param, None)
                    self._listen(unit, slot, param)
                    self.arrive(unit.index, slot, grad)

    def store_written(self, units: Sequence[Unit]) -> None:
        """Write what user code changed in gathered parameters back to the shards. All ranks must have made the same change."""
        if not units:
            return
        self.require_alike(units)
        for unit in units:
            with self.offload.resident(unit, keeps_changes=True):
                unit.store_from_full()
            unit.note_versions()
            unit.is_written = False
        self.transport.fence()
        for unit in units:
            self.free(unit)

    def require_alike(self, units: Sequence[Unit]) -> None:
        """Refuse changes that ranks have not all made: each keeps only its own slice of what it sees."""
        found = self.agree_on([digest(unit.full) if unit.is_gathered else -1 for unit in units])
        for unit, (low, high) in zip(units, found, strict=True):
            if low != high:
                self._forget_writes(units)
                raise RanksDifferError(
                    f"parameters of Unit {unit.name!r} ({unit.layout.slots[0].name!r} ...) were changed by user code, and not "
                    "alike on every rank: one value cannot stand for all, and nothing was stored. Make the same change on every "
                    "rank (seed alike, or all-reduce what it depends on), or keep such values in a buffer."
                )

    def _forget_writes(self, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.is_written = False
            if unit.is_gathered and not unit.is_always_full and not unit.scopes:
                unit.passages.clear()
                unit.free()

    def agree_on(self, values: Sequence[int]) -> list[tuple[int, int]]:
        """The smallest and the largest of every value over all ranks."""
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device=self.world.device)
        found = self.transport.combine(both, torch.distributed.ReduceOp.MAX).tolist()
        return [(-low, high) for high, low in zip(found[: len(values)], found[len(values) :], strict=True)]

    def _stall_share(self) -> int:
        """Whole percent of the time since the last backward ended that this rank waited for gathers."""
        now = time.perf_counter()
        share = 100.0 * self._stall_s / max(now - self._step_began, 1e-9)
        self._stall_s, self._step_began = 0.0, now
        return min(int(share), 255)

    def start_afresh(self) -> None:
        """A forward, backward or load was cut short by an exception: drop what it left open."""
        was_in_backward, self._in_backward = self._in_backward, False
        self.settle()
        if was_in_backward:
            self.gradients.abandon()
        self._is_scaled = False
        self.outside.end_interrupted_load()
        for frame in reversed(self._frames):
            if frame.hooks is not None:
                frame.hooks.__exit__(None, None, None)
            for unit in frame.opened:
                unit.scopes -= 1
        self._frames.clear()
        for unit in self.units:
            unit.passages.clear()
            self.free(unit)

    # -- step -------------------------------------------------------------------------------------------------

    def before_step(self, has_closure: bool = False) -> None:
        """The optimizer is about to update shards: write changes by hand back first, refuse what would be lost."""
        if has_closure and self.needs_scaling:
            raise OptimizerError(
                "optimizer.step(closure) with loss scaling: gradients that the closure makes would not be checked for overflow. "
                "Call backward() first, then run.scaler.step(optimizer)."
            )
        if self.gradients.is_scaled:
            raise OptimizerError(
                "optimizer.step() was called with gradients that are still multiplied by the loss scale. Call "
                "run.scaler.step(optimizer) instead, then run.scaler.update()."
            )
        if self.outside.num_contexts:
            raise ShardwiseError(
                "optimizer.step() was called inside run.gathered(...): the update would be overwritten. Leave the context first."
            )
        if self._in_backward or self._frames or self.outside.is_loading:
            self.start_afresh()
        self.settle()
        for unit in self.units:
            unit.unpin()
            self.free(unit)
        self.absorb_writes()
        self.free_lingering()
        self.offload.settle()
        self._fence()  # a slower rank may still be gathering the shards that change now
        self._update_began = time.perf_counter()

    def absorb_writes(self) -> None:
        """Bring masters and shards up to date with what user code, on any rank, wrote into parameters."""
        if self._keeps_places:
            for unit in self.units:
                if unit.is_scribbled:
                    unit.reopen() if unit.keeps_memory else self.gather(unit)  # an overlay's needs nobody else
                    unit.is_written = True
        for unit in self.units:
            # Of values that are stored in fewer bits the masters would win: look at all of them, whatever versions say.
            if unit.is_always_full and (unit.may_be_written() or (unit.is_narrow and unit.differs())):
                unit.absorb()
                unit.is_written = True
        written = [int(unit.is_written) for unit in self.units]
        lent = [int(self._keeps_places and not unit.is_overlaid and unit.is_lent) for unit in self.units]
        found = [flag for _, flag in self.agree_on([*written, *lent])]
        self._lent = [unit for unit, is_lent in zip(self.units, found[len(written) :], strict=True) if is_lent]
        self.store_written([unit for unit, is_written in zip(self.units, found, strict=False) if is_written])

    def _round_writes(self) -> None:
        """The model computes with what is stored, also where user code has just written more digits."""
        for unit in self.units:
            if unit.is_always_full and unit.is_narrow and unit.may_be_written():
                unit.absorb()
                with self.offload.resident(unit, keeps_changes=True):
                    unit.store_from_full()
                unit.note_versions()
                unit.is_written = True  # ranks have yet to agree that they have made the same change

    def cleared(self, slots: Collection[tuple[int, int]], *, set_to_none: bool) -> None:
        """`optimizer.zero_grad()` was called, by which this rank's pieces have lost their gradients."""
        self.gradients.clear(slots, set_to_none=set_to_none)

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
            unit.unpin()  # again: a closure may have run a backward
            self.free(unit)
        self.num_steps += 1
        self.transport.watch.step = self.num_steps
        self.publish()
        for unit in self._lent:  # somebody, on some rank, uses its memory: it shows the new values
            self.gather(unit)
            self.free(unit)
        self._lent = []
        self.events.emit("step")

    def unscale(self, factor: float) -> bool:
        """Divide the loss scale out of all gradients; whether all of them are finite, on every rank."""
        is_finite = self.gradients.is_finite()
        self.gradients.scale(torch.tensor(factor, dtype=torch.float64))
        self.gradients.is_scaled = False
        return is_finite

    def skip_step(self) -> None:
        """A gradient overflowed on some rank, and no rank updates."""
        self.gradients.clear()
        self.num_skipped_steps += 1
        self.events.emit("step skipped")

    def publish(self) -> None:
        """Make changed masters visible to every rank's next forward."""
        updated = {unit: self.gradients.held_slots(unit) for unit in self.units if unit.is_trainable}
        updated = {unit: slots for unit, slots in updated.items() if slots}
        for unit in updated:
            if unit.is_gathered and not unit.is_always_full:
                raise LifecycleError(f"Unit {unit.name!r} is still gathered after a step: it would keep its old values.")
            if self.offload.step is None:
                unit.publish_master()
        self._fence()  # every rank's shards are new from here on
        if self.stage.gathers_after_step:
            begin = time.perf_counter()
            for ticket in [self.transport.gather(unit.index, unit.shard, unit.full) for unit in updated]:
                ticket.wait()
            self._fence()  # and every rank has read them: from here on anybody may write to whole parameters
            self.events.emit("refresh", since=begin)
        for unit, slots in updated.items():
            unit.changed(slots)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before."""
        if self.gradients.is_scaled:
            raise OptimizerError(
                "clip_grad_norm_: gradients are still multiplied by the loss scale. Call run.scaler.unscale_(optimizer) first."
            )
        norm = self.gradients.norm(norm_type)
        if not bool(torch.isfinite(norm)):
            if self.needs_scaling:
                return norm  # the scaler has seen the overflow and will skip the step
            names = self.gradients.non_finite()
            raise NonFiniteGradientError(
                f"clip_grad_norm_: the gradient norm is {norm.item()} at step {self.num_steps}; infinite or NaN gradients "
                f"in {', '.join(repr(n) for n in names[:5]) or 'no single parameter (the sum overflowed)'}"
                f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}. Gradients and parameters are unchanged: "
                "skip this step (optimizer.zero_grad()) or find the cause."
            )
        self.gradients.scale(clip_factor(norm, max_norm))
        return norm

    # -- Owner: what a touch of a freed parameter means -------------------------------------------------------

    def touch(self, units: Sequence[Unit]) -> bool:
        """Inside a forward or backward pass a touch gathers, as if the running module owned the parameter."""
        if self.outside.touch(units):
            return True
        if not self._frames and not _is_inside_autograd():
            return False
        for unit in units:
            if unit.state is UnitState.GATHERING and unit.index not in self._tickets:
                raise LifecycleError(f"Unit {unit.name!r} was touched while it is being gathered: a broken invariant.")
            if self._frames:
                frame = self._frames[-1]
                if frame.passage is None and torch.is_grad_enabled():
                    frame.passage = Passage(self)
                self._open(unit, range(len(unit.params)), frame)
            elif not unit.is_gathered:  # freed at the end of this backward
                self.begin_backward()
                self.gather(unit)
                unit.uncover()
        return True

    def operate(self, function: Callable[[], Any], touched: Sequence[Handle], name: str) -> Any:
        """Outside any pass one operation gathers, runs, and is written back."""
        return self.outside.operate(function, touched, name)

    def flagged(self, handle: Handle, requires_grad: bool) -> None:
        """A frozen Unit becomes trainable with the first of its parameters that is unfrozen."""
        unit = handle.unit
        if requires_grad and not unit.is_trainable:
            if self._in_backward:
                self._unfrozen[unit.index] = unit
            else:
                self._activate(unit)

    def owns(self, address: int) -> bool:
        """Whether an address lies in a full vector."""
        return self.saved.unit_at(address) is not None

    def copied(self, handle: Handle) -> nn.Parameter:
        """A sharded model's parameters are copied whole, inside `run.gathered`."""
        raise LifecycleError("a copy of a sharded parameter was asked for: a broken invariant.")

    def _activate(self, unit: Unit) -> None:
        if self.activate is not None and not unit.is_trainable:
            self.activate(unit)
            self.gradients.add(unit)

    def remedy(self) -> str:
        """How to reach full parameters."""
        return "Do it inside `with run.gathered(module):`, on every rank."

    def local_grad(self, handle: Handle) -> torch.Tensor | None:
        """`parameter.grad`: None before a backward, the gradient at stage 0, else an error: it is in the shards."""
        unit, slot = handle.unit, handle.slot
        if not self.gradients.holds(unit, slot):
            return None
        if self.stage.gathers_grads:
            view = unit.layout.slots[slot]
            unit.grad_is_lent = True
            held = next((p.grad for p in unit.pieces if p.piece.slot_index == slot), None)
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
        if unit.is_trainable:
            self.gradients.drop(unit, slot)


class _Arrival:
    """Called by autograd with a parameter's gradient; does not keep the run alive, which autograd's nodes would never let go."""

    __slots__ = ("_index", "_runtime", "_slot")

    def __init__(self, runtime: Runtime, index: int, slot: int) -> None:
        self._runtime = weakref.ref(runtime)
        self._index, self._slot = index, slot

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None]:
        runtime = self._runtime()
        if runtime is not None:
            runtime.arrive(self._index, self._slot, grads[0])
        return (None,)


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
