"""Puts saved values back: masters, stored values and optimizer states, wherever they are kept. The reverse of `Survivors`.

Called by checkpoints on every rank. Every rank asks for the elements of its own span only, one Unit at a time, and writes them
between two fences.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwise.engine.survivors import LONG
from shardwise.partition import Piece, Unit, publish_master

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime


class Saved(Protocol):
    """Where saved values are read from."""

    def read(self, unit: Unit, piece: Piece, kind: str | None, out: torch.Tensor) -> None:
        """Read the elements of a Piece into `out`: of its value (kind None) or of a long optimizer state.

        Nothing is read if the parameter was not saved.
        """

    def dtype_of(self, unit: Unit, piece: Piece, kind: str) -> torch.dtype:
        """The dtype in which a long optimizer state was saved."""


class Restoring:
    """Restores one run from what was saved."""

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer | None, saved: Saved) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._saved = saved

    def __call__(self, states: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Restore everything. `states`: the optimizer states of each parameter that was updated, in order, LONG for long ones; if
        it is None, optimizer states stay as they are.
        """
        runtime = self._runtime
        if runtime.in_backward:
            runtime.start_afresh()
        runtime.gathering.settle()
        runtime.changes.store_written()  # ranks meet here: from now on none reads the shards that will change
        runtime.transport.fence()
        for unit in runtime.units:
            self._restore_values(unit)
            if states is not None:
                self.restore_states(unit, states)
        runtime.transport.fence()
        for unit in runtime.units:
            if unit.is_always_full:
                runtime.transport.gather(unit.index, unit.shard, unit.full).wait()
            unit.drop_own_pages()
            unit.changed()
        runtime.transport.fence()

    @staticmethod
    def pieces(unit: Unit) -> tuple[Piece, ...]:
        """The Pieces that this rank reads of a Unit: all that it updates; of a frozen one its own shard."""
        is_full = unit.is_trainable and unit.span.numel == unit.layout.numel
        return unit.layout.all_pieces() if is_full else unit.layout.pieces(unit.rank)

    def _restore_values(self, unit: Unit) -> None:
        with self._runtime.offload.on_device(unit, keeps_changes=True):
            target = unit.master if unit.is_trainable else unit.shard
            for piece in self.pieces(unit):
                self._saved.read(unit, piece, None, target[piece.shard_start : piece.shard_start + piece.numel])
            if unit.is_trainable:
                publish_master(unit)

    def restore_states(self, unit: Unit, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the optimizer states of one Unit; those of parameters that have none in `states` are dropped."""
        for number, update in enumerate(unit.pieces):
            self._restore_states(unit, number, states.get(unit.layout.slots[update.slot].name))
        asleep = self._runtime.adoption.asleep
        for piece in () if unit.is_trainable or self._optimizer is None else unit.span_pieces:
            saved = states.get(unit.layout.slots[piece.slot_index].name)
            asleep.pop((unit.index, piece.slot_index), None)
            if saved is not None:
                asleep[unit.index, piece.slot_index] = self._read_state(unit, piece, saved)

    def _restore_states(self, unit: Unit, number: int, saved: Mapping[str, Any] | None) -> None:
        stream = self._runtime.offload.step
        update = unit.pieces[number]
        if stream is not None:
            small = {} if saved is None else {kind: self._counted(kind, v) for kind, v in saved.items() if v is not LONG}
            for kind in () if saved is None else (kind for kind, value in saved.items() if value is LONG):
                with stream.on_device(unit, kind, keeps_changes=True) as vector:
                    self._saved.read(unit, update.bounds, kind, vector[update.range])
            stream.restore(unit, number, None if saved is None else small)
        elif self._optimizer is not None:
            self._optimizer.state.pop(update.master, None)
            if saved is not None:
                self._optimizer.state[update.master] = self._read_state(unit, update.bounds, saved)

    def _read_state(self, unit: Unit, piece: Piece, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a Piece in memory of its own."""
        state: dict[str, Any] = {}
        for kind, value in saved.items():
            if value is LONG:
                dtype = self._saved.dtype_of(unit, piece, kind)
                state[kind] = torch.zeros(piece.numel, dtype=dtype, device=unit.blueprint.device)
                self._saved.read(unit, piece, kind, state[kind])
            else:
                state[kind] = copy.deepcopy(self._counted(kind, value))
        return state

    def _counted(self, kind: str, value: Any) -> Any:
        """A step count as this run keeps it: the native Adam counts in a number, torch's own in a tensor."""
        stream = self._runtime.offload.step
        if kind != "step" or type(self._optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return value
        if stream is not None and stream.is_native:
            return int(value)
        return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
