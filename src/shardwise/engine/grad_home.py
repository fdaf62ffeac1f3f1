"""Keeps reduced gradients between backward and step: in memory, or offloaded. One interface, two implementations.

`Gradients` reduces into a home, `Norms` reads from it, and the optimizer's Pieces get their `.grad` from it. Other code must not
depend on which of the two it is.
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
"""How many evictions of gradient shards may run before the next reduction waits."""


class GradHome(ABC):
    """The reduced gradient of every trainable Unit: a vector as long as its span, in the master dtype."""

    is_offloaded: bool
    """Whether gradients are formed in borrowed buffers, so that only few reductions may run at a time."""

    @abstractmethod
    def begin(self, unit: Unit, *, accumulates: bool) -> tuple[torch.Tensor, Ticket | None]:
        """Memory to form a Unit's reduced gradient in. If it accumulates, earlier values are in it once the Ticket is done."""

    @abstractmethod
    def end(self, unit: Unit) -> None:
        """The reduction has ended: start to evict the gradient, if it is offloaded."""

    @abstractmethod
    def cancel(self, unit: Unit) -> None:
        """Return the buffer that `begin` borrowed, unless `end` was called. A gradient that was kept before stays."""

    @abstractmethod
    def hand_over(self, unit: Unit, slots: Collection[int], stage: Stage, transport: Transport) -> None:
        """Set `.grad` of the optimizer's Pieces of these parameters."""

    def held_slots(self, unit: Unit) -> set[int]:
        """Parameters with a Piece on this rank to whose gradient the next one is added."""
        return {piece.slot for piece, grad in zip(unit.pieces, unit.grads(), strict=True) if self._holds(grad)}

    @abstractmethod
    def _holds(self, grad: torch.Tensor | None) -> bool:
        """Whether the next gradient is added to `grad`, the `.grad` of a Piece, instead of replacing it."""

    @abstractmethod
    def on_device(self, unit: Unit) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Borrow a Unit's reduced gradient on device for reading, scaled as the step will see it."""

    @abstractmethod
    def scale(self, units: Iterable[Unit], factor: torch.Tensor) -> None:
        """Multiply every gradient by one number."""

    @abstractmethod
    def power_sums(self, units: Mapping[int, Unit], power: float) -> Iterator[torch.Tensor]:
        """Sum of |x|^power in fp64 of every piece that has a gradient, in order; copies that other ranks count are left out."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until no gradient is being evicted."""

    @abstractmethod
    def show(self, unit: Unit) -> torch.Tensor | None:
        """The vector itself, for user code; None if it is not in memory."""

    @abstractmethod
    def forget(self, unit: Unit) -> None:
        """Drop a Unit's gradient, because none of its parameters has one any more."""

    def each(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, UpdatePiece, torch.Tensor]]:
        """(Unit, Piece, gradient) of every Piece that has one, in order, with one Unit on device at a time."""
        for unit in units:
            held = self.held_slots(unit)
            if held:
                with self.on_device(unit) as whole:
                    for piece in unit.pieces:
                        if piece.slot in held:
                            yield unit, piece, whole[piece.range]


class GradsInMemory(GradHome):
    """One vector per Unit, allocated on first use and kept."""

    is_offloaded = False

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._vectors: dict[int, torch.Tensor] = {}
        self._shown: set[int] = set()  # Units whose vector user code may hold

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
        """Nothing to do: the vector stays in memory."""

    def cancel(self, unit: Unit) -> None:
        """Nothing to do: the vector stays in memory."""

    def hand_over(self, unit: Unit, slots: Collection[int], stage: Stage, transport: Transport) -> None:
        """Set views of the vector; at stage 0 it is gathered first, because every rank updates everything."""
        grad = self._vector(unit)
        if stage.gathers_grads:
            own = unit.rank * unit.layout.shard_numel
            transport.gather(unit.index, grad[own : own + unit.layout.shard_numel], grad).wait()
        for piece, has in zip(unit.pieces, unit.grads(), strict=True):
            if has is None and piece.slot in slots:
                piece.set_grad(grad[piece.range])

    def _holds(self, grad: torch.Tensor | None) -> bool:
        """True for a zeroed gradient too: the next one is added to zeros."""
        return grad is not None

    @contextlib.contextmanager
    def on_device(self, unit: Unit) -> Iterator[torch.Tensor]:
        """The vector itself."""
        yield self._vector(unit)

    def each(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, UpdatePiece, torch.Tensor]]:
        """The gradients that the optimizer has: where it may be changed by hand, that is not this vector."""
        for unit in units:
            for piece, grad in zip(unit.pieces, unit.grads(), strict=True):
                if grad is not None:
                    yield unit, piece, grad

    def scale(self, units: Iterable[Unit], factor: torch.Tensor) -> None:
        """Multiply in place."""
        for _, _, grad in self.each(units):
            grad.mul_(factor.to(grad.dtype))

    def power_sums(self, units: Mapping[int, Unit], power: float) -> Iterator[torch.Tensor]:
        """Computed when iterated."""
        return (power_sum(grad, power) for unit, piece, grad in self.each(units.values()) if not _is_copy(unit, piece))

    def settle(self) -> None:
        """Nothing to do: there are no evictions."""

    def show(self, unit: Unit) -> torch.Tensor | None:
        """The vector; from now on user code may hold it."""
        self._shown.add(unit.index)
        return self._vectors.get(unit.index)

    def forget(self, unit: Unit) -> None:
        """Drop the vector if user code may hold it, so that the next gradient gets new memory; else keep the memory."""
        if unit.index in self._shown:
            self._shown.discard(unit.index)
            vector = self._vectors.pop(unit.index, None)
            if vector is not None:
                self._ledger.release(device_tier(vector.device), Kind.GRAD, vector.nbytes)


