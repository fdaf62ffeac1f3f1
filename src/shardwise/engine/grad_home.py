"""Where reduced gradients are between backward and step: in memory, or offloaded. The same questions, two answers.

`Gradients` reduces into a home, `Norms` reads from it, the optimizer's pieces get their `.grad` from it. Nobody else asks which
form it has.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from shardwise.comm import Transport
from shardwise.errors import DiskError
from shardwise.optim import Region, was_zeroed
from shardwise.partition import Unit, UpdatePiece
from shardwise.stages import Stage
from shardwise.ticket import Deferred, Ticket
from shardwise.tiers import Buffer, Kind, Ledger, Mover, Shelf, device_tier, whole_quanta

MAX_EVICTIONS = 2
"""Gradient shards that are being evicted before the next reduction waits."""


class GradHome(ABC):
    """The reduced gradient of every trainable Unit: a vector as long as its span, in the master dtype."""

    is_offloaded: bool
    """Whether gradients pass through buffers, so that few reductions may run at a time."""

    @abstractmethod
    def begin(self, unit: Unit, *, accumulates: bool) -> tuple[torch.Tensor, Ticket | None]:
        """Memory to form a Unit's reduced gradient in. If it accumulates, earlier values are there when the Ticket has ended."""

    @abstractmethod
    def end(self, unit: Unit) -> None:
        """The reduction has ended: the gradient may leave for where it is kept."""

    @abstractmethod
    def cancel(self, unit: Unit) -> None:
        """The reduction failed, or has ended before: return what `begin` borrowed. What was kept before stays."""

    @abstractmethod
    def hand_over(self, unit: Unit, slots: Collection[int], stage: Stage, transport: Transport) -> None:
        """Give the optimizer's pieces of these parameters their gradients."""

    def held_slots(self, unit: Unit) -> set[int]:
        """Parameters with a piece here whose gradient the next one is added to."""
        return {piece.slot for piece, grad in zip(unit.pieces, unit.grads(), strict=True) if self._holds(grad)}

    @abstractmethod
    def _holds(self, grad: torch.Tensor | None) -> bool:
        """Whether what a piece has as its gradient is added to."""

    @abstractmethod
    def on_device(self, unit: Unit) -> contextlib.AbstractContextManager[torch.Tensor]:
        """A Unit's reduced gradient for reading, scaled as the step will see it."""

    @abstractmethod
    def scale(self, units: Iterable[Unit], factor: torch.Tensor) -> None:
        """Multiply every gradient by one number."""

    @abstractmethod
    def power_sums(self, units: Mapping[int, Unit], power: float) -> Iterator[torch.Tensor]:
        """Sum of |x|^power in fp64 of every piece that has a gradient, in order."""

    @abstractmethod
    def settle(self) -> None:
        """Return when no gradient is on its way."""

    @abstractmethod
    def show(self, unit: Unit) -> torch.Tensor | None:
        """The vector itself, for user code, if it is in memory."""

    @abstractmethod
    def forget(self, unit: Unit) -> None:
        """No parameter of a Unit has a gradient any more."""

    def each(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, UpdatePiece, torch.Tensor]]:
        """(Unit, piece, gradient) of everything that has one, in order; one Unit at a time is on the device."""
        for unit in units:
            held = self.held_slots(unit)
            if held:
                with self.on_device(unit) as whole:
                    for piece in unit.pieces:
                        if piece.slot in held:
                            yield unit, piece, whole[piece.range]


