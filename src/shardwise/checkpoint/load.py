"""Reads a checkpoint into a run of any world size, stage and placement.

First everything that this rank needs is read and compared with its checksums, and names, shapes and dtypes with the model's. Only
if that succeeds on all ranks is anything changed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.header import CHUNK_BYTES, open_regular
from shardwise.checkpoint.manifest import FILE_NAME, MAX_BYTES, Manifest, entry_key
from shardwise.checkpoint.plain import DTYPES, decode, loads
from shardwise.checkpoint.subject import Subject, restore_rng_states
from shardwise.checkpoint.tensor_file import Reader
from shardwise.engine import LONG, MASTER, VALUE, Restoring
from shardwise.errors import CheckpointError
from shardwise.partition import Piece, Unit
from shardwise.tiers import aligned_memory
from shardwise.tiers.io import IoEngine, make_engine

_SHOWN = 8  # differences that an error lists
_MOST_OPEN = 64  # files at once


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


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`."""
    target = Path(os.path.abspath(path))
    if not target.is_dir():
        raise CheckpointError(f"there is no checkpoint at {target}: it is not a directory.")
    if not (target / FILE_NAME).exists():
        raise CheckpointError(f"{target} has no {FILE_NAME}: it is not a checkpoint, or is incomplete.")
    descriptor = open_regular(target / FILE_NAME)
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"{target / FILE_NAME} has more than {MAX_BYTES} bytes: it is not a manifest.")
    return Manifest.from_bytes(text, str(target / FILE_NAME))


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
    """The files of one checkpoint, opened as they are needed."""

    def __init__(self, path: Path, subject: Subject, engine: IoEngine) -> None:
        self.path = path
        self._subject = subject
        self._engine = engine
        self._readers: dict[int, Reader] = {}
        self._memory = aligned_memory(CHUNK_BYTES)
        self._states: dict[int, dict[str, dict[str, Any]]] = {}
        self.left_out: tuple[str, ...] = ()
        self.manifest: Manifest
        self.others: dict[str, Any]
        self.states: dict[str, dict[str, Any]] = {}

    def check(self, *, strict: bool) -> None:
        """Read the manifest, compare it with the model, and verify everything that this rank will read."""
        self.manifest = read_manifest(self.path)
        self.others = decode(dict(self.manifest.others), "the manifest", self._stored)
        problem = Subject.malformed(self.others)
        if problem:
            raise CheckpointError(f"{self.path / FILE_NAME} contradicts itself: {problem}.")
        problems = [*self._compare(strict=strict), *self._subject.problems(self.others)]
        if problems:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise CheckpointError(
                f"{self.path} does not fit the model; nothing was changed. {len(problems)} differences: "
                f"{'; '.join(problems[:_SHOWN])}{more}. Load it into the model that was saved, or pass strict=False to leave out "
                "what only one of them has."
            )
        for unit in self._subject.runtime.units:
            for piece in Restoring.pieces(unit):
                self._verify(unit, piece)
        if self.manifest.world_size == self._subject.runtime.world.shard.size:
            for key in self._reader(self._subject.runtime.world.shard.rank).entries:
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
        saved = self.manifest.params.get(name)
        if saved is None:
            return
        for segment in self.manifest.locate(name, piece.param_start, piece.numel):
            reader = self._reader(segment.rank)
            kinds = [MASTER if saved.is_trainable else VALUE]
            states = self._states_in(segment.rank).get(name)
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
        saved = self.manifest.params.get(name)
        if saved is None:
            return
        if kind is None:
            kind = MASTER if saved.is_trainable else VALUE
        for segment in self.manifest.locate(name, piece.param_start, piece.numel):
            key = entry_key(segment.number, kind)
            for start, values in self._reader(segment.rank).read(key, segment.start, segment.numel):
                at = segment.at + start - segment.start
                out[at : at + values.numel()].copy_(values)

    def dtype_of(self, unit: Unit, piece: Piece, kind: str) -> torch.dtype:
        """The dtype in which a long optimizer state of a Piece was saved."""
        name = unit.layout.slots[piece.slot_index].name
        segment = next(self.manifest.locate(name, piece.param_start, piece.numel))
        return self._reader(segment.rank).entries[entry_key(segment.number, kind)].dtype

    def _states_in(self, rank: int) -> Mapping[str, dict[str, Any]]:
        """Optimizer states that a rank's file names, by parameter; LONG stands for a long one."""
        self._reader(rank)
        return self._states[rank]

    def _reader(self, rank: int) -> Reader:
        if rank not in self._readers:
            path = self.path / self.manifest.file_name(rank)
            while len(self._readers) >= _MOST_OPEN:
                self._readers.pop(next(iter(self._readers))).close()
            reader = self._readers[rank] = Reader(path, self._engine, self._memory)
            if reader.metadata.get("save_id") != self.manifest.save_id or reader.metadata.get("rank") != str(rank):
                raise CheckpointError(f"{path} belongs to another checkpoint than the manifest beside it.")
            self._states[rank] = _parse_states(reader.metadata.get("states", ""), str(path))
        return self._readers[rank]

    def _stored(self, key: str) -> torch.Tensor:
        """A tensor of the user's or a buffer, from rank 0's file."""
        reader = self._reader(0)
        if not key.startswith("extra.") or key not in reader.entries:
            raise CheckpointError(f"{self.path} has no entry {key!r}.")
        return _whole(reader, key)

    def own_entry(self, key: str) -> torch.Tensor | None:
        """An entry of the file of this rank's number, or None."""
        reader = self._reader(self._subject.runtime.world.shard.rank)
        return _whole(reader, key) if key in reader.entries else None

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            reader.close()


def _whole(reader: Reader, key: str) -> torch.Tensor:
    entry = reader.entries[key]
    found = torch.empty(entry.numel, dtype=entry.dtype)
    for start, values in reader.read(key, 0, entry.numel):
        found[start : start + values.numel()] = values
    return found


def _parse_states(text: str, path: str) -> dict[str, dict[str, Any]]:
    fields = loads(text.encode(), f"the optimizer states named by {path}")
    try:
        return {
            name: {kind: decode(value[0], path) if value else LONG for kind, *value in pairs} for name, pairs in fields.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} names optimizer states that cannot be understood ({error}).") from None