class OffloadedGrads(GradHome):
    """Gradients on shelves: each is formed in a buffer, evicted while the next one is formed, and fetched for the step.

    `.grad` of a Piece is a placeholder without values; `zero_grad(set_to_none=False)` is recognised by its version.
    """

    is_offloaded = True

    def __init__(self, regions: Iterable[Region], mover: Mover) -> None:
        self._shelves = {index: region.grad for region in regions if region.grad is not None for index in region.lengths}
        self._mover = mover
        self.factors: dict[int, list[float]] = {}
        """Factors, from clipping and unscaling, by which a Unit's gradient is multiplied when it is fetched."""
        self._borrowed: dict[int, tuple[Buffer, torch.Tensor, Ticket | None]] = {}  # (buffer, vector, fetch) while being formed
        self._evictions: deque[tuple[int, Ticket, Buffer]] = deque()
        self._measures = False  # whether to form sums of squares before an eviction: once they have been asked for
        self._sums: dict[int, list[torch.Tensor]] = {}  # sums of squares by Unit and Piece

    def _shelf(self, unit: Unit) -> Shelf:
        return self._shelves[unit.index]

    def begin(self, unit: Unit, *, accumulates: bool) -> tuple[torch.Tensor, Ticket | None]:
        """Borrow a buffer; if it accumulates, earlier values are fetched into it and scaled."""
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
        """Form the sums of squares that clipping will ask for, and start to evict."""
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
            self._evictions.popleft()  # only now: after a KeyboardInterrupt it must still be on the list

    def hand_over(self, unit: Unit, slots: Collection[int], stage: Stage, transport: Transport) -> None:
        """Set placeholders; the streamed step fetches the values."""
        for piece, has in zip(unit.pieces, unit.grads(), strict=True):
            if piece.slot in slots and not self._holds(has):
                zero = torch.zeros((), dtype=piece.master.dtype, device=unit.blueprint.device)
                piece.set_grad(zero.expand(piece.bounds.numel))

    def _holds(self, grad: torch.Tensor | None) -> bool:
        """False for a zeroed gradient: the shelf still has the old values, which must be replaced."""
        return grad is not None and not was_zeroed(grad)

    @contextlib.contextmanager
    def on_device(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Fetch it into a borrowed buffer, and scale it."""
        self.settle()
        with self._shelf(unit).borrowed(unit.index, keeps_changes=False) as grad:
            for factor in self.factors.get(unit.index, ()):
                grad.mul_(factor)
            yield grad

    def scale(self, units: Iterable[Unit], factor: torch.Tensor) -> None:
        """Record the factor; gradients are multiplied when they are fetched."""
        for unit in units:
            if any(piece.grad is not None for piece in unit.pieces):
                self.factors.setdefault(unit.index, []).append(factor.item())

    def power_sums(self, units: Mapping[int, Unit], power: float) -> Iterator[torch.Tensor]:
        """Return the sums that were formed before evictions if there are any for all Units, else fetch every gradient."""
        has_all = all(i in self._sums for i, unit in units.items() if any(p.grad is not None for p in unit.pieces))
        if power != 2.0 or not has_all or self.factors:
            self._measures = True
            each = self.each(units.values())
            yield from (power_sum(grad, power) for unit, piece, grad in each if not _is_copy(unit, piece))
            return
        for index, unit in units.items():
            for number, grad in enumerate(unit.grads()):
                if self._holds(grad) and not _is_copy(unit, unit.pieces[number]):
                    yield self._sums[index][number]

    def settle(self) -> None:
        """Wait for every eviction."""
        while self._evictions:
            self._finish_eviction()

    def show(self, unit: Unit) -> torch.Tensor | None:
        """Always None: gradients are not kept in memory."""
        return None

    def forget(self, unit: Unit) -> None:
        """Nothing to do: the next gradient overwrites the shelf."""


def _is_copy(unit: Unit, piece: UpdatePiece) -> bool:
    return unit.layout.slots[piece.slot].is_copy


def power_sum(values: torch.Tensor, power: float, chunk: int = 1 << 18) -> torch.Tensor:
    """Sum of |x|^power in fp64, chunk by chunk, so that the extra memory is constant."""
    total = torch.zeros(1, dtype=torch.float64, device=values.device)
    for part in values.split(chunk):
        wide = part.double()
        total += torch.dot(wide, wide) if power == 2.0 else wide.abs().pow(power).sum()
    return total
