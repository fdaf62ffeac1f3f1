"""Gathers and frees Units: starts gathers, waits for them, and records why a Unit must stay gathered.

Called by the runtime, which decides when. Start and wait are separate: a gather that the schedule started early is only waited
for. A Unit must not be freed while its `Use` says that it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm import Transport
from shardwise.engine.offload import Offloading
from shardwise.engine.saved import SavedPlaces
from shardwise.engine.transforms import outside_transforms
from shardwise.observe import EventLog, pause
from shardwise.partition import Unit, UnitState, copy_assigned
from shardwise.schedule import Move, Runner
from shardwise.ticket import Ticket
from shardwise.tiers import SparePages

Entry = tuple[Unit, tuple[int, ...]]
"""A Unit that a module opens, and the slots of it that the module itself holds if the Unit is covered, else ()."""


class Use:
    """The engine's record of why a Unit must stay gathered."""

    __slots__ = ("is_pinned", "is_written", "num_contexts", "num_opened", "passages", "scopes")

    def __init__(self) -> None:
        self.scopes = 0  # running forward calls and open contexts that use the Unit
        self.num_opened = 0  # how often a covered Unit was opened while gradients were recorded
        self.num_contexts = 0  # how many of `scopes` are run.gathered contexts
        self.passages: set[object] = set()  # forward calls whose backward has begun and not ended
        self.is_pinned = False  # a graph holds views instead of Places: gathered until the next optimizer step
        self.is_written = False  # user code has changed gathered values, and they are not in the shards yet

    @property
    def is_needed(self) -> bool:
        """Whether the full vector is needed."""
        return self.scopes > 0 or self.is_pinned or self.is_written or bool(self.passages)