class GradsInMemory(GradHome):
    """A vector per Unit, made on first use and kept."""

    is_offloaded = False

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._vectors: dict[int, torch.Tensor] = {}
        self._shown: set[int] = set()  # user code has been given a view

    def begin(self, unit: Unit, *, accumulates: bool) -> tuple[torch.Tensor, Ticket | None]:
        """The vector itself."""
        return self._vector(unit), None

    def _vector(self, unit: Unit) -> torch.Tensor:
        if unit.index not in self._vectors:
            vector = torch.zeros(unit.span.numel, dtype=unit.dtypes.master, device=unit.blueprint.device)
            self._ledger.reserve(device_tier(vector.device), Kind.GRAD, vector.nbytes)
            self._vectors[unit.index] = vector
        return self._vectors[unit.index]

    def end(self, unit: Unit) -> None:
        """It stays."""

    def cancel(self, unit: Unit) -> None:
        """It stays."""

    def hand_over(self, unit: Unit, slots: Collection[int], stage: Stage, transport: Transport) -> None:
        """Where every rank updates everything, the ranks' parts are gathered first."""
        grad = self._vector(unit)
        if stage.gathers_grads:
            own = unit.rank * unit.layout.shard_numel
            transport.gather(unit.index, grad[own : own + unit.layout.shard_numel], grad).wait()
        for piece, has in zip(unit.pieces, unit.grads(), strict=True):
            if has is None and piece.slot in slots:
                piece.set_grad(grad[piece.range])

    def _holds(self, grad: torch.Tensor | None) -> bool:
        """Zeroed or not: zeros are added to."""
        return grad is not None

    @contextlib.contextmanager
    def on_device(self, unit: Unit) -> Iterator[torch.Tensor]:
        """The vector itself."""
        yield self._vector(unit)

    def scale(self, units: Iterable[Unit], factor: torch.Tensor) -> None:
        """In place."""
        for _, _, grad in self.each(units):
            grad.mul_(factor.to(grad.dtype))

    def power_sums(self, units: Mapping[int, Unit], power: float) -> Iterator[torch.Tensor]:
        """Formed when asked."""
        return (power_sum(grad, power) for _, _, grad in self.each(units.values()))

    def settle(self) -> None:
        """Nothing moves."""

    def show(self, unit: Unit) -> torch.Tensor | None:
        """The vector; from now on it may be user code's too."""
        self._shown.add(unit.index)
        return self._vectors.get(unit.index)

    def forget(self, unit: Unit) -> None:
        """If user code has seen the vector it keeps it, and the next gradient gets other memory."""
        if unit.index in self._shown:
            self._shown.discard(unit.index)
            vector = self._vectors.pop(unit.index, None)
            if vector is not None:
                self._ledger.release(device_tier(vector.device), Kind.GRAD, vector.nbytes)


