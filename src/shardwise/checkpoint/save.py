"""Writes a checkpoint: every rank its own shards into its own file, in parallel; then rank 0 writes the manifest and renames.

What a rank writes follows from the layout. Rank 0 makes the directory (`claim.py`) before the fence at which changes by hand are
stored, so that the others find it. Then ranks meet twice: when all have written, and when rank 0 has committed. A save in the
background does the same on a thread of its own, with a process group of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.claim import appear, claimed, place_of, require_room
from shardwise.checkpoint.manifest import FILE_NAME, Manifest, SavedParam, SavedVector, data_file_name, entry_key
from shardwise.checkpoint.plain import dtype_name, dumps, encode
from shardwise.checkpoint.subject import (
    Described,
    Part,
    Subject,
    file_number,
    merged,
    of_all_replicas,
    rng_states,
    try_together,
)
from shardwise.checkpoint.tensor_file import Plan, Progress
from shardwise.checkpoint.writer import FromDisk, InMemory, Source, Writer
from shardwise.comm import World
from shardwise.engine import LONG, OnDisk, Unsaved
from shardwise.errors import CheckpointError
from shardwise.ticket import Done, Ticket
from shardwise.tiers.io import make_engine


def save(
    subject: Subject,
    path: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    scheduler: Any = None,
    *,
    wait: bool = True,
    progress: Progress | None = None,
) -> Ticket:
    """Write a checkpoint of a run to the directory `path`, which must not exist. All ranks must call.

    Raises CheckpointError on all ranks if any rank fails; nothing is left then, and what was there before is unchanged. With
    `wait=False` the Ticket raises it, or the next save or step.
    """
    runtime = subject.runtime
    runtime.gradients.accumulated.require_reduced("run.save()")
    subject.finish_saving()
    place = _Place(Path(os.path.abspath(path)), subject.next_save_id(), runtime.world.whole)
    try:
        runtime.changes.store_written()
        work = _Save(subject, place, extra, scheduler, progress, in_background=not wait)
        if wait:
            work(subject.everyone, lambda unit: None)
            return Done()
        ticket = InBackground(work, subject.world_of_saving())
    except BaseException:
        place.close()
        raise
    runtime.offload.unsaved = ticket.unsaved
    return ticket


class InBackground(Ticket):
    """A save on a thread of its own. Training goes on; it waits only before it changes what has not been written yet."""

    def __init__(self, work: _Save, world: World) -> None:
        self.unsaved = Unsaved()
        self._thread = threading.Thread(target=self._run, args=(work, world), name="shardwise-save", daemon=True)
        _under_way.add(self)
        self._thread.start()

    def _run(self, work: _Save, world: World) -> None:
        failure: Exception | None = None
        try:
            work(world, self.unsaved.advance)
        except Exception as error:  # raised again in the thread that waits, or by the next step
            failure = error
        except BaseException as error:  # a progress function that exits
            failure = CheckpointError(f"the save was ended by {error!r}")
        finally:
            self.unsaved.end(failure)
            if failure is None:
                _under_way.discard(self)

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raise if it failed."""
        self.is_done_within(None)
        if self.unsaved.failure is not None:
            self.unsaved.was_told = True
            raise self.unsaved.failure

    def is_done_within(self, patience_s: float | None) -> bool:
        """Wait up to `patience_s` for the end of the save, or (None) until it has ended; return whether it has."""
        has_ended = self.unsaved.has_ended_within(patience_s)
        if has_ended:
            self._thread.join()
            _under_way.discard(self)
        return has_ended


_under_way: set[InBackground] = set()


@atexit.register
def _finish_all() -> None:
    """A script that ends with a save in the background ends when the checkpoint is complete."""
    for ticket in list(_under_way):
        problem: object = ticket.unsaved.failure if ticket.is_done_within(_EXIT_S) else f"it took longer than {_EXIT_S:.0f} s"
        if problem is not None and not ticket.unsaved.was_told:  # nobody is left to catch it
            print(f"shardwise: the script has ended, and its last save in the background failed: {problem}", file=sys.stderr)


_EXIT_S = 600.0  # how long a script that has ended waits for its last checkpoint