class Gathering:
    """Gathers and frees the Units of one run."""

    def __init__(
        self,
        units: Sequence[Unit],
        transport: Transport,
        offload: Offloading,
        saved: SavedPlaces,
        events: EventLog,
        *,
        prefetch_bytes: int,
        spare_pages: SparePages | None,
    ) -> None:
        """`prefetch_bytes`: how many bytes may be gathered ahead of their use; 0 turns that off."""
        self.units = units
        self.uses = [Use() for _ in units]
        self._transport = transport
        self._offload = offload
        self._saved = saved
        self._events = events
        self._spare_pages = spare_pages
        self._tickets: dict[int, Ticket] = {}  # gathers that were started and not waited for, by Unit
        # Joined Units that no call needs and that are still gathered, because the next block's part may lie in them.
        self._lingering: dict[int, Unit] = {}
        joined = [unit for unit in units if unit.blueprint.joined_paths]
        largest = {(u.dtypes, u.is_trainable): u.full_bytes for u in sorted(joined, key=lambda u: u.full_bytes)}
        self._linger_bytes = sum(largest.values())  # of each kind one, because a block may use parts of all of them
        self._kept: dict[int, Unit] = {}  # freed Units whose memory is kept because user code holds views of it
        self._stall_s = 0.0
        self._step_began = self._events.now()
        self._moves = [Move(unit.index, offload.source_of(unit), "full", unit.full_bytes) for unit in units]
        self.runner = Runner(len(units), prefetch_bytes, self._start_early, self._drop) if prefetch_bytes else None

    def use(self, unit: Unit) -> Use:
        """The record of a Unit."""
        return self.uses[unit.index]

    def are_open(self, entries: Sequence[Entry]) -> bool:
        """Whether running forward calls have gathered all of these Units already."""
        for unit, _ in entries:  # noqa: SIM110  a plain loop: this runs for every module call
            if unit.is_covered or not unit.is_gathered or self.use(unit).scopes == 0:
                return False
        return True

    # -- gather -----------------------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """Gather a Unit, so that its parameters can be used; a gather that was started early is only waited for."""
        with outside_transforms():
            self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        begin = self._events.now()
        index = unit.index
        if self.runner is not None:
            self.runner.use(self._moves[index])
        if index not in self._tickets:
            self._start(unit)
        ticket = self._tickets.pop(index)
        try:
            pause("gather.wait")
            ticket.wait()
        except Exception:
            unit.cancel_gather()
            raise
        except BaseException:
            self._tickets[index] = ticket  # KeyboardInterrupt: the gather goes on, and `gather` or `settle` waits for it later
            raise
        pause("gather.expose")
        unit.expose()
        self._saved.know(unit)
        self._events.emit("gathered", unit.name, since=begin)
        self._events.emit_span("gather", unit.name, ticket.span, "gather")
        if self.runner is not None:
            self._stall_s += self._events.now() - begin
            self.runner.pump()

    def _start(self, unit: Unit) -> None:
        begin = self._events.now()
        full = unit.begin_gather()
        try:
            if unit.blueprint.offloads_shard:
                ticket = self._offload.gather(unit, full, self._transport)
            else:
                ticket = self._transport.gather(unit.index, unit.shard, full)
        except BaseException:
            unit.cancel_gather()
            raise
        self._tickets[unit.index] = ticket
        self._events.emit("gather", unit.name, since=begin)

    def _start_early(self, move: Move) -> bool:
        unit = self.units[move.what]
        if unit.state is not UnitState.SHARDED:
            return False
        self._start(unit)
        return True

    def is_under_way(self, unit: Unit) -> bool:
        """Whether a gather was started and not waited for."""
        return unit.index in self._tickets

    def _drop(self, move: Move) -> None:
        """Discard a gather that was started early, because its Unit was not used."""
        unit, ticket = self.units[move.what], self._tickets.pop(move.what)
        try:
            ticket.wait()
        finally:
            self._events.emit("drop", unit.name)
            unit.cancel_gather()

    def settle(self) -> None:
        """Discard all gathers that were started early, because something other than the expected pass comes next."""
        if self.runner is not None:
            self.runner.stop()
        for index in list(self._tickets):
            self._drop(self._moves[index])
        if self._spare_pages is not None:
            self._spare_pages.drop()

    # -- free -------------------------------------------------------------------------------------------------

    def free_after_call(self, unit: Unit) -> None:
        """Free a Unit that a call or its backward no longer needs. A joined one lingers: the next block may use it too."""
        if not unit.blueprint.joined_paths or unit.is_overlaid or self.use(unit).is_needed or not unit.is_gathered:
            self.free(unit)
            return
        self._lingering.pop(unit.index, None)
        self._lingering[unit.index] = unit
        while sum(other.full_bytes for other in self._lingering.values()) > self._linger_bytes:
            self.free(next(iter(self._lingering.values())))

    def end_forward(self, *, leads_to_backward: bool) -> None:
        """After an outermost forward call: free joined Units, and if no backward follows stop starting gathers early."""
        for unit in list(self._lingering.values()):
            self.free(unit)
        if self.runner is not None and not leads_to_backward:
            self.runner.stop()

    def free(self, unit: Unit) -> None:
        """Free a Unit, unless it is needed or user code has written values that are not in the shards yet."""
        use = self.uses[unit.index]
        self._lingering.pop(unit.index, None)
        if not unit.is_gathered or unit.is_always_full or use.is_needed:
            return
        if unit.may_be_written():
            copy_assigned(unit)
            use.is_written = True  # stays gathered until all ranks reach a point where they can store the change
            return
        self._events.emit("free", unit.name)
        with outside_transforms():
            unit.free()
        if unit.keeps_memory:
            self._kept[unit.index] = unit
        if self.runner is not None and not self._transport.watch.has_failed:
            self.runner.pump()
        if self._spare_pages is not None and not (self.runner is not None and self.runner.expects_more):
            self._spare_pages.drop()

    def free_all(self) -> None:
        """Free every Unit that is not needed."""
        for unit in self.units:
            self.free(unit)

    def discard_kept(self) -> None:
        """Release memory of freed Units that was kept for views of user code, if those are gone."""
        for unit in list(self._kept.values()):
            unit.discard_kept()
            if not unit.keeps_memory:
                del self._kept[unit.index]

    def end_passages(self) -> None:
        """End all passages when a backward is over; not every passage sees its own end."""
        for use in self.uses:
            use.passages.clear()

    def unpin(self, unit: Unit) -> None:
        """Stop keeping a Unit gathered for a graph that saved views of it; autograd raises if that graph is run later."""
        use = self.use(unit)
        if use.is_pinned:
            use.is_pinned = False
            torch.autograd.graph.increment_version(unit.full)

    def uncover(self, unit: Unit) -> None:
        """Make a covered parameter usable by the running call or context."""
        if unit.is_covered:
            unit.uncover()
            self.use(unit).num_opened += torch.is_grad_enabled()

    def cover(self, unit: Unit) -> None:
        """Make a covered parameter look freed, so that a touch is noticed; not inside a run.gathered context."""
        if unit.is_covered and not self.use(unit).num_contexts:
            unit.cover()

    def stall_percent(self) -> int:
        """Percentage of the time since the last call that this rank waited for gathers."""
        now = self._events.now()
        share = 100.0 * self._stall_s / max(now - self._step_began, 1e-9)
        self._stall_s, self._step_began = 0.0, now
        return min(int(share), 255)
