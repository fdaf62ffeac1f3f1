"""Reads everything that a checkpoint of a run must contain: values, masters and optimizer states, wherever they are kept.

It returns ranges of named parameters, so that the result does not depend on Units, world size, stage, placement or `step_bytes`.
Over all ranks every element of every kind is returned exactly once. Methods communicate only where they say so.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.partition import Piece, Unit
from shardwise.tiers import DiskShelf

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime

VALUE = "value"
"""The kind of a frozen parameter's stored values."""
MASTER = "master"
"""The kind of the values that the optimizer updates; stored and full values of trained parameters are made from them."""


class _Long(enum.Enum):
    LONG = "a state as long as its parameter"


LONG = _Long.LONG
"""Stands for a long state where states are listed."""


class Range(NamedTuple):
    """Elements of one parameter, in its storage order, of one kind: `VALUE`, `MASTER`, or the optimizer's name of a state."""

    name: str
    kind: str
    start: int
    values: torch.Tensor
    """Valid until the next range is asked for."""


class OnDisk(NamedTuple):
    """A vector on disk: from element `start` of a shelf on."""

    shelf: DiskShelf
    start: int


class Survivors:
    """Reads what must survive one run."""

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer | None) -> None:
        self._runtime = runtime
        self._optimizer = optimizer

    def ranges(self) -> Iterator[Range]:
        """This rank's ranges of all states as long as their parameter, fetching one vector at a time. All ranks must iterate."""
        self._runtime.changes.store_written()
        for unit in self._runtime.units:
            for kind in self.kinds(unit):
                with self.shard(unit, kind) as parts:
                    for piece, values in parts:
                        slot = unit.layout.slots[piece.slot_index]
                        yield Range(slot.name, kind, slot.start + piece.param_start, values)

    def kinds(self, unit: Unit) -> dict[str, torch.dtype]:
        """The kinds of long states that this rank has of a Unit, and their dtypes."""
        found = {MASTER: unit.dtypes.master} if unit.is_trainable else {VALUE: unit.dtypes.stored}
        stream = self._runtime.offload.step
        if stream is not None and unit.is_trainable:
            if any(self._has_states(unit, number) for number in range(len(unit.pieces))):
                found |= {kind: stream.dtype_of(unit, kind) for kind in stream.states}
            return found
        for piece, state in self._in_memory(unit):
            found |= {kind: value.dtype for kind, value in state.items() if _is_long(value, piece)}
        return found

    @contextlib.contextmanager
    def shard(
        self, unit: Unit, kind: str, *, pieces: tuple[Piece, ...] | None = None
    ) -> Iterator[Sequence[tuple[Piece, torch.Tensor]]]:
        """This rank's shard of one kind: (Piece, values) of every parameter that has it; fetched inside the context.

        `pieces`: other Pieces of what this rank holds than those of its shard.
        """
        own = unit.layout.pieces(unit.rank) if pieces is None else pieces
        if kind in (MASTER, VALUE):
            with self._master(unit) as master:
                # At stage 0 every rank has the full vector of masters, so that Pieces of it begin elsewhere than in a shard.
                slots = unit.layout.slots
                start = 0 if master.numel() == unit.layout.numel else unit.rank * unit.layout.shard_numel
                starts = [(piece, slots[piece.slot_index].offset + piece.param_start - start) for piece in own]
                yield [(piece, master[at : at + piece.numel]) for piece, at in starts]
            return
        with self._state_vector(unit, kind) as vector:
            yield list(self._state_parts(unit, own, kind, vector))

    def home(self, unit: Unit, kind: str) -> OnDisk | list[tuple[int, torch.Tensor]]:
        """Where this rank's shard of one kind is kept: on disk, or in memory as (first element in the shard, values).

        Nothing is copied or fetched. It stays true until the run ends, but values change with the next step.
        """
        offload = self._runtime.offload
        vector: torch.Tensor | None = None
        if kind in (MASTER, VALUE):
            shelf, vector = offload.shelf_of(unit), unit.master
        elif offload.step is not None and unit.is_trainable:
            shelf = offload.step.shelf_of(unit, kind)
            vector = offload.step.kept(unit, kind) if shelf is None else None
        else:
            own = unit.layout.pieces(unit.rank)
            return [(piece.shard_start, values) for piece, values in self._state_parts(unit, own, kind, None)]
        start = 0 if shelf is None else shelf.starts[unit.index]
        length = unit.span.numel if vector is None or shelf is not None else vector.numel()
        if length == unit.layout.numel:  # at stage 0 every rank has the full vector, of which it saves its own shard
            start += unit.rank * unit.layout.shard_numel
        if isinstance(shelf, DiskShelf):
            return OnDisk(shelf, start)
        vector = vector if shelf is None else shelf.vector
        assert vector is not None
        return [(0, vector[start : start + unit.layout.shard_numel])]

    def states(self, unit: Unit) -> Iterator[tuple[Piece, dict[str, Any]]]:
        """The optimizer's states of each Piece in this rank's span that has any, in its order, LONG for a long one."""
        stream = self._runtime.offload.step
        if stream is None or not unit.is_trainable:
            for piece, state in self._in_memory(unit):
                if state:
                    yield piece, {kind: LONG if _is_long(value, piece) else value for kind, value in state.items()}
            return
        for number, update in enumerate(unit.pieces):
            small = stream.small_states(unit, number)
            if small is not None:
                yield update.bounds, {**small, **dict.fromkeys(stream.states, LONG)}

    def fresh_states(self, unit: Unit) -> Iterator[tuple[Piece, dict[str, Any]]]:
        """States that the optimizer was built with, of Pieces that a streamed step has not updated: one element of long ones."""
        stream = self._runtime.offload.step
        for number, update in enumerate(() if stream is None else unit.pieces):
            found = stream.fresh_states(unit, number) if stream is not None else None
            if found is not None:
                yield update.bounds, found

    def counters(self) -> Iterator[tuple[str, str, Any]]:
        """(parameter, name, value) of other optimizer states, such as step counts, of parameters with a Piece on this rank."""
        for unit in self._runtime.units:
            for piece, state in self.states(unit):
                for kind, value in state.items():
                    if value is not LONG:
                        yield unit.layout.slots[piece.slot_index].name, kind, value

    def full_state(self, unit: Unit, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """The full vector of a long state of a Unit; elements of parameters that have none are undefined. All ranks must call."""
        if self._runtime.offload.step is not None and unit.is_trainable:
            with self._state_vector(unit, kind) as vector:
                assert vector is not None
                full = self._runtime.outside.whole(unit, vector)
                return full.clone() if full is vector else full
        span = torch.zeros(unit.span.numel, dtype=dtype, device=unit.blueprint.device)
        for piece, state in self._in_memory(unit):
            value: Any = state.get(kind)
            if _is_long(value, piece):
                span[piece.shard_start : piece.shard_start + piece.numel].copy_(value)
        return self._runtime.outside.whole(unit, span)

    def full_masters(self, unit: Unit) -> torch.Tensor:
        """The full masters of a Unit (stored values if frozen): new memory, unless this rank holds all. All ranks must call."""
        with self._master(unit) as master:
            full = self._runtime.outside.whole(unit, master)
            is_borrowed = (unit.blueprint.offloads_shard or unit.blueprint.offloads_master) and full is master
            return full.clone() if is_borrowed else full

    @contextlib.contextmanager
    def _master(self, unit: Unit) -> Iterator[torch.Tensor]:
        with self._runtime.offload.on_device(unit, keeps_changes=False):
            yield unit.master

    def _in_memory(self, unit: Unit) -> Iterator[tuple[Piece, dict[str, Any]]]:
        """The states of every Piece in this rank's span that are kept in the optimizer or, of frozen ones, asleep."""
        if not unit.is_trainable:
            asleep = self._runtime.adoption.asleep
            yield from ((piece, asleep.get((unit.index, piece.slot_index), {})) for piece in unit.span_pieces)
        elif self._optimizer is not None:
            yield from ((update.bounds, self._optimizer.state.get(update.master, {})) for update in unit.pieces)

    def _has_states(self, unit: Unit, number: int) -> bool:
        """Whether the streamed step has updated this Piece before."""
        stream = self._runtime.offload.step
        return stream is not None and stream.small_states(unit, number) is not None

    def _state_vector(self, unit: Unit, kind: str) -> contextlib.AbstractContextManager[torch.Tensor | None]:
        stream = self._runtime.offload.step
        return contextlib.nullcontext() if stream is None or not unit.is_trainable else stream.on_device(unit, kind)

    def _state_parts(
        self, unit: Unit, own: tuple[Piece, ...], kind: str, vector: torch.Tensor | None
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        if vector is None:
            held = {piece.slot_index: (piece, state.get(kind)) for piece, state in self._in_memory(unit)}
        else:
            held = {
                update.slot: (update.bounds, vector[update.range] if self._has_states(unit, number) else None)
                for number, update in enumerate(unit.pieces)
            }
        for piece in own:
            bounds, values = held[piece.slot_index]
            skipped = piece.param_start - bounds.param_start  # at stage 0, where the span is the full vector
            if values is not None:
                yield piece, values[skipped : skipped + piece.numel]


def _is_long(value: Any, piece: Piece) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == (piece.numel,)
