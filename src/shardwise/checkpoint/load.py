"""Reads a checkpoint into a run of any world size, stage and placement.

First everything that this rank needs is read and compared with its checksums, and names, shapes and dtypes with the model's. Only
if that succeeds on all ranks is anything changed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.manifest import FILE_NAME, Manifest, entry_key
from shardwise.checkpoint.matching import listed
from shardwise.checkpoint.plain import DTYPES, decode
from shardwise.checkpoint.saved_files import SavedFiles
from shardwise.checkpoint.subject import Subject, restore_rng_states
from shardwise.engine import LONG, Restoring
from shardwise.errors import CheckpointError
from shardwise.partition import Piece, Unit
from shardwise.tiers.io import IoEngine, make_engine


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a checkpoint had besides the run's own state."""

    num_steps: int
    """Optimizer steps that the run had made when it was saved."""
    extra: dict[str, Any]
    """What was given to `run.save(extra=...)`."""
    left_out: tuple[str, ...]
    """Parameters that are only in the model or only in the checkpoint; empty unless `strict=False`."""
    restored_rng: bool
    """Whether random generators were restored: only if the number of ranks is the same."""


def load(subject: Subject, path: str | os.PathLike[str], scheduler: Any = None, *, strict: bool = True) -> Loaded:
    """Load the checkpoint at `path` into a run. All ranks must call.

    Raises CheckpointError on all ranks, and changes nothing, if it is missing, damaged, or does not fit the model. With
    `strict=False` parameters that are only in one of the two are left out.
    """
    runtime = subject.runtime
    engine = make_engine()
    source = _Source(Path(os.path.abspath(path)), subject, engine)
    try:
        subject.together(lambda: source.check(strict=strict), f"{source.path} was not loaded, and nothing was changed")
        others = source.others
        Restoring(runtime, subject.optimizer, source)(None if others["groups"] is None else source.states)
        subject.restore(others)
        runtime.num_steps = runtime.transport.watch.step = source.manifest.num_steps
        runtime.gradients.clear()
        if scheduler is not None:
            if others["scheduler"] is None:
                raise CheckpointError(f"{source.path} has no state of a scheduler: it was saved without scheduler=.")
            scheduler.load_state_dict(others["scheduler"])
        is_same = source.manifest.world_size == runtime.world.shard.size
        if is_same:
            restore_rng_states(source.own_entry)
        return Loaded(source.manifest.num_steps, others["extra"], source.left_out, is_same)
    finally:
        source.close()
        engine.close()


class _Source:
    """The files of one checkpoint, as a run reads them."""

    def __init__(self, path: Path, subject: Subject, engine: IoEngine) -> None:
        self.path = path
        self._subject = subject
        self._engine = engine
        self.left_out: tuple[str, ...] = ()
        self._files: SavedFiles | None = None
        self.others: dict[str, Any]
        self.states: dict[str, dict[str, Any]] = {}

    @property
    def files(self) -> SavedFiles:
        """The files, once `check` has opened them."""
        assert self._files is not None
        return self._files

    @property
    def manifest(self) -> Manifest:
        """What is in the checkpoint."""
        return self.files.manifest

    def check(self, *, strict: bool) -> None:
        """Read the manifest, compare it with the model, and verify everything that this rank will read."""
        self._files = SavedFiles(self.path, self._engine)
        self.others = decode(dict(self.manifest.others), "the manifest", self.files.stored)
        problem = Subject.malformed(self.others)
        if problem:
            raise CheckpointError(f"{self.path / FILE_NAME} contradicts itself: {problem}.")
        problems = [*self._compare(strict=strict), *self._subject.problems(self.others)]
        if problems:
            raise CheckpointError(
                f"{self.path} does not fit the model; nothing was changed. {listed(problems)}. Load it into the model that was "
                "saved, or pass strict=False to leave out what only one of them has."
            )
        for unit in self._subject.runtime.units:
            for piece in Restoring.pieces(unit):
                self._verify(unit, piece)
        if self.manifest.world_size == self._subject.runtime.world.shard.size:
            for key in self.files.reader(self._subject.runtime.world.shard.rank).entries:
                if key.startswith("rng."):
                    self.own_entry(key)

    def _compare(self, *, strict: bool) -> Iterator[str]:
        here = {
            slot.name: (slot.shape, slot.stride, unit.dtypes.original)
            for unit in self._subject.runtime.units
            for slot in unit.layout.slots
        }
        only = sorted(here.keys() ^ self.manifest.params.keys())
        if strict:
            for name in only:
                yield f"parameter {name!r} is {'not' if name in here else 'only'} in the checkpoint"
        else:
            self.left_out = tuple(only)
        for name in here.keys() & self.manifest.params.keys():
            (shape, stride, dtype), saved = here[name], self.manifest.params[name]
            if shape != saved.shape:
                yield f"parameter {name!r} has shape {list(saved.shape)} there, {list(shape)} here"
            elif stride != saved.stride:
                yield f"parameter {name!r} is laid out with strides {list(saved.stride)} there, {list(stride)} here"
            elif dtype != DTYPES[saved.dtype]:
                yield f"parameter {name!r} has dtype {saved.dtype} there, {dtype} here"

    def _verify(self, unit: Unit, piece: Piece) -> None:
        name = unit.layout.slots[piece.slot_index].name
        if name not in self.manifest.params:
            return
        for segment in self.manifest.locate(name, piece.param_start, piece.numel):
            reader = self.files.reader(segment.rank)
            kinds = [self.files.value_kind(name)]
            states = self.files.states_in(segment.rank).get(name)
            if states is not None:
                self.states[name] = states
                kinds += [kind for kind, value in states.items() if value is LONG]
            for kind in kinds:
                key = entry_key(segment.number, kind)
                if key not in reader.entries:
                    raise CheckpointError(f"{self.path / self.manifest.file_name(segment.rank)} has no entry {key!r}.")
                reader.verify(key, segment.start, segment.numel)

    def read(self, unit: Unit, piece: Piece, kind: str | None, out: torch.Tensor) -> None:
        """Read elements of a Piece, of its value or of an optimizer state, into `out`, in its dtype."""
        name = unit.layout.slots[piece.slot_index].name
        if name not in self.manifest.params:
            return
        start = piece.param_start
        for at, values in self.files.parts(name, kind or self.files.value_kind(name), start, piece.numel):
            out[at - start : at - start + values.numel()].copy_(values)

    def dtype_of(self, unit: Unit, piece: Piece, kind: str) -> torch.dtype:
        """The dtype in which a long optimizer state of a Piece was saved."""
        name = unit.layout.slots[piece.slot_index].name
        segment = next(self.manifest.locate(name, piece.param_start, piece.numel))
        return self.files.reader(segment.rank).entries[entry_key(segment.number, kind)].dtype

    def own_entry(self, key: str) -> torch.Tensor | None:
        """An entry of the file of this rank's number, or None."""
        rank = self._subject.runtime.world.shard.rank
        return self.files.whole(rank, key) if key in self.files.reader(rank).entries else None

    def close(self) -> None:
        """Close all files."""
        if self._files is not None:
            self._files.close()
