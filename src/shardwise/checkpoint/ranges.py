"""One rank's part of a run as a dict, for those who bring their own storage.

It has what a rank's file of a checkpoint has: this rank's ranges of values and optimizer states, and everything that is not in
parameters. It is made of plain Python values and CPU tensors. Only the rank it came from can take it back, in a run of the same
model, world size and layout; another one is refused on all ranks, with nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardwise.checkpoint.plain import decode, dtype_name, dumps, encode
from shardwise.checkpoint.subject import Subject, file_number, restore_rng_states, rng_states, try_together
from shardwise.engine import LONG, MASTER, VALUE, Restoring
from shardwise.errors import CheckpointError
from shardwise.partition import Piece, Unit
from shardwise.tiers import checksum

FORMAT = "shardwise ranges"
VERSION = 1
_LONG_KIND, _SMALL_KIND = "long", "small"
_PARTS = {"mark": dict, "num_steps": int, "values": dict, "states": dict, "others": dict, "rng": dict}


def state_dict(subject: Subject) -> dict[str, Any]:
    """This rank's ranges of everything that `save` saves, as copies on the CPU. All ranks must call."""
    runtime = subject.runtime
    runtime.gradients.accumulated.require_reduced("run.state_dict()")
    runtime.changes.store_written()
    values: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for unit in runtime.units:
        for piece, state in subject.survivors.states(unit):
            states[_name(unit, piece)] = {k: None if v is LONG else (_SMALL_KIND, _plain(v, k)) for k, v in state.items()}
        for kind in subject.survivors.kinds(unit):
            with subject.survivors.shard(unit, kind, pieces=_pieces(unit, kind)) as parts:
                for piece, found in parts:
                    copied = found.detach().to("cpu", copy=True).contiguous()
                    if kind in (MASTER, VALUE):
                        values[_name(unit, piece)] = copied
                    else:
                        states[_name(unit, piece)][kind] = (_LONG_KIND, copied)
    return {
        "format": FORMAT,
        "version": VERSION,
        "mark": _mark(subject),
        "num_steps": runtime.num_steps,
        "values": values,
        "states": states,
        "others": _plain(subject.others(), "the run's state"),
        "rng": rng_states(),
    }


def load_state_dict(subject: Subject, state: Mapping[str, Any]) -> None:
    """Take back what `state_dict` gave on this rank. All ranks must call.

    Raises CheckpointError on all ranks, and changes nothing, if it is not this rank's, or does not fit the run.
    """
    runtime = subject.runtime
    runtime.changes.agree_on([0])  # ranks meet here under a limit of time
    subject.finish_saving()
    source = _Ranges(subject, state)
    try_together(subject.everyone, source.check, "the state dicts were not loaded, and nothing was changed")
    others = {**state["others"], "scheduler": None, "extra": {}}
    Restoring(runtime, subject.optimizer, source)(None if others["groups"] is None else source.states)
    subject.restore(others)
    runtime.num_steps = runtime.transport.watch.step = state["num_steps"]
    runtime.gradients.clear()
    restore_rng_states(state["rng"].get)


