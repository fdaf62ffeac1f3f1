"""One training step, in the order in which it happens. Read this file first.

    forward   enter -> gather -> (user code) -> leave -> free
    backward  before_backward -> gather -> (autograd) -> gradients arrive -> reduce -> release -> free -> after_backward
    step      before_step -> (user's optimizer) -> after_step -> gather again at stages 1 and 2

Called by the hooks on the model and the optimizer. The runtime decides *when*; `Gathering` gathers and frees, Units own tensors,
the transport moves bytes, `Gradients` reduces. A full vector must not outlive its use, nor be visible before it is filled.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from shardwise.comm import Transport, World
from shardwise.engine.adoption import Adoption
from shardwise.engine.arrivals import Arrivals, Arrived
from shardwise.engine.backward import EndOfBackward, is_inside_autograd
from shardwise.engine.changes import Changes
from shardwise.engine.gathering import Entry, Gathering
from shardwise.engine.gradients import Gradients
from shardwise.engine.lookups import Lookups, Rows
from shardwise.engine.model_buffers import ModelBuffers
from shardwise.engine.nested import tensors_in
from shardwise.engine.norms import Norms
from shardwise.engine.offload import Offloading
from shardwise.engine.outside import Outside
from shardwise.engine.passage import Frame, Passage
from shardwise.engine.refusals import check_expected
from shardwise.engine.saved import Place, SavedPlaces
from shardwise.engine.tiles import Operators, Tiles
from shardwise.engine.transforms import outside_transforms
from shardwise.errors import LifecycleError, OptimizerError, ShardwiseError
from shardwise.observe import EventLog, timed_hook
from shardwise.partition import Unit, UnitState, publish_master
from shardwise.stages import Held, Stage
from shardwise.tiers import Ledger, SparePages, SteadyHeap


class Runtime:
    """Runs the training steps of one model: forward, backward and optimizer step."""

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
        adoption: Adoption,
        needs_scaling: bool,
        prefetch_bytes: int,
        spare_pages: SparePages | None,
        operators: Operators,
    ) -> None:
        """`adoption` knows the optimizer. `needs_scaling`: backward() must be called on a scaled loss. `operators`: what can be
        done to a parameter tile by tile.
        """
        self.units = units
        self.world, self.stage = world, stage
        self.transport = transport
        self.offload = offload
        self.ledger = ledger
        self.needs_scaling = needs_scaling
        self.events = EventLog()
        self.saved = SavedPlaces(self._restore)
        self.gathering = Gathering(
            units, transport, offload, self.saved, self.events, prefetch_bytes=prefetch_bytes, spare_pages=spare_pages
        )
        self.gradients = Gradients(units, world, transport, stage, self.events, ledger, offload.grads)
        self.norms = Norms(self.gradients, world, transport, stage, needs_scaling=needs_scaling)
        self.unscale = self.norms.unscale
        """Multiply all reduced gradients by a factor; returns whether they are finite on all ranks."""
        self.changes = Changes(self.gathering, world, transport, offload)
        self.outside = Outside(self)
        self.tiles = Tiles(self, units, operators)
        self._buffers = buffers
        self._lookups = Lookups(units, self.gathering.uses, self)
        self._arrivals = Arrivals(units, self, self._lookups.tables, self.gradients.accumulated)
        self.adoption = adoption
        self._unfrozen: dict[int, Unit] = {}  # Units to unfreeze when the running backward has ended
        self._keeps_places = stage.params is Held.SHARD and not all(unit.is_overlaid for unit in units)
        self._frames: list[Frame] = []
        self.in_backward = False
        self._end_of_backward: weakref.ref[EndOfBackward] | None = None
        self._is_scaled = False  # whether the running backward started from a scaled loss
        self._update_began = self.events.now()
        self.heap = SteadyHeap(self._release_kept)
        self.stall_percent = 0
        """Percentage of the last step spent waiting for gathers: the largest of all ranks."""
        self.num_steps = self.num_skipped_steps = 0

    @property
    def is_outside(self) -> bool:
        """Whether neither a forward pass, nor a backward, nor a load runs."""
        return not self._frames and not is_inside_autograd() and not self.outside.is_loading

    # -- forward ----------------------------------------------------------------------------------------------

    @timed_hook
    def enter(self, entries: Sequence[Entry], inputs: Any, *, is_root: bool = False, is_lookup: bool = False) -> Any:
        """Gather a module's Units before its forward. Returns the inputs to use instead of the given ones, or None."""
        if self._frames and not is_root and self.gathering.are_open(entries):
            self._frames.append(Frame(entries, None))
            self._keep_places(self._frames[-1])
            return None
        was_interrupted = is_root and any(frame.is_root for frame in self._frames)
        if not is_inside_autograd() and (self.in_backward or self.outside.is_loading or was_interrupted):
            self.start_afresh()  # the last backward, load or forward raised
        if not self._frames and not self.in_backward and not is_inside_autograd():
            self._begin_forward(is_root=is_root)
        passage = Passage(self) if self._keeps_places and torch.is_grad_enabled() else None
        frame = Frame(entries, passage, is_root=is_root, is_lookup=is_lookup)
        self._frames.append(frame)
        for unit, slots in entries:
            self._open(unit, slots, frame)
        self._keep_places(frame)
        return frame.passage.watch(inputs) if frame.passage is not None and frame.units else None

    def _begin_forward(self, *, is_root: bool) -> None:
        """Prepare for an outermost forward call: the model's own (`is_root`) or a submodule's."""
        self.events.emit("forward")
        self.gathering.discard_kept()
        self.tiles.check_copies()
        if is_root:
            self._buffers.before_forward(self.transport)
            self.changes.round()
        if self.gathering.runner is not None:
            self.gathering.runner.begin_forward(is_new=is_root, leads_to_backward=torch.is_grad_enabled())

    def _keep_places(self, frame: Frame) -> None:
        """Until the call ends, have autograd save Places instead of views of parameters that will be freed."""
        if self._keeps_places and torch.is_grad_enabled():
            frame.keep_places(self.saved)

    def _open(self, unit: Unit, slots: Sequence[int], frame: Frame) -> None:
        use = self.gathering.use(unit)
        is_nested = use.scopes > 0 and not unit.is_covered
        use.scopes += 1
        frame.opened.append(unit)
        if unit.is_covered and not slots:
            return  # the modules below that hold the parameter gather it; this call only keeps it from being freed
        if not unit.is_gathered:
            self.gathering.gather(unit)
        self.gathering.uncover(unit)
        if not is_nested and not unit.is_overlaid:
            frame.units.append(unit)

    @timed_hook
    def leave(self, entries: Sequence[Entry], output: Any) -> None:
        """After a module's forward: watch for its backward, then free the Units that nothing else needs."""
        if not self._frames or self._frames[-1].entries is not entries:
            return  # `enter` raised for this call, and torch calls the forward hook anyway (always_call=True)
        frame = self._frames.pop()
        frame.stop_keeping_places()
        if (frame.is_root or not self._frames) and torch.is_grad_enabled():
            for tensor in tensors_in(output):  # ranks whose loss reaches no trainable parameter must take part in backward too
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self.begin_backward)
        if frame.opened:
            self._close(frame, output)
        if not self._frames and not is_inside_autograd():
            self.gathering.end_forward(leads_to_backward=torch.is_grad_enabled())
            self.events.emit("forward end")
            self.tiles.check_copies()

    def _close(self, frame: Frame, output: Any) -> None:
        is_recomputing = is_inside_autograd()  # a checkpoint recomputes: keep Units, their backward comes next
        if frame.is_lookup:  # its backward does not read the table, so that nothing has to be gathered for it
            self._lookups.watch(frame.opened, output)
        elif frame.passage is not None:
            frame.passage.guard(output, frame.units)
        for unit in frame.opened:
            use = self.gathering.use(unit)
            use.scopes -= 1
            use.is_pinned |= frame.is_pinning and not unit.is_overlaid  # the graph holds views instead of Places
            self.gathering.cover(unit)
            if not is_recomputing or unit.is_overlaid or unit.blueprint.tile_of:
                self.gathering.free_after_call(unit)

    def touch(self, units: Sequence[Unit]) -> bool:
        """Gather the touched Units if a forward, a backward or a load runs, and return True; else return False."""
        if self.outside.touch(units):
            return True
        if not self._frames and not is_inside_autograd():
            return False
        for unit in units:
            if unit.state is UnitState.GATHERING and not self.gathering.is_under_way(unit):
                raise LifecycleError(f"Unit {unit.name!r} was touched while it is being gathered: a broken invariant.")
            if self._frames:
                frame = self._frames[-1]
                if frame.passage is None and torch.is_grad_enabled() and not unit.is_overlaid:
                    frame.passage = Passage(self)
                self._open(unit, range(len(unit.params)), frame)
            elif not unit.is_gathered:  # freed at the end of this backward
                self.begin_backward()
                self.gathering.gather(unit)
                self.gathering.uncover(unit)
        return True

    # -- backward ---------------------------------------------------------------------------------------------

    def begin_backward(self, _: torch.Tensor | None = None) -> None:
        """Note, once per backward, that a backward runs, and have autograd call `after_backward` at its end."""
        if self.in_backward and self._end_of_backward is not None and self._end_of_backward() is None:
            self.start_afresh()  # the last backward raised: autograd has dropped the callback that would have ended it
        if not self.in_backward:
            self.in_backward = True
            self.events.emit("backward")
            if self.gathering.runner is not None:
                self.gathering.runner.begin_backward()
            # Runs when autograd has finished this backward, also if it was started by autograd.grad.
            end = EndOfBackward(self.after_backward)
            self._end_of_backward = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def scaled(self) -> None:
        """Note that the running backward started from a scaled loss."""
        self.begin_backward()
        self._is_scaled = True

    @timed_hook
    def before_backward(self, units: Iterable[Unit], passage: Passage) -> None:
        """Gather the Units of a forward call whose backward is about to run."""
        self.begin_backward()
        for unit in units:
            if not unit.is_gathered:
                self.gathering.gather(unit)
            self.gathering.use(unit).passages.add(passage)

    def _restore(self, place: Place) -> torch.Tensor:
        """Return the view that autograd saved as a Place; gather its Unit if it is freed."""
        unit = place.unit
        if not is_inside_autograd():  # user code reads a saved tensor: return a copy, as nothing would free the Unit later
            with self.outside.opened([unit]):
                return place.view().clone()
        self.begin_backward()
        if not unit.is_gathered:
            self.gathering.gather(unit)
        if torch.is_grad_enabled():
            # With create_graph=True the new graph saves this view, and nothing tells when that graph is freed.
            self.gathering.use(unit).is_pinned = True
        return place.view()

    @timed_hook
    def arrive(self, index: int) -> None:
        """Receive the gradients of a Unit from autograd."""
        unit = self.units[index]
        arrived = self._arrivals.take(index)
        if not arrived:
            return
        self._check_arrived(unit, [entry.slot for entry in arrived])
        self.gradients.arrive(unit, arrived)
        if unit.blueprint.tile_of:  # what this backward does with a tile is done when its gradient is there
            self.gathering.use(unit).passages.clear()
            self.gathering.free(unit)

    def _check_arrived(self, unit: Unit, slots: Sequence[int]) -> None:
        check_expected(unit, slots)
        if self.needs_scaling and not self._is_scaled:
            raise OptimizerError(
                "backward() was called on a loss that was not scaled, but this run stores parameters in fp16, where small "
                "gradients would vanish. Call run.scaler.scale(loss).backward()."
            )

    def receive(self, unit: Unit, grad: torch.Tensor | Rows) -> None:
        """Receive a tile's gradient that does not come through autograd's node for the tile: a part of a whole one, or rows."""
        self.begin_backward()
        if not unit.params[0].requires_grad:
            return
        if isinstance(grad, Rows) and not self.gradients.accumulated.is_open:
            self._check_arrived(unit, [0])
            self.gradients.arrive_rows(unit, grad)
            return
        dense = grad.dense() if isinstance(grad, Rows) else grad
        self._check_arrived(unit, [0])
        self.gradients.arrive(unit, [Arrived(0, dense, dense._version)])

    @timed_hook
    def release(self, units: Iterable[Unit], passage: Passage) -> None:
        """After the backward of a forward call: free its Units, unless something else needs them."""
        for unit in units:
            self.gathering.use(unit).passages.discard(passage)
            self.gathering.free_after_call(unit)

    def after_backward(self) -> None:
        """After a backward: reduce the remaining gradients and free all Units that nothing else needs."""
        with outside_transforms():
            self._end_backward(self.events.now())

    def _end_backward(self, begin: float) -> None:
        if self.gathering.runner is not None:
            self.gathering.runner.end_backward()
        self._arrivals.take_strays()
        for index in self._arrivals.rest():
            self.arrive(index)
        is_scaled, self._is_scaled = self.needs_scaling and self._is_scaled, False
        if self.gradients.accumulated.is_open:  # changes are stored after the next backward that reduces
            self.gradients.accumulated.end_backward(is_scaled=is_scaled)
        else:
            self._finish_gradients(is_scaled=is_scaled or self.gradients.accumulated.is_scaled)
        self.in_backward = False
        self.gathering.end_passages()
        self.gathering.free_all()
        for unit in self._unfrozen.values():
            self.unfreeze(unit)
        self._unfrozen.clear()
        self.events.emit("backward end", since=begin)

    def _finish_gradients(self, *, is_scaled: bool) -> None:
        """Finish all reductions, and store the parameters and buffers that any rank has changed since the last backward."""
        written = [use.is_written for use in self.gathering.uses]
        asked = [*written, *self._buffers.changed()]
        self.stall_percent, found, has_grads = self.gradients.finish(self.gathering.stall_percent(), asked)
        self.gradients.is_scaled |= is_scaled and has_grads
        if self.gathering.runner is not None:
            self.gathering.runner.observe(self.stall_percent)
        self.in_backward = False
        self.changes.store(self.changes.chosen(found[: len(written)]))
        self._buffers.broadcast(self.transport, found[len(written) :])

    def reduce(self) -> None:
        """Reduce what was accumulated locally, without another backward. All ranks must call."""
        if self.gradients.accumulated.is_open or self._frames or is_inside_autograd():
            where = "run.accumulating()" if self.gradients.accumulated.is_open else "a forward or backward pass"
            raise ShardwiseError(f"run.reduce() was called inside {where}. Call it after the last backward of the step.")
        if self.in_backward:
            self.start_afresh()  # the last backward raised
        self._finish_gradients(is_scaled=self.gradients.accumulated.is_scaled)
        self.gathering.free_all()

    def unfreeze(self, unit: Unit) -> None:
        """Make a frozen Unit trainable from the next forward on, because a parameter of it was unfrozen."""
        if self.in_backward:
            self._unfrozen[unit.index] = unit
        elif not unit.is_trainable:
            self.adoption.thaw(unit)
            self.gradients.add(unit)

    def start_afresh(self) -> None:
        """Clean up after a forward, backward or load that raised: end what it left open and free Units."""
        was_in_backward, self.in_backward = self.in_backward, False
        self.gathering.settle()
        if was_in_backward:
            self._lookups.abandon()
            self._arrivals.abandon()
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
        """Before `optimizer.step()`: raise if the step would be wrong, free Units, store what user code has changed."""
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
        self.gradients.accumulated.require_reduced("optimizer.step()")
        if self.outside.num_contexts:
            raise ShardwiseError(
                "optimizer.step() was called inside run.gathered(...): the update would be overwritten. Leave the context first."
            )
        if self.in_backward or self._frames or self.outside.is_loading:
            self.start_afresh()
        self.gathering.settle()
        self.tiles.check_copies()
        self._free_for_step()
        self.changes.store_written()  # ranks meet here: from now on none reads the shards that will change
        self.gathering.discard_kept()
        self.offload.before_step(self.changes.agree_on)
        self._update_began = self.events.now()

    def _free_for_step(self) -> None:
        for unit in self.units:
            self.gathering.unpin(unit)
            self.gathering.free(unit)

    def cleared(self, slots: Collection[tuple[int, int]], *, set_to_none: bool) -> None:
        """After `optimizer.zero_grad()`: clear the reduced gradients of the same parameters."""
        self.gradients.clear(slots, set_to_none=set_to_none)

    def after_closure(self) -> None:
        """After the optimizer's closure: store what it has changed; no rank updates before all have ended its forward passes."""
        self.gathering.settle()
        self.changes.store_written()

    def _fence(self) -> None:
        begin = self.events.now()
        self.transport.fence()
        self.events.emit("fence", since=begin)

    def after_step(self) -> None:
        """After `optimizer.step()`: round masters into the shards, and gather again at stages 1 and 2."""
        self.events.emit("update", since=self._update_began)
        self._free_for_step()  # again: a closure may have run a backward
        self.num_steps += 1
        self.transport.watch.step = self.num_steps
        self._publish()
        self.changes.show_new_values()
        self._lookups.begin_afresh()
        self.events.emit("step")
        self.heap.after_step()  # the graph is gone: of all points of a step, this is where the least is in use

    def _release_kept(self) -> None:
        """Free buffers that are only kept for the next step, except pinned ones, which are expensive to make."""
        if not self.offload.mover.is_apart:
            self.ledger.reclaim()

    def _publish(self) -> None:
        """Make changed masters visible to every rank's next forward."""
        updated = {unit: slots for unit in self.units if unit.is_trainable and (slots := self.gradients.held_slots(unit))}
        for unit in updated:
            if unit.is_gathered and not unit.is_always_full:
                raise LifecycleError(f"Unit {unit.name!r} is still gathered after a step: it would keep its old values.")
            if self.offload.step is None:
                publish_master(unit)
        self._fence()  # every rank's shards are updated from here on
        if self.stage.gathers_after_step:
            begin = self.events.now()
            for ticket in [self.transport.gather(unit.index, unit.shard, unit.full) for unit in updated]:
                ticket.wait()
            self._fence()  # every rank has read them: from here on user code may write to full parameters
            self.events.emit("refresh", since=begin)
        for unit, slots in updated.items():
            unit.changed(slots)

    def skip_step(self) -> None:
        """Clear all gradients without an update, because a gradient overflowed on some rank."""
        self.gradients.clear()
        self.num_skipped_steps += 1
        self.events.emit("step skipped")
        self.heap.after_step()
