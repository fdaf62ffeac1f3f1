"""Puts saved values back: masters, stored values and optimizer states, wherever they are kept. The reverse of `Survivors`.

Called by checkpoints on every rank. Every rank asks for the elements of its own span only, one Unit at a time, and writes them
between two fences.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwise.engine.survivors import LONG, Survivors
from shardwise.errors import CheckpointError
from shardwise.partition import Piece, Unit, publish_master
from shardwise.tiers import aligned_zeros

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime


class Saved(Protocol):
    """Where saved values are read from."""

    def has(self, unit: Unit, piece: Piece) -> bool:
        """Whether the parameter of a Piece was saved."""

    def read(self, unit: Unit, pieces: Iterable[Piece], kind: str | None, vector: torch.Tensor) -> None:
        """Read Pieces to their places in a vector like the Unit's shard: values (kind None) or a long optimizer state.

        Nothing is read of parameters that were not saved.
        """

    def dtype_of(self, unit: Unit, piece: Piece, kind: str) -> torch.dtype:
        """The dtype in which a long optimizer state was saved."""


States = Mapping[str, Mapping[str, Any]]
"""The optimizer states of each parameter that was updated, in order, LONG for long ones."""


class Restoring:
    """Restores one run from what was saved."""

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer | None, saved: Saved) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._saved = saved
        self._survivors = Survivors(runtime, optimizer)
        self._new: dict[int, list[dict[str, Any] | None]] = {}  # by Unit: states that were read before anything changed

    def __call__(self, states: States | None) -> None:
        """Restore everything; if `states` is None, optimizer states stay as they are.

        If reading or storing fails on any rank, all of them raise CheckpointError: the run is restored in part then.
        """
        runtime = self._runtime
        if runtime.in_backward:
            runtime.start_afresh()
        runtime.gathering.settle()
        runtime.changes.store_written()  # ranks meet here: from now on none reads the shards that will change
        runtime.transport.fence()
        numel = sum(unit.layout.shard_numel for unit in runtime.units)  # reading may take ranks differently long
        outcome = runtime.world.patient(numel / 1e6).try_together(lambda: self._restore(states), Exception)
        runtime.transport.fence()
        for unit in runtime.units:
            if unit.is_always_full:
                runtime.transport.gather(unit.index, unit.shard, unit.full).wait()
            unit.drop_own_pages()
            unit.changed()
        runtime.transport.fence()
        if outcome.first is not None:
            rank, text = outcome.first
            raise CheckpointError(
                f"rank {rank}: {text}; the model is loaded in part only: load again before training goes on."
            ) from outcome.problem

    def _restore(self, states: States | None) -> None:
        for unit in self._runtime.units:
            self._restore_values(unit)
            if states is not None:
                self.restore_states(unit, states)

    @staticmethod
    def pieces(unit: Unit) -> tuple[Piece, ...]:
        """The Pieces that this rank reads of a Unit: all that it updates; of a frozen one its own shard."""
        is_full = unit.is_trainable and unit.span.numel == unit.layout.numel
        return unit.layout.all_pieces() if is_full else unit.layout.pieces(unit.rank)

    def _restore_values(self, unit: Unit) -> None:
        pieces = self.pieces(unit)
        is_new = all(self._saved.has(unit, piece) for piece in pieces)  # nothing has to be fetched first
        with self._runtime.offload.on_device(unit, keeps_changes=True, is_new=is_new):
            target = unit.master if unit.is_trainable else unit.shard
            self._saved.read(unit, pieces, None, target)
            if unit.is_trainable:
                publish_master(unit)

    # -- optimizer states -------------------------------------------------------------------------------------

    def has_no_states(self, unit: Unit) -> bool:
        """Whether a trainable Unit has no optimizer states yet, so that reading some replaces nothing."""
        return unit.is_trainable and self._optimizer is not None and not any(True for _ in self._survivors.states(unit))

    def problems(self, states: States) -> Iterator[str]:
        """What of the small states this run could not use."""
        for name, saved in states.items():
            for kind, value in saved.items():
                try:
                    self._counted(kind, value)
                except (RuntimeError, TypeError, ValueError):
                    yield f"the optimizer's {kind!r} of {name!r} is {'as long as it' if value is LONG else repr(value)} there"

    def read_new(self, states: States) -> None:
        """Read the states of Units that have none, where nothing looks before `__call__` makes them theirs."""
        for unit in self._runtime.units:
            if self.has_no_states(unit):
                self._new[unit.index] = self._read_states(unit, states)

    def restore_states(self, unit: Unit, states: States) -> None:
        """Restore the optimizer states of one Unit. Those of saved parameters that have none in `states` are dropped; those of
        parameters that were not saved stay.
        """
        stream = self._runtime.offload.step
        if unit.is_trainable and self._optimizer is not None:
            if stream is None and unit.index not in self._new:
                for update in unit.pieces:
                    if self._saved.has(unit, update.bounds):
                        self._optimizer.state.pop(update.master, None)  # their memory is needed for the new ones
            found = self._new.pop(unit.index, None) or self._read_states(unit, states)
            for number, (update, state) in enumerate(zip(unit.pieces, found, strict=True)):
                if not self._saved.has(unit, update.bounds):
                    continue
                if stream is not None:
                    stream.restore(unit, number, state)
                elif state is not None:
                    self._optimizer.state[update.master] = state
        asleep = self._runtime.adoption.asleep
        if not unit.is_trainable and self._optimizer is not None:
            slots = unit.layout.slots
            wanted = [(piece, states.get(slots[piece.slot_index].name)) for piece in unit.span_pieces]
            for (piece, _), state in zip(wanted, self._read_all(unit, wanted), strict=True):
                if self._saved.has(unit, piece):
                    asleep.pop((unit.index, piece.slot_index), None)
                if state is not None:
                    asleep[unit.index, piece.slot_index] = state

    def _read_states(self, unit: Unit, states: States) -> list[dict[str, Any] | None]:
        """The states of each Piece that is updated, or None. If they stream: the small ones; long ones go to their places."""
        stream = self._runtime.offload.step
        named = [(update, states.get(unit.layout.slots[update.slot].name)) for update in unit.pieces]
        if stream is None:
            return self._read_all(unit, [(update.bounds, saved) for update, saved in named])
        for kind in stream.states:
            updates = [update for update, saved in named if saved is not None and saved.get(kind) is LONG]
            if updates:
                with stream.on_device(unit, kind, keeps_changes=True, is_new=len(updates) == len(named)) as vector:
                    self._saved.read(unit, [update.bounds for update in updates], kind, vector)
        return [
            None if saved is None else {kind: self._counted(kind, value) for kind, value in saved.items() if value is not LONG}
            for _, saved in named
        ]

    def _read_all(self, unit: Unit, wanted: Sequence[tuple[Piece, Mapping[str, Any] | None]]) -> list[dict[str, Any] | None]:
        """The states of Pieces in new memory: one vector for each kind, as a file has them, of which every Piece has its part."""
        found: list[dict[str, Any] | None] = []
        vectors: dict[tuple[str, torch.dtype], list[tuple[Piece, dict[str, Any]]]] = {}
        for piece, saved in wanted:
            state = None if saved is None else {kind: copy.deepcopy(self._counted(kind, value)) for kind, value in saved.items()}
            found.append(state)
            for kind in (kind for kind, value in (saved or {}).items() if value is LONG):
                assert state is not None
                vectors.setdefault((kind, self._saved.dtype_of(unit, piece, kind)), []).append((piece, state))
        for (kind, dtype), parts in vectors.items():
            vector = aligned_zeros(max(piece.shard_start + piece.numel for piece, _ in parts), dtype, unit.blueprint.device)
            self._saved.read(unit, [piece for piece, _ in parts], kind, vector)
            for piece, state in parts:
                state[kind] = vector[piece.shard_start : piece.shard_start + piece.numel]
        return found

    def _counted(self, kind: str, value: Any) -> Any:
        """A step count as this run keeps it: the native Adam counts in a number, torch's own in a tensor."""
        stream = self._runtime.offload.step
        if kind != "step" or type(self._optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return value
        if stream is not None and stream.is_native:
            return int(value)
        return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