class _Ranges:
    """A dict of `state_dict`, as `Restoring` reads it."""

    def __init__(self, subject: Subject, state: Mapping[str, Any]) -> None:
        self._subject = subject
        self._state = state
        self.states: dict[str, dict[str, Any]] = {}

    def check(self) -> None:
        """Compare everything with the run."""
        state = self._state
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise CheckpointError("load_state_dict() was given something that run.state_dict() has not made.")
        if state.get("version") != VERSION:
            raise CheckpointError(f"the state dict has version {state.get('version')!r}; this shardwise reads version {VERSION}.")
        wrong = [key for key, kind in _PARTS.items() if not isinstance(state.get(key), kind)]
        if not wrong and not all(isinstance(value, torch.Tensor) for value in state["rng"].values()):
            wrong = ["rng"]
        if wrong:
            raise CheckpointError(f"the state dict has no {wrong[0]!r}, or one of another type: it was changed or is incomplete.")
        self._check_mark(state["mark"])
        for unit in self._subject.runtime.units:
            for piece in Restoring.pieces(unit):
                self._require(state["values"].get(_name(unit, piece)), unit, piece, "value")
            for piece in unit.span_pieces:
                self._check_states(unit, piece)
        others = {**state["others"], "scheduler": None, "extra": {}}
        problems = [Subject.malformed(others)]
        problems = problems if problems[0] else list(self._subject.problems(others))
        if problems:
            raise CheckpointError(f"the state dict does not fit the run; nothing was changed: {'; '.join(problems[:8])}.")

    def _check_mark(self, found: Mapping[str, Any]) -> None:
        mine = _mark(self._subject)
        for key, what in (("rank", "rank"), ("world_size", "a run of world size")):
            if found.get(key) != mine[key]:
                raise CheckpointError(
                    f"the state dict is of {what} {found.get(key)!r}; this is {what} {mine[key]}. Nothing was changed. Every "
                    "rank must load the one that it made itself; run.save() makes checkpoints that load at any world size."
                )
        if found.get("layout") == mine["layout"]:
            return
        here, there = mine["params"], found.get("params")
        there = there if isinstance(there, Mapping) else {}
        name = next((name for name in (*here, *there) if here.get(name) != there.get(name)), None)
        which = (
            "" if name is None else f": parameter {name!r} is {there.get(name, 'not there')} in it, {here.get(name, 'not')} here"
        )
        raise CheckpointError(
            f"the state dict is of another model or layout{which}. Nothing was changed. It needs the model, stage, precision and "
            "Units it was made with; run.save() makes checkpoints that load into others."
        )

    def _check_states(self, unit: Unit, piece: Piece) -> None:
        name = _name(unit, piece)
        saved = self._state["states"].get(name)
        if saved is None:
            return
        if not isinstance(saved, dict) or not all(
            isinstance(entry, tuple) and len(entry) == 2 and entry[0] in (_LONG_KIND, _SMALL_KIND) for entry in saved.values()
        ):
            raise CheckpointError(f"the state dict has states of parameter {name!r} that cannot be understood.")
        for kind, (length, value) in saved.items():
            if length == _LONG_KIND:
                self._require(value, unit, piece, kind)
        stream = self._subject.runtime.offload.step
        long = {kind for kind, (length, _) in saved.items() if length == _LONG_KIND}
        if stream is not None and unit.is_trainable and long != stream.states.keys():
            raise CheckpointError(
                f"the state dict has {sorted(long)} of parameter {name!r}, this run keeps {sorted(stream.states)}: settings of "
                "the optimizer differ."
            )
        self.states[unit.layout.slots[piece.slot_index].name] = {
            kind: LONG if length == _LONG_KIND else value for kind, (length, value) in saved.items()
        }

    @staticmethod
    def _require(value: Any, unit: Unit, piece: Piece, kind: str) -> None:
        if not isinstance(value, torch.Tensor) or value.shape != (piece.numel,):
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise CheckpointError(
                f"the state dict has {found[:80]} as {kind!r} of parameter {_name(unit, piece)!r}; {piece.numel} elements are "
                "needed."
            )

    def has(self, unit: Unit, piece: Piece) -> bool:
        """Always: another model's dict was refused."""
        return True

    def read(self, unit: Unit, pieces: Iterable[Piece], kind: str | None, vector: torch.Tensor) -> None:
        """Copy the elements of Pieces to where they lie in `vector`."""
        for piece in pieces:
            name = _name(unit, piece)
            found = self._state["values"][name] if kind is None else self._state["states"][name][kind][1]
            vector[piece.shard_start : piece.shard_start + piece.numel].copy_(found)

    def dtype_of(self, unit: Unit, piece: Piece, kind: str) -> torch.dtype:
        """The dtype of a long optimizer state."""
        found: torch.dtype = self._state["states"][_name(unit, piece)][kind][1].dtype
        return found


def _pieces(unit: Unit, kind: str) -> tuple[Piece, ...]:
    return Restoring.pieces(unit) if kind in (MASTER, VALUE) else unit.span_pieces


def _name(unit: Unit, piece: Piece) -> str:
    """The key of a Piece: its parameter's name, with the elements of a tile."""
    return unit.layout.slots[piece.slot_index].label


def _mark(subject: Subject) -> dict[str, Any]:
    """Whose ranges these are: the rank, the world size, and a fingerprint of the layout beside what it was made of."""
    world = subject.runtime.world
    params = {
        slot.label: [
            list(slot.shape),
            list(slot.stride),
            dtype_name(unit.dtypes.original),
            unit.index,
            slot.offset,
            unit.span.numel,
        ]
        for unit in subject.runtime.units
        for slot in unit.layout.slots
    }
    layout = checksum(torch.frombuffer(bytearray(dumps(params).encode()), dtype=torch.uint8))
    return {"rank": file_number(world), "world_size": world.model.size * world.shard.size, "layout": layout, "params": params}


def _plain(value: Any, what: str) -> Any:
    """A copy of a value, on the CPU; raises CheckpointError if it is not made of plain values and tensors."""
    stored: dict[str, torch.Tensor] = {}
    return decode(encode(value, what, stored), what, lambda key: stored[key].clone())
