"""Reads a checkpoint into a run of any world size, stage and placement.

First names, shapes and dtypes are compared with the model's, and everything that will replace something of the run is read and
compared with its checksums. Optimizer states that replace none are read once, to where nothing looks yet. Only if all that
succeeds on all ranks is anything changed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.manifest import FILE_NAME, Manifest, Segment, entry_key
from shardwise.checkpoint.matching import listed
from shardwise.checkpoint.plain import DTYPES, decode
from shardwise.checkpoint.saved_files import SavedFiles
from shardwise.checkpoint.subject import (
    RNG_ENTRY,
    Subject,
    file_number,
    replica_key,
    require_same_path,
    restore_rng_states,
    try_together,
)
from shardwise.checkpoint.tensor_file import Progress, Reader
from shardwise.engine import LONG, Restoring
from shardwise.errors import CheckpointError
from shardwise.partition import Piece, Slot, Unit


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


def load(
    subject: Subject,
    path: str | os.PathLike[str],
    scheduler: Any = None,
    *,
    strict: bool = True,
    progress: Progress | None = None,
) -> Loaded:
    """Load the checkpoint at `path` into a run. All ranks must call.

    Raises CheckpointError on all ranks, and changes nothing, if it is missing, damaged, or does not fit the model. With
    `strict=False` parameters that are only in one of the two are left out.
    """
    runtime = subject.runtime
    runtime.changes.agree_on([0])  # ranks meet here under a limit of time
    subject.finish_saving()
    source = _Source(Path(os.path.abspath(path)), subject, progress, subject.names_elsewhere())
    restoring = Restoring(runtime, subject.optimizer, source)

    def prepare() -> str:
        source.check(restoring, strict=strict)
        if scheduler is not None and source.others["scheduler"] is None:
            raise CheckpointError(f"{source.path} has no state of a scheduler: it was saved without scheduler=.")
        if source.others["groups"] is not None:
            restoring.read_new(source.states)
        return str(source.path)

    try:
        paths = try_together(subject.everyone, prepare, f"{source.path} was not loaded, and nothing was changed")
        require_same_path(paths, "load")
        others = source.others
        restoring(None if others["groups"] is None else source.states)
        subject.restore(others)
        runtime.num_steps = runtime.transport.watch.step = source.manifest.num_steps
        runtime.gradients.clear()
        if scheduler is not None:
            scheduler.load_state_dict(others["scheduler"])
        replica = runtime.world.replicate.rank
        is_same = source.has_own_file and source.own_entry(replica_key(f"{RNG_ENTRY}torch", replica)) is not None
        if is_same:
            restore_rng_states(lambda key: source.own_entry(replica_key(key, replica)))
        return Loaded(source.manifest.num_steps, others["extra"], source.left_out, is_same)
    finally:
        source.close()


class _Together(NamedTuple):
    """Elements that lie together in an entry of a rank's file, from `start` on, and in a vector of the run's, from `at` on."""

    rank: int
    key: str
    start: int
    at: int
    numel: int

    def ends_at(self, other: _Together) -> bool:
        """Whether another one follows in both."""
        return (self.rank, self.key, self.start + self.numel, self.at + self.numel) == other[:4]


class _Source:
    """The files of one checkpoint, as a run reads them."""

    def __init__(self, path: Path, subject: Subject, progress: Progress | None, elsewhere: Collection[str]) -> None:
        """`elsewhere`: names of parameters that other stages of a pipeline have."""
        self.path = path
        self._elsewhere = elsewhere
        self._subject = subject
        self._progress = progress
        self._num_moved = self._num_bytes = 0
        self._files: SavedFiles | None = None
        self._dtypes: dict[tuple[str, str], torch.dtype] = {}
        self.left_out: tuple[str, ...] = ()
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

    # -- before anything is changed ---------------------------------------------------------------------------

    def check(self, restoring: Restoring, *, strict: bool) -> None:
        """Compare the manifest with the model, and verify what will replace something of the run."""
        self._files = SavedFiles(self.path)
        self.others = decode(dict(self.manifest.others), "the manifest", self.files.stored)
        problem = Subject.malformed(self.others)
        if problem:
            raise CheckpointError(f"{self.path / FILE_NAME} contradicts itself: {problem}.")
        self._require_none([*self._compare(strict=strict), *self._subject.problems(self.others)])
        wanted = [
            (unit, piece, found) for unit in self._units for piece in unit.span_pieces for found in self._needed(unit, piece)
        ]
        self._require_none([*self._compare_states(), *restoring.problems(self.states)])
        new = {unit.index for unit in self._units if restoring.has_no_states(unit)}
        replaced = []
        for unit, piece, (segment, kind) in wanted:
            is_state = kind != self.files.value_kind(unit.layout.slots[piece.slot_index].name)
            num_bytes = segment.numel * self._reader(segment).entries[entry_key(segment.number, kind)].dtype.itemsize
            self._num_bytes += num_bytes
            if not (is_state and unit.index in new):
                self._num_bytes += num_bytes  # it is verified first
                replaced.append((segment.rank, entry_key(segment.number, kind), segment.start, segment.numel))
        for segment_rank, key, start, numel in sorted(replaced):  # as they lie in the files
            for _, values in self.files.reader(segment_rank).read(key, start, numel):
                self._advance(values.numel() * values.element_size())
        if self.has_own_file:
            for key in self.files.reader(self._own_rank).entries:
                if key.startswith(RNG_ENTRY):
                    self.own_entry(key)

    @property
    def _takes_states(self) -> bool:
        return self._subject.optimizer is not None and self.others["groups"] is not None

    @property
    def _units(self) -> Sequence[Unit]:
        return self._subject.runtime.units

    def _require_none(self, problems: Sequence[str]) -> None:
        if problems:
            raise CheckpointError(
                f"{self.path} does not fit the run; nothing was changed. {listed(problems)}. Load it into the model and "
                "optimizer that were saved. With strict=False parameters that only one of them has are left out; "
                "sw.load_pretrained(model, path) loads parameters only."
            )

    def _compare(self, *, strict: bool) -> Iterator[str]:
        here = {slot.name: (slot, unit.dtypes.original) for unit in self._units for slot in unit.layout.slots}
        only = sorted((here.keys() ^ self.manifest.params.keys()) - set(self._elsewhere))
        if strict:
            for name in only:
                yield f"parameter {name!r} is {'not' if name in here else 'only'} in the checkpoint"
        else:
            self.left_out = tuple(only)
        for name in sorted(here.keys() & self.manifest.params.keys()):
            (slot, dtype), saved = here[name], self.manifest.params[name]
            shape, stride = slot.whole_form
            if shape != saved.shape:
                yield f"parameter {name!r} has shape {list(saved.shape)} there, {list(shape)} here"
            elif stride != saved.stride:
                yield f"parameter {name!r} is laid out with strides {list(saved.stride)} there, {list(stride)} here"
            elif dtype != DTYPES[saved.dtype]:
                yield f"parameter {name!r} has dtype {saved.dtype} there, {dtype} here"

    def _compare_states(self) -> list[str]:
        """A streamed step has places for the states that its optimizer makes, and for no others."""
        stream = self._subject.runtime.offload.step
        if stream is None or self.others["groups"] is None:
            return []
        found = []
        for name in (slot.name for unit in self._units if unit.is_trainable for slot in unit.layout.slots):
            long = {kind for kind, value in self.states.get(name, {}).items() if value is LONG}
            if long and long != stream.states.keys():
                found.append(f"the optimizer has states {sorted(long)} of {name!r} there, {sorted(stream.states)} here")
        return found

    def _needed(self, unit: Unit, piece: Piece) -> Iterator[tuple[Segment, str]]:
        """Where everything lies that will be read of a Piece, and of which kind it is."""
        slot = unit.layout.slots[piece.slot_index]
        name = slot.name
        if name not in self.manifest.params:
            return
        for segment in self.files.segments(name, slot.start + piece.param_start, piece.numel, Box.of(slot)):
            reader = self._reader(segment)
            kinds = [self.files.value_kind(name)]
            states = self.files.states_in(segment.rank).get(name) if self._takes_states else None
            if states is not None:
                self.states[name] = states
                kinds += [kind for kind, value in states.items() if value is LONG]
            for kind in kinds:
                key = entry_key(segment.number, kind)
                if key not in reader.entries:
                    raise CheckpointError(f"{self.path / self.manifest.file_name(segment.rank)} has no entry {key!r}.")
                self._dtypes[name, kind] = reader.entries[key].dtype
                yield segment, kind

    def _reader(self, segment: Segment) -> Reader:
        return self.files.reader(segment.rank)

    def _advance(self, num_bytes: int) -> None:
        self._num_moved += num_bytes
        if self._progress is not None:
            self._progress(self._num_moved, self._num_bytes)

    # -- read by Restoring ------------------------------------------------------------------------------------

    def has(self, unit: Unit, piece: Piece) -> bool:
        """Whether the checkpoint has the parameter of a Piece."""
        return unit.layout.slots[piece.slot_index].name in self.manifest.params

    def read(self, unit: Unit, pieces: Iterable[Piece], kind: str | None, vector: torch.Tensor) -> None:
        """Read Pieces, their values or an optimizer state, to where they lie in `vector`, in its dtype."""
        together: list[Piece] = []
        for piece in pieces:
            slot = unit.layout.slots[piece.slot_index]
            box = Box.of(slot)
            if slot.name not in self.manifest.params:
                continue
            if self.manifest.is_divided(slot.name) or (box is not None and box.first is None):
                self._read_rows(slot, piece, kind or self.files.value_kind(slot.name), box, vector)
            else:
                together.append(piece)
        for run in self._runs(unit, together, kind):
            self.files.reader(run.rank).read_into(run.key, run.start, vector[run.at : run.at + run.numel], self._advance)

    def _read_rows(self, slot: Slot, piece: Piece, kind: str, box: Box | None, vector: torch.Tensor) -> None:
        """Read a Piece whose elements do not lie together in the files."""
        start = slot.start + piece.param_start
        for at, values in self.files.parts(slot.name, kind, start, piece.numel, box):
            begin = piece.shard_start + at - start
            vector[begin : begin + values.numel()].copy_(values)
        size = self._dtypes[slot.name, kind].itemsize
        self._advance(size * sum(segment.numel for segment in self.files.segments(slot.name, start, piece.numel, box)))

    def _runs(self, unit: Unit, pieces: Iterable[Piece], kind: str | None) -> Iterator[_Together]:
        """Where Pieces lie in files and in the vector; neighbours in both are one."""
        last: _Together | None = None
        for piece in pieces:
            slot = unit.layout.slots[piece.slot_index]
            box = Box.of(slot)
            first = slot.start if box is None else box.first
            assert first is not None
            for segment in self.manifest.locate(slot.name, first + piece.param_start, piece.numel):
                key = entry_key(segment.number, kind or self.files.value_kind(slot.name))
                found = _Together(segment.rank, key, segment.start, piece.shard_start + segment.at, segment.numel)
                if last is not None and last.ends_at(found):
                    last = last._replace(numel=last.numel + found.numel)
                    continue
                if last is not None:
                    yield last
                last = found
        if last is not None:
            yield last

    def dtype_of(self, unit: Unit, piece: Piece, kind: str) -> torch.dtype:
        """The dtype in which a long optimizer state of a Piece was saved."""
        return self._dtypes[unit.layout.slots[piece.slot_index].name, kind]

    def own_entry(self, key: str) -> torch.Tensor | None:
        """An entry of the file of this rank's number, or None."""
        rank = self._own_rank
        return self.files.whole(rank, key) if key in self.files.reader(rank).entries else None

    @property
    def _own_rank(self) -> int:
        """The number of the file that this rank would write."""
        return file_number(self._subject.runtime.world)

    @property
    def has_own_file(self) -> bool:
        """Whether the run is divided among as many ranks as the one that was saved."""
        world = self._subject.runtime.world
        return (self.manifest.num_parts, self.manifest.num_shards) == (world.model.size, world.shard.size)

    def close(self) -> None:
        """Close all files."""
        if self._files is not None:
            self._files.close()