class _Place:
    """The directory that is written to before it gets its name: made and locked by rank 0."""

    def __init__(self, target: Path, save_id: str, world: World) -> None:
        self.target, self.save_id, self._is_first = target, save_id, world.rank == 0
        self.path = place_of(target, save_id)
        self._claim = contextlib.ExitStack()
        self.problem: Exception | None = None
        """Why rank 0 could not make it; raised where ranks meet, so that all of them raise."""
        if self._is_first:
            try:
                self._claim.enter_context(claimed(target, self.path))
            except (OSError, CheckpointError) as error:
                self.problem = error

    def close(self) -> None:
        """On rank 0: remove what has not got its name, and the lock. No rank writes there any more."""
        if self._is_first:
            shutil.rmtree(self.path, ignore_errors=True)
            self._claim.close()


class _Save:
    """One rank's part of one save. Everything that is small, or that training will change unseen, is copied when it is made."""

    def __init__(
        self,
        subject: Subject,
        place: _Place,
        extra: Mapping[str, Any] | None,
        scheduler: Any,
        progress: Progress | None,
        *,
        in_background: bool,
    ) -> None:
        """`in_background`: buffers and the user's tensors may change before they are written, so that they are copied."""
        self._place, self._units, self._is_in_background = place, subject.runtime.units, in_background
        self._progress = progress
        world = subject.runtime.world
        self._rank, self._world_size = file_number(world), world.model.size * world.shard.size
        self._is_replica = world.replicate.rank > 0  # the first replica writes
        self._manifest: Manifest | None = None
        self._sources: dict[str, Source] = {}
        self._unit_of: dict[str, int] = {}
        self._left = [0] * len(self._units)  # bytes of each Unit that are not written yet
        self._num_written = 0
        self._plan: Plan
        self._first_vector = 0  # the number of this part's first vector among those of all parts of the model
        told: dict[str, Any] | None = None
        generators: dict[str, torch.Tensor] = {}
        part: Part | None = None
        try:
            generators = rng_states()
            told = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": dict(extra or {})}
            part = Part.of(subject)
        except Exception as error:  # raised where ranks meet, so that all of them raise
            place.problem = place.problem or error
        vectors = of_all_replicas(world, generators)
        parts = [part] if world.beside is None else world.beside.gather_objects(part)
        if place.problem is None:
            try:
                self._prepare(subject, parts, told if world.whole.rank == 0 else None, vectors)
            except Exception as error:  # as above
                place.problem = error

    def _prepare(
        self,
        subject: Subject,
        parts: Sequence[Part | None],
        told: Mapping[str, Any] | None,
        vectors: dict[str, torch.Tensor],
    ) -> None:
        """Plan the file. `told`: what the user gave; on rank 0, which also makes the manifest. `vectors`: of generators."""
        runtime, save_id = subject.runtime, self._place.save_id
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            raise CheckpointError("another rank failed")  # which says why where ranks meet
        self._first_vector = sum(len(part.units) for part in known[: runtime.world.model.rank])
        if told is not None:
            stored: dict[str, torch.Tensor] = {}
            others = encode({**merged([part.others for part in known]), **told}, "what is to be saved", stored)
            self._manifest = make_manifest([part.units for part in known], save_id, self._world_size, runtime.num_steps, others)
            vectors |= {key: values.clone() for key, values in stored.items()} if self._is_in_background else stored
        entries: dict[str, tuple[torch.dtype, int]] = {}
        for number, unit in enumerate(runtime.units):
            for kind, dtype in subject.survivors.kinds(unit).items():
                key, home = entry_key(self._first_vector + number, kind), subject.survivors.home(unit, kind)
                entries[key] = (dtype, unit.layout.shard_numel)
                self._sources[key] = FromDisk(home) if isinstance(home, OnDisk) else InMemory(home)
                self._unit_of[key] = number
        for key, values in vectors.items():
            entries[key] = (values.dtype, values.numel())
            self._sources[key] = InMemory([(0, values)])
        self._plan = Plan(entries, {"save_id": save_id, "rank": str(self._rank), "states": dumps(_small_states(subject))})
        for key, number in self._unit_of.items():
            self._left[number] += self._plan.entries[key].num_bytes

    def __call__(self, world: World, advance: Callable[[int], None]) -> None:
        """Write and commit. `advance` is told which Units' states are no longer read."""
        failure = f"the checkpoint {self._place.target} was not saved"
        try:
            try_together(world, lambda: self._write(advance), failure)
            try_together(world, self._commit, failure)
        finally:
            self._place.close()  # after the meeting: no rank writes there any more

    # -- one rank's file --------------------------------------------------------------------------------------

    def _write(self, advance: Callable[[int], None]) -> None:
        place = self._place.path
        if self._place.problem is not None:
            raise self._place.problem
        if not place.is_dir():
            raise self._not_shared(f"rank {self._rank} does not see the directory that rank 0 has made")
        if self._is_replica:
            advance(len(self._units) - 1)
            return
        require_room(place, self._plan.num_bytes)
        num_bytes_all = sum(entry.num_bytes for entry in self._plan.entries.values())
        num_done = 0

        def on_written(key: str, num_bytes: int) -> None:
            nonlocal num_done
            self._num_written += num_bytes
            if self._progress is not None:
                self._progress(self._num_written, num_bytes_all)
            if key in self._unit_of:
                self._left[self._unit_of[key]] -= num_bytes
                before = num_done
                while num_done < len(self._left) and not self._left[num_done]:
                    self._require_unwritten(num_done)
                    num_done += 1
                if num_done > before:
                    advance(num_done - 1)

        engine = make_engine()
        try:
            writer = Writer(place / data_file_name(self._rank, self._world_size), self._plan, engine, on_written)
            try:
                for key, source in self._sources.items():
                    writer.write(key, source)
                writer.finish()
            finally:
                writer.close()
        finally:
            engine.close()

    def _require_unwritten(self, number: int) -> None:
        """Raise if user code has written to parameters that are always full while their memory was being read."""
        unit = self._units[number]
        if self._is_in_background and unit.is_always_full and unit.writes.were_counted():
            raise CheckpointError(
                f"parameter {unit.layout.slots[0].name!r}, or one of the same Unit, was written by hand while it was being saved "
                f"in the background: {self._place.target} would be a mixture and was not saved. Wait for the Ticket before that."
            )

    # -- commit -----------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """On rank 0: write the manifest and give the directory its name. All files are on the disk before the rename."""
        if self._manifest is None:
            return
        place, target = self._place.path, self._place.target
        names = [self._manifest.file_name(rank) for rank in range(self._world_size)]
        missing = [rank for rank, name in enumerate(names) if not (place / name).is_file()]
        if missing:
            raise self._not_shared(f"rank 0 does not see the files of ranks {missing[:5]}")
        with open(place / FILE_NAME, "xb") as file:
            file.write(self._manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        appear(place, target)

    def _not_shared(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{what} in {self._place.target.parent}: it was removed meanwhile, or the hosts share no file system there. Save to "
            "a directory that all hosts share."
        )


def make_manifest(
    parts: Sequence[Iterable[Described]], save_id: str, world_size: int, num_steps: int, others: Mapping[str, Any]
) -> Manifest:
    """The manifest of a run: a calculation from the layouts, dtypes and trainability of the Units of each part of the model."""
    params: dict[str, SavedParam] = {}
    vectors = []
    for number, units in enumerate(parts):
        for layout, dtype, is_trainable in units:
            for slot in layout.slots:
                params[slot.name] = SavedParam(*slot.whole_form, dtype_name(dtype), is_trainable)
            names, offsets = tuple(slot.name for slot in layout.slots), tuple(slot.offset for slot in layout.slots)
            tile = next(((slot.start, slot.numel) for slot in layout.slots if slot.whole is not None), None)
            boxes = tuple(None if slot.part is None else (slot.part.origin, slot.shape) for slot in layout.slots)
            boxes = boxes if any(box is not None for box in boxes) else ()
            vectors.append(SavedVector(names, offsets, layout.shard_numel, tile, number, boxes))
    return Manifest(save_id, world_size, num_steps, params, vectors, others, len(parts))


def _small_states(subject: Subject) -> dict[str, Any]:
    """For each parameter with a Piece on this rank that was updated: [name, value, if it is not long] of its states, in order."""
    found: dict[str, Any] = {}
    for unit in subject.runtime.units:
        for piece, states in subject.survivors.states(unit):
            name = unit.layout.slots[piece.slot_index].name
            what = f"an optimizer state of {name!r}"
            found[name] = [[kind] if value is LONG else [kind, encode(value, what)] for kind, value in states.items()]
    return found