class OffloadedGrads(GradHome):
    """On shelves: formed in a buffer, measured, evicted while the next one is formed, and fetched for the step.

    What stands for a piece's gradient is a placeholder without values; `zero_grad(set_to_none=False)` shows in its version.
    """

    is_offloaded = True

    def __init__(self, regions: Iterable[Region], mover: Mover) -> None:
        self._shelves = {index: region.grad for region in regions if region.grad is not None for index in region.lengths}
        self._mover = mover
        self.factors: dict[int, list[float]] = {}
        """What a Unit's gradient is multiplied by when it is fetched: clipping."""
        self._borrowed: dict[int, tuple[Buffer, torch.Tensor, Ticket | None]] = {}  # being formed, and what is fetched into it
        self._evictions: deque[tuple[int, Ticket, Buffer]] = deque()
        self._measures = False  # whether sums of squares are formed before an eviction: from the first time they are asked for
        self._sums: dict[int, list[torch.Tensor]] = {}  # by Unit and piece

    def _shelf(self, unit: Unit) -> Shelf:
        return self._shelves[unit.index]

    def begin(self, unit: Unit, *, accumulates: bool) -> tuple[torch.Tensor, Ticket | None]:
        """A buffer, into which earlier values are fetched and scaled."""
        shelf = self._shelf(unit)
        while len(self._evictions) >= MAX_EVICTIONS or any(index == unit.index for index, _, _ in self._evictions):
            self._finish_eviction()
        buffer = self._mover.device_buffers.borrow(whole_quanta(unit.span.numel) * shelf.dtype.itemsize)
        grad = buffer.as_vector(shelf.dtype, unit.span.numel)
        self._borrowed[unit.index] = (buffer, grad, None)
        if not accumulates:
            return grad, None
        factors = list(self.factors.get(unit.index, ()))
        fetched = shelf.fetch(buffer.raw, shelf.starts[unit.index])
        self._borrowed[unit.index] = (buffer, grad, fetched)

        def finish() -> None:
            fetched.wait()
            for factor in factors:
                grad.mul_(factor)

        return grad, Deferred(finish)

    def end(self, unit: Unit) -> None:
        """Measure what clipping will ask about, and evict."""
        shelf = self._shelf(unit)
        buffer, grad, _ = self._borrowed[unit.index]
        if self._measures:
            self._sums[unit.index] = [power_sum(grad[piece.range], 2.0) for piece in unit.pieces]
        else:
            self._sums.pop(unit.index, None)
        del self._borrowed[unit.index]
        self.factors.pop(unit.index, None)  # the new gradient was formed from scaled values, or replaces them
        self._evictions.append((unit.index, shelf.evict(buffer.raw, shelf.starts[unit.index]), buffer))

    def cancel(self, unit: Unit) -> None:
        """Return the buffer; the shelf keeps what it had."""
        if unit.index in self._borrowed:
            buffer, _, fetched = self._borrowed.pop(unit.index)
            if fetched is not None:
                with contextlib.suppress(DiskError):
                    fetched.wait()
            self._mover.device_buffers.give_back(buffer)

    def _finish_eviction(self) -> None:
        _, ticket, buffer = self._evictions[0]
        with self._mover.device_buffers.returned(buffer):
            try:
                ticket.wait()
            except Exception:
                self._evictions.popleft()
                raise
            self._evictions.popleft()  # not before: an interrupted wait leaves it on the list

    def hand_over(self, unit: Unit, slots: Collection[int], stage: Stage, transport: Transport) -> None:
        """Placeholders: the streamed step fetches the values."""
        for piece, has in zip(unit.pieces, unit.grads(), strict=True):
            if piece.slot in slots and not self._holds(has):
                zero = torch.zeros((), dtype=piece.master.dtype, device=unit.blueprint.device)
                piece.set_grad(zero.expand(piece.piece.numel))

    def _holds(self, grad: torch.Tensor | None) -> bool:
        """Zeros are not added to: what lies on the shelf is out of date then."""
        return grad is not None and not was_zeroed(grad)

    @contextlib.contextmanager
    def on_device(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Fetched for a while."""
        self.settle()
        with self._shelf(unit).borrowed(unit.index, keeps_changes=False) as grad:
            for factor in self.factors.get(unit.index, ()):
                grad.mul_(factor)
            yield grad

    def scale(self, units: Iterable[Unit], factor: torch.Tensor) -> None:
        """Noted, and done when they are fetched."""
        for unit in units:
            if any(piece.grad is not None for piece in unit.pieces):
                self.factors.setdefault(unit.index, []).append(factor.item())

    def power_sums(self, units: Mapping[int, Unit], power: float) -> Iterator[torch.Tensor]:
        """Formed before the eviction if they were asked for before, else by fetching everything."""
        has_all = all(i in self._sums for i, unit in units.items() if any(p.grad is not None for p in unit.pieces))
        if power != 2.0 or not has_all or self.factors:
            self._measures = True
            yield from (power_sum(grad, power) for _, _, grad in self.each(units.values()))
            return
        for index, unit in units.items():
            for number, grad in enumerate(unit.grads()):
                if self._holds(grad):
                    yield self._sums[index][number]

    def settle(self) -> None:
        """Wait for every eviction."""
        while self._evictions:
            self._finish_eviction()

    def show(self, unit: Unit) -> torch.Tensor | None:
        """There is no memory to show."""
        return None

    def forget(self, unit: Unit) -> None:
        """The shelf is overwritten by the next gradient."""


def power_sum(values: torch.Tensor, power: float, chunk: int = 1 << 18) -> torch.Tensor:
    """Sum of |x|^power in fp64, through a buffer of constant size."""
    total = torch.zeros(1, dtype=torch.float64, device=values.device)
    for part in values.split(chunk):
        wide = part.double()
        total += torch.dot(wide, wide) if power == 2.0 else wide.abs().pow(power).sum()
    return total
