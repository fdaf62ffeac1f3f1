"""One training step, in the order in which it happens. The first file to read.

    forward   enter -> gather -> (user code) -> leave -> free
    backward  before_backward -> gather -> (autograd) -> gradients arrive -> reduce -> release -> free -> after_backward
    step      before_step -> (user's optimizer) -> after_step -> gather again where parameters stay whole

The runtime decides *when*; `Gathering` gathers and frees, Units own tensors, the transport moves bytes, `Gradients` reduces. It
must never hold a full vector longer than its stage allows, and never let user code see one that is not filled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from shardwise.comm import Transport, World
from shardwise.engine.arrivals import Arrivals, EndOfBackward, is_expected, is_inside_autograd
from shardwise.engine.changes import Changes
from shardwise.engine.gathering import Entry, Gathering
from shardwise.engine.gradients import Gradients
from shardwise.engine.model_buffers import ModelBuffers
from shardwise.engine.nested import tensors_in
from shardwise.engine.norms import Norms
from shardwise.engine.offload import Offloading
from shardwise.engine.outside import Outside
from shardwise.engine.passage import Frame, Passage
from shardwise.engine.saved import Place, SavedPlaces
from shardwise.engine.transforms import outside_transforms
from shardwise.errors import LifecycleError, OptimizerError, ShardwiseError
from shardwise.observe import EventLog, timed_hook
from shardwise.partition import Unit, UnitState, publish_master
from shardwise.stages import Held, Stage
from shardwise.tiers import Ledger, SparePages


class Runtime:
    """Carries out the stage table for the Units of one model."""

    def __init__(
        self,
        units: Sequence[Unit],
        world: World,
        stage: Stage,
        transport: Transport,
        offload: Offloading,
        buffers: ModelBuffers,
        ledger: Ledger,
        *,
        thaw: Callable[[Unit], None],
        needs_scaling: bool,
        prefetch_bytes: int,
        spare_pages: SparePages | None,
    ) -> None:
        """`thaw` makes a frozen Unit trainable; `needs_scaling`: a backward must come from a loss that was scaled."""
        self.units = units
        self.world = world
        self.stage = stage
        self.transport = transport
        self.offload = offload
        self.ledger = ledger
        self.needs_scaling = needs_scaling
        self.events = EventLog()
        self.saved = SavedPlaces(self._restore)
        self.gathering = Gathering(
            units, world, transport, offload, self.saved, self.events, prefetch_bytes=prefetch_bytes, spare_pages=spare_pages
        )
        self.gradients = Gradients(units, world, transport, stage, self.events, ledger, offload.grads)
        self.norms = Norms(self.gradients, world, transport, stage, needs_scaling=needs_scaling)
        self.changes = Changes(self.gathering, world, transport, offload)
        self.outside = Outside(self)
        self._buffers = buffers
        self._arrivals = Arrivals(units, self)
        self._thaw = thaw
        self._unfrozen: dict[int, Unit] = {}  # frozen Units with a parameter that was unfrozen in the middle of a backward
        self._keeps_places = stage.params is Held.SHARD
        self._frames: list[Frame] = []
        self._in_backward = False
        self._end_of_backward: weakref.ref[EndOfBackward] | None = None
        self._is_scaled = False  # the backward that runs came from a scaled loss
        self._update_began = self.events.now()
        self.stall_percent = 0
        """Share of the last step in which some rank waited for gathers."""
        self.num_steps = 0
        self.num_skipped_steps = 0

    # -- forward ----------------------------------------------------------------------------------------------

    @timed_hook
    def enter(self, entries: Sequence[Entry], inputs: Any, *, is_root: bool = False) -> Any:
        """A module's forward begins: make its Units usable. Returns the inputs to use instead, or None."""
        if self._frames and not is_root and self.gathering.are_open(entries):
            frame = Frame(entries, None)
            self._frames.append(frame)
            self._keep_places(frame)
            return None
        was_interrupted = is_root and any(frame.is_root for frame in self._frames)
        if not is_inside_autograd() and (self._in_backward or self.outside.is_loading or was_interrupted):
            self.start_afresh()  # the last backward, load or forward was cut short
        if not self._frames and not self._in_backward and not is_inside_autograd():
            self._begin_forward(is_root=is_root)
        frame = Frame(entries, Passage(self) if self._keeps_places and torch.is_grad_enabled() else None, is_root=is_root)
        self._frames.append(frame)
        for unit, slots in entries:
            self._open(unit, slots, frame)
        self._keep_places(frame)
        return frame.passage.watch(inputs) if frame.passage is not None and frame.units else None

    def _begin_forward(self, *, is_root: bool) -> None:
        """An outermost call begins, the whole model's own or another."""
        self.gathering.discard_kept()
        if is_root:
            self._buffers.before_forward(self.transport)
            self.changes.round()
        if self.gathering.runner is not None:
            self.gathering.runner.begin_forward(is_new=is_root, leads_to_backward=torch.is_grad_enabled())

    def _keep_places(self, frame: Frame) -> None:
        """From here to the call's end autograd keeps places of parameters that will be freed, not values."""
        if self._keeps_places and torch.is_grad_enabled():
            try:
                frame.hooks = self.saved.begin()
            except LookupError:
                frame.is_pinning = True

    def _open(self, unit: Unit, slots: Sequence[int], frame: Frame) -> None:
        use = self.gathering.use(unit)
        is_nested = use.scopes > 0 and not unit.is_covered
        use.scopes += 1
        frame.opened.append(unit)
        if unit.is_covered and not slots:
            return  # a module above the holders: kept until this call ends, gathered by whoever uses it
        if not unit.is_gathered:
            self.gathering.gather(unit)
        unit.uncover()
        if not is_nested:
            frame.units.append(unit)

    @timed_hook
    def leave(self, entries: Sequence[Entry], output: Any, *, reads_params_in_backward: bool = True) -> None:
        """A module's forward ended: watch for its backward, then free what nobody else is inside of."""
        if not self._frames or self._frames[-1].entries is not entries:
            return  # this call's enter raised: torch calls the hook after forward all the same
        frame = self._frames.pop()
        frame.stop_keeping_places()
        if frame.is_root and torch.is_grad_enabled():
            for tensor in tensors_in(output):  # also a rank whose loss reaches no trainable parameter takes part in the backward
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._announced)
        if not frame.opened:
            return
        if frame.passage is not None and reads_params_in_backward:
            frame.passage.guard(output, frame.units)
        is_recomputing = is_inside_autograd()  # then Units stay: their backward comes next
        for unit in frame.opened:
            use = self.gathering.use(unit)
            use.scopes -= 1
            use.is_pinned |= frame.is_pinning  # values, not places, are in the graph
            self.gathering.cover(unit)
            if not is_recomputing:
                self.gathering.free(unit)
        if self.gathering.runner is not None and not self._frames and not torch.is_grad_enabled() and not is_recomputing:
            self.gathering.runner.stop()  # no backward will follow

    def touch(self, units: Sequence[Unit]) -> bool:
        """Inside a forward or backward pass a touch gathers, as if the running module owned the parameter; else False."""
        if self.outside.touch(units):
            return True
        if not self._frames and not is_inside_autograd():
            return False
        for unit in units:
            if unit.state is UnitState.GATHERING and not self.gathering.is_under_way(unit):
                raise LifecycleError(f"Unit {unit.name!r} was touched while it is being gathered: a broken invariant.")
            if self._frames:
                frame = self._frames[-1]
                if frame.passage is None and torch.is_grad_enabled():
                    frame.passage = Passage(self)
                self._open(unit, range(len(unit.params)), frame)
            elif not unit.is_gathered:  # freed at the end of this backward
                self.begin_backward()
                self.gathering.gather(unit)
                unit.uncover()
        return True

    # -- backward ---------------------------------------------------------------------------------------------

    def _announced(self, _: torch.Tensor) -> None:
        self.begin_backward()

    def begin_backward(self) -> None:
        """Autograd runs: note it if that is news, and have the end of it reported."""
        if self._in_backward and self._end_of_backward is not None and self._end_of_backward() is None:
            self.start_afresh()  # the last backward raised: autograd has dropped the callback that would have ended it
        if not self._in_backward:
            self._in_backward = True
            self.events.emit("backward")
            if self.gathering.runner is not None:
                self.gathering.runner.begin_backward()
            # Runs when autograd has finished this backward, also if it was started by autograd.grad.
            end = EndOfBackward(self.after_backward)
            self._end_of_backward = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def scaled(self) -> None:
        """A loss that was scaled is being run backward."""
        self.begin_backward()
        self._is_scaled = True

    @timed_hook
    def before_backward(self, units: Iterable[Unit], passage: Passage) -> None:
        """Autograd is about to run the backward of a forward call that used these Units."""
        self.begin_backward()
        for unit in units:
            if not unit.is_gathered:
                self.gathering.gather(unit)
            self.gathering.use(unit).passages.add(passage)

    def _restore(self, place: Place) -> torch.Tensor:
        """Autograd needs a view of a Unit's parameters that a forward pass used."""
        unit = place.unit
        if not is_inside_autograd():  # somebody looks at a graph: nobody would tell when to free
            with self.outside.opened([unit]):
                return place.view().clone()
        self.begin_backward()
        if not unit.is_gathered:
            self.gathering.gather(unit)
        if torch.is_grad_enabled():
            # create_graph: the new graph saves this view, and nothing tells when it dies.
            self.gathering.use(unit).is_pinned = True
        return place.view()

    @timed_hook
    def arrive(self, index: int, slot: int, grad: torch.Tensor | None) -> None:
        """Autograd has the whole gradient of a parameter."""
        end = self._end_of_backward
        if not self._in_backward or end is None or end() is None:
            self.begin_backward()
        unit = self.units[index]
        if grad is None or not is_expected(unit, slot):
            return
        if self.needs_scaling and not self._is_scaled:
            raise OptimizerError(
                "backward() was called on a loss that was not scaled, but this run stores parameters in fp16, where small "
                "gradients would vanish. Call run.scaler.scale(loss).backward()."
            )
        self.gradients.arrive(unit, slot, grad.detach() if grad.requires_grad else grad)

    @timed_hook
    def release(self, units: Iterable[Unit], passage: Passage) -> None:
        """The backward of a forward call is over."""
        for unit in units:
            self.gathering.use(unit).passages.discard(passage)
            self.gathering.free(unit)

    def after_backward(self) -> None:
        """Autograd has finished: reduce what is left and free everything."""
        with outside_transforms():
            self._after_backward()

    def _after_backward(self) -> None:
        begin = self.events.now()
        if self.gathering.runner is not None:
            self.gathering.runner.end_backward()
        self._arrivals.take_strays(self.gradients.complete)
        if not self.gradients.is_accumulating:  # else what is written or changed waits for the next agreement
            self._finish_gradients()
        self._in_backward = self._is_scaled = False
        self.gathering.end_passages()
        self.gathering.free_all()
        for unit in self._unfrozen.values():
            self.unfreeze(unit)
        self._unfrozen.clear()
        self.events.emit("backward end", since=begin)

    def _finish_gradients(self) -> None:
        """Gradients are reduced, and ranks agree on all that happened since the last backward."""
        written = [use.is_written for use in self.gathering.uses]
        asked = [*written, *self._buffers.changed()]
        self.stall_percent, found, has_grads = self.gradients.finish(self.gathering.stall_percent(), asked)
        self.gradients.is_scaled |= self.needs_scaling and self._is_scaled and has_grads
        if self.gathering.runner is not None:
            self.gathering.runner.observe(self.stall_percent)
        self._in_backward = False
        self.changes.store(self.changes.chosen(found[: len(written)]))
        self._buffers.broadcast(self.transport, found[len(written) :])

    def unfreeze(self, unit: Unit) -> None:
        """A parameter of a frozen Unit was unfrozen: it is trained from the next forward on."""
        if self._in_backward:
            self._unfrozen[unit.index] = unit
        elif not unit.is_trainable:
            self._thaw(unit)
            self.gradients.add(unit)

    def start_afresh(self) -> None:
        """A forward, backward or load was cut short by an exception: drop what it left open."""
        was_in_backward, self._in_backward = self._in_backward, False
        self.gathering.settle()
        if was_in_backward:
            self.gradients.abandon()
        self._is_scaled = False
        self.outside.end_interrupted_load()
        for frame in reversed(self._frames):
            frame.stop_keeping_places()
            for unit in frame.opened:
                self.gathering.use(unit).scopes -= 1
        self._frames.clear()
        self.gathering.end_passages()
        self.gathering.free_all()

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
        self.gradients.require_reduced("optimizer.step()")
        if self.outside.num_contexts:
            raise ShardwiseError(
                "optimizer.step() was called inside run.gathered(...): the update would be overwritten. Leave the context first."
            )
        if self._in_backward or self._frames or self.outside.is_loading:
            self.start_afresh()
        self.gathering.settle()
        self._free_for_step()
        self.changes.absorb()
        self.gathering.discard_kept()
        self.gradients.home.settle()
        self._fence()  # a slower rank may still be gathering the shards that change now
        self._update_began = self.events.now()

    def _free_for_step(self) -> None:
        for unit in self.units:
            self.gathering.unpin(unit)
            self.gathering.free(unit)

    def cleared(self, slots: Collection[tuple[int, int]], *, set_to_none: bool) -> None:
        """`optimizer.zero_grad()` was called, by which this rank's pieces have lost their gradients."""
        self.gradients.clear(slots, set_to_none=set_to_none)

    def after_closure(self) -> None:
        """The closure that the optimizer called may have run forward passes: nobody updates before all have ended."""
        self.gathering.settle()
        self._fence()

    def _fence(self) -> None:
        begin = self.events.now()
        self.transport.fence()
        self.events.emit("fence", since=begin)

    def after_step(self) -> None:
        """Shards are new: round masters into them, and refresh parameters that stay whole."""
        self.events.emit("update", since=self._update_began)
        self._free_for_step()  # again: a closure may have run a backward
        self.num_steps += 1
        self.transport.watch.step = self.num_steps
        self._publish()
        self.changes.show_new_values()
        self.events.emit("step")

    def _publish(self) -> None:
        """Make changed masters visible to every rank's next forward."""
        updated = {unit: self.gradients.held_slots(unit) for unit in self.units if unit.is_trainable}
        updated = {unit: slots for unit, slots in updated.items() if slots}
        for unit in updated:
            if unit.is_gathered and not unit.is_always_full:
                raise LifecycleError(f"Unit {unit.name!r} is still gathered after a step: it would keep its old values.")
            if self.offload.step is None:
                publish_master(unit)
        self._fence()  # every rank's shards are new from here on
        if self.stage.gathers_after_step:
            begin = self.events.now()
            for ticket in [self.transport.gather(unit.index, unit.shard, unit.full) for unit in updated]:
                ticket.wait()
            self._fence()  # and every rank has read them: from here on anybody may write to whole parameters
            self.events.emit("refresh", since=begin)
        for unit, slots in updated.items():
            unit.changed(slots)

    def unscale(self, factor: float) -> bool:
        """Divide the loss scale out of all gradients; whether all of them are finite, on every rank."""
        return self.norms.unscale(factor)

    def skip_step(self) -> None:
        """A gradient overflowed on some rank, and no rank updates."""
        self.gradients.clear()
        self.num_skipped_steps += 1
        self.events.emit("step skipped")
