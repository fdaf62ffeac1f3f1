"""Reduces the gradients of a backward into gradient shards, and agrees over ranks on which parameters were used.

Called by the runtime. Gradients arrive one parameter at a time. A Unit whose gradients have all arrived is reduced, in an order
that all ranks share, because a reduction needs every rank. A parameter that no rank used in a backward gets no gradient; if
only some ranks used it, the gradient of the others counts as zero (`docs/numerics.md`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from shardwise.comm import BucketSink, BucketSource, Transport, World
from shardwise.engine.accumulated import Accumulated
from shardwise.engine.arrivals import Arrived
from shardwise.engine.grad_home import GradHome
from shardwise.engine.lookups import Rows
from shardwise.engine.reduction import GradShard, LocalGrad
from shardwise.engine.refusals import check_unchanged
from shardwise.observe import EventLog
from shardwise.partition import Unit, fill_buckets
from shardwise.stages import Held, Stage
from shardwise.ticket import Ticket
from shardwise.tiers import Kind, Ledger, device_tier

MAX_IN_FLIGHT = 2
"""How many reductions may run before the next one waits. This bounds the local gradients that are kept alive for them."""
PATIENCE_S = 1.0
"""Seconds that it waits at most, because a rank that uses nothing in this backward joins reductions only at its end."""


class Gradients:
    """The gradients of all trainable Units, during one backward and until the next step."""

    def __init__(
        self,
        units: Sequence[Unit],
        world: World,
        transport: Transport,
        stage: Stage,
        events: EventLog,
        ledger: Ledger,
        home: GradHome,
    ) -> None:
        self.units = {unit.index: unit for unit in units if unit.is_trainable}
        self.home = home
        self._world = world
        self._transport = transport
        self._stage = stage
        self._events = events
        self._ledger = ledger
        self._tier = device_tier(world.device)
        self._is_bounded = stage.grads is Held.SHARD or home.is_offloaded
        self._arrived: dict[int, dict[int, torch.Tensor]] = {index: {} for index in self.units}
        self._versions: dict[int, dict[int, int]] = {index: {} for index in self.units}  # tensor versions of `_arrived`
        self._rows: dict[int, list[Rows]] = {}  # rows of tables whose dense gradients are made when they are reduced
        self._order = self._first_order()
        self._next_order = self._order
        self._buckets = self._make_buckets()
        self._position = 0  # the next bucket to reduce
        self._completed: dict[int, None] = {}  # Units whose gradients have all arrived, in that order
        self._launched: set[int] = set()
        self._in_flight: deque[tuple[Ticket, Sequence[Unit], int]] = deque()
        self._flags = self._number_flags()
        self._held: dict[int, set[int]] = {index: set() for index in self.units}
        self.accumulated = Accumulated(ledger, world.device)
        """Sums of backwards inside `run.accumulating()`."""
        self.is_scaled = False
        """Whether gradients are still multiplied by the loss scale."""

    def _first_order(self) -> list[int]:
        """Last Unit first, until a backward shows the true order; before them tiles of a head that is tied to an embedding."""
        tied = [index for index, unit in self.units.items() if unit.blueprint.tile_of and unit.blueprint.shared_numel]
        return [*reversed(tied), *(index for index in sorted(self.units, reverse=True) if index not in tied)]

    def _number_flags(self) -> dict[tuple[int, int], int]:
        slots = [(unit.index, slot) for unit in self.units.values() for slot in range(len(unit.params))]
        return {key: position for position, key in enumerate(slots)}

    def _make_buckets(self) -> list[list[Unit]]:
        """Group Units into buckets; the same on every rank."""
        units = [self.units[index] for index in self._order]
        shard_bytes = [unit.layout.shard_numel * unit.dtypes.master.itemsize for unit in units]
        return [[units[at] for at in bucket] for bucket in fill_buckets(shard_bytes, [unit.dtypes for unit in units])]

    def add(self, unit: Unit) -> None:
        """Add a Unit that has become trainable. Must not be called during a backward."""
        self.units[unit.index] = unit
        in_order = sorted(self.units.items())
        self.units.clear()
        self.units.update(in_order)
        self._arrived[unit.index], self._versions[unit.index], self._held[unit.index] = {}, {}, set()
        self._order = self._next_order = [*self._order, unit.index]
        self._buckets = self._make_buckets()
        self._flags = self._number_flags()

    # -- during backward --------------------------------------------------------------------------------------

    def arrive(self, unit: Unit, entries: Sequence[Arrived]) -> None:
        """Receive gradients of a Unit; start the buckets that are complete and next in order."""
        index = unit.index
        arrived = self._arrived[index]
        for slot, grad, version in entries:
            check_unchanged(unit.layout.slots[slot].name, grad, version)
            if self.accumulated.is_open:
                self.accumulated.add(unit, slot, grad)
                continue
            if slot in arrived:  # a nested backward contributes again: sum locally, as autograd does
                grad = arrived[slot] + grad
            elif (earlier := self.accumulated.take(index, slot)) is not None:
                grad = earlier.add_(grad)
            else:
                self._ledger.reserve(self._tier, Kind.GRAD, grad.nbytes)
            arrived[slot] = grad
            self._versions[index][slot] = grad._version
        self._complete(unit)

    def arrive_rows(self, unit: Unit, rows: Rows) -> None:
        """Receive rows of a tile's gradient; they become a dense one when it is reduced."""
        self._rows.setdefault(unit.index, []).append(rows)
        self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        if self._is_complete(unit) and unit.index not in self._launched:
            self._completed[unit.index] = None
            self._launch_ready()

    def _is_complete(self, unit: Unit) -> bool:
        return len(self._arrived[unit.index]) == len(unit.params) or unit.index in self._rows

    def _launch_ready(self) -> None:
        while self._position < len(self._buckets):
            for unit in self._buckets[self._position]:
                if not self._is_complete(unit):
                    return
            self._launch(self._buckets[self._position])
            self._position += 1

    def _launch(self, bucket: Sequence[Unit], *, adds: bool = False) -> None:
        while self._is_bounded and len(self._in_flight) >= MAX_IN_FLIGHT and self._in_flight[0][0].is_done_within(PATIENCE_S):
            self._finish_oldest()
        while self._in_flight and self._in_flight[0][0].is_done_within(0.0):
            self._finish_oldest()
        sources = [self._take_arrived(unit) for unit in bucket]
        num_bytes = sum(source.num_bytes for source in sources)
        try:
            ticket = self._start(bucket, sources, adds)
        except BaseException:
            self._ledger.release(self._tier, Kind.GRAD, num_bytes)
            for unit in bucket:
                self.home.cancel(unit)
            raise
        self._in_flight.append((ticket, bucket, num_bytes))

    def _take_arrived(self, unit: Unit) -> LocalGrad:
        arrived, self._arrived[unit.index] = self._arrived[unit.index], {}
        versions, self._versions[unit.index] = self._versions[unit.index], {}
        for slot, grad in self.accumulated.take_rest(unit.index).items():  # this backward has not used these parameters
            arrived[slot], versions[slot] = grad, grad._version
        if unit.index in self._rows:
            arrived[0] = self._with_rows(unit, arrived.get(0))
            versions[0] = arrived[0]._version
        self._launched.add(unit.index)
        return LocalGrad(unit, arrived, versions)

    def _with_rows(self, unit: Unit, grad: torch.Tensor | None) -> torch.Tensor:
        """A tile's local gradient: what has arrived of it, and its rows."""
        first, *others = self._rows.pop(unit.index)
        if grad is None:
            found = first.dense().to(unit.dtypes.compute)
            self._ledger.reserve(self._tier, Kind.GRAD, found.nbytes)
        else:
            found, others = grad.clone(), [first, *others]  # autograd or user code may hold what has arrived
        for rows in others:
            rows.add_to(found)
        return found

    def _start(self, bucket: Sequence[Unit], sources: Sequence[LocalGrad], adds: bool) -> Ticket:
        sinks = []
        for unit, source in zip(bucket, sources, strict=True):
            self._events.emit("reduce", unit.name)
            held = {piece.slot for piece in unit.pieces} if adds else self.home.held_slots(unit)
            grad, ready = self.home.begin(unit, accumulates=bool(held))
            sinks.append(GradShard(unit, grad, self._world.everyone.size, held, ready, source.check))
        lengths = [unit.layout.shard_numel for unit in bucket]
        first = bucket[0]
        return self._transport.reduce(
            first.index,
            sum(lengths),
            first.dtypes.reduce,
            sources[0] if len(bucket) == 1 else BucketSource(sources, lengths),
            sinks[0] if len(bucket) == 1 else BucketSink(sinks, lengths),
        )

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction and release its local gradients."""
        ticket, bucket, num_bytes = self._in_flight.popleft()
        begin = self._events.now()
        try:
            ticket.wait()
            for unit in bucket:
                self.home.end(unit)
        finally:
            for unit in bucket:
                self.home.cancel(unit)
            self._events.emit("reduced", bucket[0].name, since=begin)
            self._events.emit_span("reduce", bucket[0].name, ticket.span, "exchange")
            self._ledger.release(self._tier, Kind.GRAD, num_bytes)

    # -- at the end of backward -------------------------------------------------------------------------------

    def finish(self, stall_percent: int, asked: Sequence[bool] = ()) -> tuple[int, list[bool], bool]:
        """Reduce the remaining Units, agree over ranks on what was used, and set `.grad` of the optimizer's Pieces.

        Returns the largest `stall_percent` of all ranks (0 to 255), which flags in `asked` are True on any rank, and whether any
        rank has a gradient.

        A rank that has any gradient reduces every Unit, with zeros for what it did not use, before it asks what other ranks used:
        another rank may be waiting for that Unit in the middle of its backward.
        """
        has_any = bool(self._launched) or any(self._arrived.values()) or bool(self._rows) or self.accumulated.has_any
        used_here = [
            i in self._launched or s in self._arrived[i] or i in self._rows or self.accumulated.has(i, s) for i, s in self._flags
        ]
        if has_any:
            self._launch_rest()
        used, late, anyone_has_any, stall_percent, answers = self._agree(used_here, has_any, stall_percent, asked)
        self._spread_over_tiles(used)
        if anyone_has_any:
            self._launch_rest()
        while late and self.home.is_offloaded and self._in_flight:
            self._finish_oldest()  # a Unit's buffer cannot be borrowed twice at a time
        for index in late:
            self._launch([self.units[index]], adds=True)
        while self._in_flight:
            self._finish_oldest()
        self.home.settle()
        for unit in self.units.values():
            slots = {slot for slot in range(len(unit.params)) if used[self._flags[unit.index, slot]]}
            if slots:
                self._held[unit.index] |= slots
                self.home.hand_over(unit, slots, self._stage, self._transport)
        self.accumulated.finish()
        self._reset()
        return stall_percent, answers, anyone_has_any

    def _spread_over_tiles(self, used: list[bool]) -> None:
        """A parameter of which any tile was used has a gradient: zeros for its other tiles."""
        tiled: dict[str, list[int]] = {}
        for (index, _), position in self._flags.items():
            if self.units[index].blueprint.tile_of:
                tiled.setdefault(self.units[index].blueprint.tile_of, []).append(position)
        for positions in tiled.values():
            is_used = any(used[position] for position in positions)
            for position in positions:
                used[position] = is_used

    def _launch_rest(self) -> None:
        for bucket in self._buckets[self._position :]:
            self._launch(bucket)
        self._position = len(self._buckets)

    def _agree(
        self, used_here: list[bool], has_any: bool, stall_percent: int, asked: Sequence[bool]
    ) -> tuple[list[bool], list[int], bool, int, list[bool]]:
        """All-reduce: used slots, Units with gradients after their reduction (nested backwards), any gradient, stall, `asked`."""
        late = [i in self._launched and (bool(self._arrived[i]) or i in self._rows) for i in self.units]
        order = [*self._completed, *(i for i in self._order if i not in self._completed)]
        is_new = self._world.rank == 0 and order != self._order
        flags = [*asked, *used_here, *late, stall_percent, has_any, is_new]
        answers = self._transport.all_reduce(
            torch.tensor(flags, dtype=torch.uint8, device=self._world.device), dist.ReduceOp.MAX
        ).tolist()
        found = answers[len(asked) :]
        if found[-1]:
            shared = torch.tensor(order, dtype=torch.int64, device=self._world.device)
            self._next_order = self._transport.broadcast(shared).tolist()
        else:
            self._next_order = self._order
        late_flags = found[len(used_here) : len(used_here) + len(late)]
        return (
            [bool(flag) for flag in found[: len(used_here)]],
            [i for i, is_late in zip(self.units, late_flags, strict=True) if is_late],
            bool(found[-2]),
            found[-3],
            [bool(answer) for answer in answers[: len(asked)]],
        )

    def abandon(self) -> None:
        """Drop the gradients of a backward that raised.

        What it has already added to reduced gradients stays, as with `.grad` in plain autograd.
        """
        failed: Exception | None = None
        while self._in_flight:
            try:
                self._finish_oldest()
            except Exception as error:
                failed = failed or error
        num_bytes = sum(grad.nbytes for arrived in self._arrived.values() for grad in arrived.values())
        for arrived in self._arrived.values():
            arrived.clear()
        self._rows.clear()
        self._ledger.release(self._tier, Kind.GRAD, num_bytes)
        self.accumulated.abandon()
        self._next_order = self._order
        self._reset()
        try:
            self.home.settle()
        except Exception as error:
            failed = failed or error
        if failed is not None:
            raise failed

    def _reset(self) -> None:
        if self._next_order != self._order:
            self._order = self._next_order
            self._buckets = self._make_buckets()
        self._position = 0
        self._completed = {}
        self._launched = set()

    # -- between backward and step ----------------------------------------------------------------------------

    def holds(self, unit: Unit, slot: int) -> bool:
        """Whether a parameter has a reduced gradient, even if this rank owns no Piece of it."""
        return slot in self._held.get(unit.index, ())

    def held_slots(self, unit: Unit) -> set[int]:
        """Parameters of a Unit that have a reduced gradient, the same on every rank."""
        return self._held[unit.index]

    def clear(self, slots: Collection[tuple[int, int]] | None = None, *, set_to_none: bool = True) -> None:
        """What `zero_grad()` does: drop or zero the reduced gradients of these (Unit, slot) parameters, by default of all."""
        self.accumulated.clear(lambda index, slot: slots is None or (index, slot) in slots, set_to_none=set_to_none)
        self.accumulated.begin_afresh()
        for index, unit in self.units.items():
            chosen = {slot for slot in self._held[index] if slots is None or (index, slot) in slots}
            for piece in unit.pieces:
                if piece.slot in chosen and piece.grad is not None:
                    if set_to_none:
                        piece.set_grad(None)
                    else:
                        piece.grad.zero_()
            if set_to_none:
                self._held[index] -= chosen
                if not self._held[index]:
                    self.home.forget(unit)
        self.is_scaled &= any(self._held.values())

    def drop(self, unit: Unit, slot: int) -> None:
        """Drop one parameter's gradient."""
        self.accumulated.clear(lambda index, number: (index, number) == (unit.index, slot), set_to_none=True)
        for piece in unit.pieces_of(slot):
            piece.set_grad(None)
        self._held[unit.index].discard(slot)
