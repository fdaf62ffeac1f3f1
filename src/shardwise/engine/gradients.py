"""From autograd's gradients to gradient shards: reduction, accumulation, what was used, norms.

Called by the runtime. Gradients arrive one parameter at a time; a Unit whose gradients are all there is reduced in an order
that every rank shares, so that ranks meet. At the end of a backward the ranks agree on which parameters anyone used:
unused everywhere means no gradient, unused here counts as zero (`docs/numerics.md`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from shardwise.comm import JoinedSink, JoinedSource, Transport, World
from shardwise.engine.offload import Offloading
from shardwise.engine.stages import Held, Stage
from shardwise.errors import ModelError
from shardwise.observe import EventLog
from shardwise.optim import was_zeroed
from shardwise.partition import Unit, UpdatePiece
from shardwise.ticket import Ticket
from shardwise.tiers import Kind, Ledger, Tier

BUCKET_BYTES = 1 << 20
"""Units whose shards are smaller than this are reduced together: one exchange for many."""
MAX_IN_FLIGHT = 2
"""Reductions under way before the next one waits: bounds the gradients kept alive for them."""
PATIENCE_S = 1.0
"""... but not for ever: a peer that uses nothing in this backward takes part only when both have reached its end."""


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
        offload: Offloading,
    ) -> None:
        self._units = {unit.index: unit for unit in units if unit.is_trainable}
        self._world = world
        self._transport = transport
        self._stage = stage
        self._events = events
        self._ledger = ledger
        self._offload = offload
        self._is_away = offload.grads_are_away
        self._measures = False  # whether power sums are formed before gradients go down: from the first time they are asked for
        self._sums: dict[int, list[torch.Tensor]] = {}  # of gradients that went down, by Unit and piece
        self._tier = Tier.HOST if world.device.type == "cpu" else Tier.DEVICE
        self._arrived: dict[int, dict[int, torch.Tensor]] = {index: {} for index in self._units}
        self._versions: dict[int, dict[int, int]] = {index: {} for index in self._units}  # of what has arrived
        self._order = sorted(self._units, reverse=True)  # last Unit first, until a backward shows the true order
        self._next_order = self._order
        self._buckets = self._fill_buckets(self._order)
        self._position = 0  # the next bucket
        self._completed: dict[int, None] = {}  # in order of completion
        self._launched: set[int] = set()
        self._flying: deque[tuple[Ticket, Sequence[Unit], int]] = deque()
        self._flags = self._number_flags()
        self._held: dict[int, set[int]] = {index: set() for index in self._units}
        self.is_scaled = False
        """Whether gradients are multiplied by a loss scale that the run's GradScaler has yet to divide out."""

    def _number_flags(self) -> dict[tuple[int, int], int]:
        slots = [(unit.index, slot) for unit in self._units.values() for slot in range(len(unit.params))]
        return {key: position for position, key in enumerate(slots)}

    def add(self, unit: Unit) -> None:
        """A Unit has become trainable; not during a backward."""
        self._units[unit.index] = unit
        self._units = dict(sorted(self._units.items()))
        self._arrived[unit.index], self._versions[unit.index], self._held[unit.index] = {}, {}, set()
        self._order = self._next_order = [*self._order, unit.index]
        self._buckets = self._fill_buckets(self._order)
        self._flags = self._number_flags()

    # -- during backward --------------------------------------------------------------------------------------

    def arrive(self, unit: Unit, slot: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient; a complete Unit is reduced as soon as it is its turn."""
        arrived = self._arrived[unit.index]
        if slot in arrived:  # a nested backward contributes again: sum locally, as autograd does
            grad = arrived[slot] + grad
        else:
            self._ledger.take(self._tier, Kind.GRAD, _num_bytes(grad))
        arrived[slot] = grad
        self._versions[unit.index][slot] = grad._version
        if len(arrived) == len(unit.params) and unit.index not in self._launched:
            self._completed[unit.index] = None
            self._launch_ready()

    def _fill_buckets(self, order: Sequence[int]) -> list[list[Unit]]:
        """Units in order, small ones together as long as they travel in one dtype. The same on every rank."""
        buckets: list[list[Unit]] = []
        held_bytes = BUCKET_BYTES
        for unit in (self._units[index] for index in order):
            num_bytes = unit.layout.shard_numel * unit.dtypes.master.itemsize
            if held_bytes + num_bytes > BUCKET_BYTES or buckets[-1][0].dtypes != unit.dtypes:
                buckets.append([])
                held_bytes = 0
            buckets[-1].append(unit)
            held_bytes += num_bytes
        return buckets

    def _was_zeroed(self, piece: UpdatePiece) -> bool:
        """Whether `zero_grad(set_to_none=False)` wrote zeros to what stands for a gradient on disk."""
        return self._is_away and was_zeroed(piece)

    def _launch_ready(self) -> None:
        while self._position < len(self._buckets):
            for unit in self._buckets[self._position]:
                if len(self._arrived[unit.index]) < len(unit.params):
                    return
            self._launch(self._buckets[self._position])
            self._position += 1

    def _launch(self, bucket: Sequence[Unit], *, adds: bool = False) -> None:
        is_bounded = self._stage.grads is Held.SHARD or self._is_away
        while is_bounded and len(self._flying) >= MAX_IN_FLIGHT and self._flying[0][0].is_done_within(PATIENCE_S):
            self._land()
        while self._flying and self._flying[0][0].is_done_within(0.0):
            self._land()
        num_bytes = sum(_num_bytes(grad) for unit in bucket for grad in self._arrived[unit.index].values())
        try:
            ticket = self._start(bucket, adds)
        except BaseException:
            self._ledger.give(self._tier, Kind.GRAD, num_bytes)
            for unit in bucket if self._is_away else ():
                self._offload.drop_grad(unit)
            raise
        self._flying.append((ticket, bucket, num_bytes))

    def _start(self, bucket: Sequence[Unit], adds: bool) -> Ticket:
        sources, sinks = [], []
        for unit in bucket:
            arrived, self._arrived[unit.index] = self._arrived[unit.index], {}
            self._launched.add(unit.index)
            self._events.emit("reduce", unit.name)
            source = _LocalGrad(unit, arrived, self._versions[unit.index])
            self._versions[unit.index] = {}
            sources.append(source)
            held = {p.piece.slot_index for p in unit.pieces if adds or (p.grad is not None and not self._was_zeroed(p))}
            ready = self._offload.lend_grad(unit, accumulates=bool(held)) if self._is_away else None
            sinks.append(_GradShard(unit, self._world.world_size, held, ready, source.check))
        lengths = [unit.layout.shard_numel for unit in bucket]
        first = bucket[0]
        return self._transport.reduce(
            first.index,
            sum(lengths),
            first.dtypes.reduce,
            sources[0] if len(bucket) == 1 else JoinedSource(sources, lengths),
            sinks[0] if len(bucket) == 1 else JoinedSink(sinks, lengths),
        )

    def _land(self) -> None:
        """Wait for the oldest reduction; the local gradients it held are gone then."""
        ticket, bucket, num_bytes = self._flying.popleft()
        begin = time.perf_counter()
        try:
            ticket.wait()
            if self._is_away:
                for unit in bucket:
                    self._send_down(unit)
        finally:
            for unit in bucket if self._is_away else ():
                self._offload.drop_grad(unit)
            self._events.emit("reduced", bucket[0].name, since=begin)
            self._events.emit_span("reduce", bucket[0].name, ticket.span, "exchange")
            self._ledger.give(self._tier, Kind.GRAD, num_bytes)

    def _send_down(self, unit: Unit) -> None:
        """A reduced gradient leaves for its tier; what clipping will ask about it is found out on the way."""
        if self._measures:
            assert unit.grad is not None
            self._sums[unit.index] = [_power_sum(unit.grad[p.piece.shard_start :][: p.piece.numel], 2.0) for p in unit.pieces]
        else:
            self._sums.pop(unit.index, None)
        self._offload.evict_grad(unit)

    # -- at the end of backward -------------------------------------------------------------------------------

    def finish(self, stall_percent: int, asked: Sequence[bool] = ()) -> tuple[int, list[bool], bool]:
        """Reduce what is left, agree on what was used, and hand gradients to the optimizer's pieces.

        Ranks also agree on how much they stalled in this step, 0 to 255 percent, and on further questions: returns the largest
        stall, which of `asked` any rank has answered with True, and whether any rank has a gradient.

        A rank that has any gradient reduces every Unit, with zeros for what it did not use, before it asks the others what
        they used: a peer may be waiting for exactly that Unit in the middle of its own backward.
        """
        has_any = bool(self._launched) or any(self._arrived.values())
        used_here = [i in self._launched or s in self._arrived[i] for i, s in self._flags]
        if has_any:
            self._launch_rest()
        used, late, anyone_has_any, stall_percent, answers = self._agree(used_here, has_any, stall_percent, asked)
        if anyone_has_any:
            self._launch_rest()
        while late and self._is_away and self._flying:
            self._land()  # a Unit's gradient is lent once at a time
        for index in late:
            self._launch([self._units[index]], adds=True)
        while self._flying:
            self._land()
        self._offload.settle()
        for unit in self._units.values():
            self._hand_over(unit, used)
        self._reset()
        return stall_percent, answers, anyone_has_any

    def _launch_rest(self) -> None:
        for bucket in self._buckets[self._position :]:
            self._launch(bucket)
        self._position = len(self._buckets)

    def _agree(
        self, used_here: list[bool], has_any: bool, stall_percent: int, asked: Sequence[bool]
    ) -> tuple[list[bool], list[int], bool, int, list[bool]]:
        """What any rank used, which reduced Units received more since (nested backwards), the next order, the largest stall."""
        late = [i in self._launched and bool(self._arrived[i]) for i in self._units]
        order = [*self._completed, *(i for i in self._order if i not in self._completed)]
        is_new = self._world.rank == 0 and order != self._order
        flags = [*asked, *used_here, *late, stall_percent, has_any, is_new]
        answers = self._transport.combine(
            torch.tensor(flags, dtype=torch.uint8, device=self._world.device), dist.ReduceOp.MAX
        ).tolist()
        found = answers[len(asked) :]
        if found[-1]:
            shared = torch.tensor(order, dtype=torch.int64, device=self._world.device)
            self._next_order = self._transport.from_first(shared).tolist()
        else:
            self._next_order = self._order
        late_flags = found[len(used_here) : len(used_here) + len(late)]
        return (
            [bool(flag) for flag in found[: len(used_here)]],
            [i for i, is_late in zip(self._units, late_flags, strict=True) if is_late],
            bool(found[-2]),
            found[-3],
            [bool(answer) for answer in answers[: len(asked)]],
        )

    def _hand_over(self, unit: Unit, used: list[bool]) -> None:
        slots = {slot for slot in range(len(unit.params)) if used[self._flags[unit.index, slot]]}
        if not slots:
            return
        self._held[unit.index] |= slots
        if self._is_away:
            for piece in unit.pieces:
                if piece.piece.slot_index in slots and (piece.grad is None or self._was_zeroed(piece)):
                    piece.set_grad(torch.zeros((), dtype=piece.master.dtype, device=unit.device).expand(piece.piece.numel))
            return
        grad = unit.grad_memory()
        if self._stage.gathers_grads:
            own = unit.rank * unit.layout.shard_numel
            self._transport.gather(unit.index, grad[own : own + unit.layout.shard_numel], grad).wait()
        for piece in unit.pieces:
            if piece.piece.slot_index in slots and piece.grad is None:
                start = piece.piece.shard_start
                piece.set_grad(grad[start : start + piece.piece.numel])

    def abandon(self) -> None:
        """Forget a backward that raised in its middle.

        What it had already added to accumulated gradients stays, as autograd's own partial gradients would.
        """
        failed: Exception | None = None
        while self._flying:
            try:
                self._land()
            except Exception as error:
                failed = failed or error
        for arrived in self._arrived.values():
            self._ledger.give(self._tier, Kind.GRAD, sum(_num_bytes(grad) for grad in arrived.values()))
            arrived.clear()
        self._next_order = self._order
        self._reset()
        try:
            self._offload.settle()
        except Exception as error:
            failed = failed or error
        if failed is not None:
            raise failed

    def _reset(self) -> None:
        if self._next_order != self._order:
            self._order = self._next_order
            self._buckets = self._fill_buckets(self._order)
        self._position = 0
        self._completed = {}
        self._launched = set()

    # -- between backward and step ----------------------------------------------------------------------------

    def norm(self, norm_type: float) -> torch.Tensor:
        """The norm of the whole reduced gradient, the same on every rank, formed in fp64 and rounded to fp32.

        Squares of fp32 values are exact in fp64 and their sum is good to about 1e-15, so the order of summation, and with it
        the partition, shows in the rounded result only by rare chance (`docs/numerics.md` says how rare).
        """
        is_shared = self._stage.states is Held.SHARD
        total = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        if norm_type == float("inf"):
            for _, grad in self._each_grad():
                if grad.numel():
                    total = torch.maximum(total, grad.abs().amax().double().reshape(1))
            if is_shared:
                total = self._transport.combine(total, dist.ReduceOp.MAX)
            return total.to(torch.float32).squeeze(0)
        for part in self._power_sums(norm_type):
            total += part
        if is_shared:
            total = self._transport.combine(total, dist.ReduceOp.SUM)
        return total.pow(1.0 / norm_type).to(torch.float32).squeeze(0)

    def _each_grad(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(flag, reduced gradient of a piece) of everything that has one, in order; what is away comes up Unit by Unit."""
        for unit in self._units.values():
            if any(p.grad is not None for p in unit.pieces):
                with self._offload.resident_grad(unit) as whole:
                    for p in unit.pieces:
                        if p.grad is not None and not self._was_zeroed(p):
                            start = p.piece.shard_start
                            grad = p.grad if whole is None or not self._is_away else whole[start : start + p.piece.numel]
                            yield self._flags[unit.index, p.piece.slot_index], grad

    def _power_sums(self, power: float) -> Iterator[torch.Tensor]:
        """Of every piece that has a gradient, in order."""
        has_all = all(i in self._sums for i, unit in self._units.items() if any(p.grad is not None for p in unit.pieces))
        if not (self._is_away and power == 2.0 and has_all and not self._offload.grad_factors):
            self._measures = self._is_away
            for _, grad in self._each_grad():
                yield _power_sum(grad, power)
            return
        for index, unit in self._units.items():
            for number, piece in enumerate(unit.pieces):
                if piece.grad is not None and not was_zeroed(piece):
                    yield self._sums[index][number]

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply every reduced gradient by one number; those that are away when they come up."""
        if self._is_away:
            for index, unit in self._units.items():
                if any(piece.grad is not None for piece in unit.pieces):
                    self._offload.grad_factors.setdefault(index, []).append(factor.item())
            return
        for unit in self._units.values():
            for piece in unit.pieces:
                if piece.grad is not None:
                    piece.grad.mul_(factor.to(piece.grad.dtype))

    def non_finite(self) -> list[str]:
        """Names of parameters with an infinite or NaN gradient on any rank, the same list on every rank."""
        flags = torch.zeros(max(len(self._flags), 1), dtype=torch.uint8, device=self._world.device)
        for flag, grad in self._each_grad():
            if not bool(torch.isfinite(grad).all()):
                flags[flag] = 1
        found = self._transport.combine(flags, dist.ReduceOp.MAX).tolist()
        return [self._units[i].layout.slots[s].name for (i, s), position in self._flags.items() if found[position]]

    def is_finite(self) -> bool:
        """Whether every gradient on every rank is finite, by one small reduction."""
        bad = torch.zeros(1, dtype=torch.uint8, device=self._world.device)
        for part in self._power_sums(2.0):
            if not bool(torch.isfinite(part)):  # in fp64 a sum of squares of fp32 values is finite exactly if all of them are
                bad[0] = 1
        return not bool(self._transport.combine(bad, dist.ReduceOp.MAX).item())

    def holds(self, unit: Unit, slot: int) -> bool:
        """Whether a parameter has a reduced gradient, also if this rank owns no piece of it."""
        return slot in self._held.get(unit.index, ())

    def held_slots(self, unit: Unit) -> set[int]:
        """Parameters of a Unit that have a reduced gradient, the same on every rank."""
        return self._held[unit.index]

    def clear(self, slots: Collection[tuple[int, int]] | None = None, *, set_to_none: bool = True) -> None:
        """What `zero_grad()` does: drop or zero the reduced gradients of these (Unit, slot) parameters, by default of all."""
        for index, unit in self._units.items():
            chosen = {slot for slot in self._held[index] if slots is None or (index, slot) in slots}
            for piece in unit.pieces:
                if piece.piece.slot_index in chosen and piece.grad is not None:
                    if set_to_none:
                        piece.set_grad(None)
                    else:
                        piece.grad.zero_()
            if set_to_none:
                self._held[index] -= chosen
                if not self._held[index]:
                    unit.renew_grad()
        self.is_scaled &= any(self._held.values())

    def drop(self, unit: Unit, slot: int) -> None:
        """Drop one parameter's reduced gradient."""
        for piece in unit.pieces:
            if piece.piece.slot_index == slot:
                piece.set_grad(None)
        self._held[unit.index].discard(slot)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _LocalGrad:
    """The gradient of one backward on this rank, as the flat vector of its Unit; what was not used counts as zero."""

    def __init__(self, unit: Unit, grads: dict[int, torch.Tensor], versions: dict[int, int]) -> None:
        """`versions`: of the gradients when they arrived."""
        self._layout = unit.layout
        self._grads = grads
        self._versions = versions

    def check(self) -> None:
        """Refuse gradients that were changed after autograd had handed them over."""
        for slot, grad in self._grads.items():
            if grad._version != self._versions[slot]:
                raise ModelError(
                    f"the gradient of parameter {self._layout.slots[slot].name!r} was changed in place after autograd had handed "
                    "it over: a custom Function's backward, or a hook, changes a gradient that it shares with this parameter. "
                    "Return a new tensor there instead (`grad * 2`, not `grad.mul_(2)`)."
                )

    def __call__(self, start: int, out: torch.Tensor) -> None:
        """Copy a range, whatever it spans."""
        for slot, at, run_start, numel in self._layout.cover(start, start + out.numel()):
            part = out[run_start : run_start + numel]
            grad = None if slot is None else self._grads.get(slot)
            if slot is None or grad is None:
                part.zero_()
            else:
                _read_flat(grad, self._layout.slots[slot].stride, at, part)

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        """A range inside one gradient that autograd laid out like its parameter."""
        slot, at, _, length = next(iter(self._layout.cover(start, start + numel)))
        grad = None if slot is None else self._grads.get(slot)
        if slot is None or grad is None or length < numel or grad.stride() != self._layout.slots[slot].stride:
            return None
        return grad.as_strided((grad.numel(),), (1,))[at : at + numel]


class _GradShard:
    """This rank's slice of a Unit's reduced gradient: a slot without one is overwritten, one that has one accumulates."""

    def __init__(self, unit: Unit, divisor: float, held: set[int], ready: Ticket | None, check: Callable[[], None]) -> None:
        """Slots in `held` accumulate; what they had before is there when `ready` has ended. `check` is called last."""
        grad = unit.grad_memory()
        self._ready = ready
        self._layout = unit.layout
        self._own = unit.rank * unit.layout.shard_numel
        self._mine = grad[self._own - unit.span.start : self._own - unit.span.start + unit.layout.shard_numel]
        self._held = held
        self._is_all_held = len(self._held) == len(unit.pieces)
        self._divisor = divisor
        self._check = check

    def place(self, start: int, numel: int) -> torch.Tensor | None:
        """Where nothing is held yet the sum may be formed in the gradient itself."""
        return None if self._held else self._mine[start : start + numel]

    def __call__(self, start: int, total: torch.Tensor) -> None:
        """Average, and keep or accumulate."""
        if start + total.numel() == self._mine.numel():
            self._check()
        if self._divisor != 1.0:
            total.div_(self._divisor)
        if self._ready is not None:
            self._ready.wait()
            self._ready = None
        stop = start + total.numel()
        target = self._mine[start:stop]
        if target.data_ptr() == total.data_ptr():
            return
        if not self._held:
            target.copy_(total)
        elif self._is_all_held:
            target.add_(total)
        else:
            for slot, _, at, numel in self._layout.cover(self._own + start, self._own + stop):
                if slot in self._held:
                    target[at : at + numel].add_(total[at : at + numel])
                else:
                    target[at : at + numel].copy_(total[at : at + numel])


def _read_flat(grad: torch.Tensor, stride: tuple[int, ...], at: int, out: torch.Tensor) -> None:
    """Copy elements [at, at + len(out)) of a gradient, in the storage order of a parameter with `stride`."""
    if grad.stride() == stride:
        out.copy_(grad.as_strided((grad.numel(),), (1,))[at : at + out.numel()])
        return
    # Autograd laid it out otherwise (a transposed product, an expanded sum): read whole rows around the range,
    # never a dense copy of the whole gradient.
    rows = grad.permute(sorted(range(grad.dim()), key=lambda dim: stride[dim], reverse=True))
    row_numel = max(grad.numel() // rows.shape[0], 1)
    first = at // row_numel
    last = -(-(at + out.numel()) // row_numel)
    block = rows[first:last].reshape(-1)
    out.copy_(block[at - first * row_numel : at - first * row_numel + out.numel()])


def _power_sum(values: torch.Tensor, power: float, chunk: int = 1 << 18) -> torch.Tensor:
    """Sum of |x|^power in fp64, through a buffer of constant size."""
    total = torch.zeros(1, dtype=torch.float64, device=values.device)
    for part in values.split(chunk):
        wide = part.double()
        total += torch.dot(wide, wide) if power == 2.0 else wide.abs().pow(power).sum()
    return total
