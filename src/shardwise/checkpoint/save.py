"""Writes a checkpoint: every rank its own shards into its own file, in parallel; then rank 0 writes the manifest and renames.

What a rank writes follows from the layout. Ranks meet twice: when all have written, and when rank 0 has committed. Until the
rename the directory has a name of its own, by which leftovers of killed saves are recognised.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.manifest import FILE_NAME, Manifest, SavedParam, SavedVector, data_file_name, entry_key
from shardwise.checkpoint.plain import dtype_name, dumps, encode
from shardwise.checkpoint.subject import Subject, rng_states
from shardwise.checkpoint.tensor_file import Plan, Writer
from shardwise.engine import LONG, Runtime
from shardwise.errors import CheckpointError
from shardwise.observe import format_bytes
from shardwise.tiers.io import make_engine

SAVING = ".saving-"
"""Between the name of a checkpoint and its save_id, while it is being written."""
_LOCK = "lock"
_YOUNG_S = 600.0  # a directory without a lock is taken for a leftover when it is older than this


def save(subject: Subject, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None, scheduler: Any = None) -> None:
    """Write a checkpoint of a run to the directory `path`, which must not exist. All ranks must call.

    Raises CheckpointError on all ranks if any rank fails; nothing is left then, and what was there before is unchanged.
    """
    runtime = subject.runtime
    runtime.gradients.accumulated.require_reduced("run.save()")
    runtime.changes.store_written()
    target = Path(os.path.abspath(path))
    save_id = subject.next_save_id()
    place = target.parent / f".{target.name}{SAVING}{save_id}"
    others: dict[str, Any] = {}
    failure = f"the checkpoint {target} was not saved"
    with contextlib.ExitStack() as stack:

        def write() -> None:
            stored: dict[str, torch.Tensor] = {}
            if runtime.world.rank == 0:
                told = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": dict(extra or {})}
                others.update(encode({**subject.others(), **told}, "what is to be saved", stored))
                stack.enter_context(claimed(target, place))
            _write(subject, place, save_id, stored)

        try:
            subject.together(write, failure)
            subject.together(lambda: _commit(runtime, target, place, save_id, others), failure)
        except BaseException:
            if runtime.world.rank == 0:
                shutil.rmtree(place, ignore_errors=True)  # after the meeting: no rank writes there any more
            raise


def make_manifest(runtime: Runtime, save_id: str, others: Mapping[str, Any]) -> Manifest:
    """The manifest of a run: a calculation from its layout."""
    params: dict[str, SavedParam] = {}
    vectors = []
    for unit in runtime.units:
        slots = unit.layout.slots
        for slot in slots:
            params[slot.name] = SavedParam(slot.shape, slot.stride, dtype_name(unit.dtypes.original), unit.is_trainable)
        names, offsets = tuple(slot.name for slot in slots), tuple(slot.offset for slot in slots)
        vectors.append(SavedVector(names, offsets, unit.layout.shard_numel))
    return Manifest(save_id, runtime.world.shard.size, runtime.num_steps, params, vectors, others)


# -- one rank's file --------------------------------------------------------------------------------------------------


def _write(subject: Subject, place: Path, save_id: str, stored: Mapping[str, torch.Tensor]) -> None:
    runtime = subject.runtime
    rank, world_size = runtime.world.shard.rank, runtime.world.shard.size
    place.mkdir(parents=True, exist_ok=True)
    vectors = {**rng_states(), **stored}
    entries: dict[str, tuple[torch.dtype, int]] = {}
    for number, unit in enumerate(runtime.units):
        for kind, dtype in subject.survivors.kinds(unit).items():
            entries[entry_key(number, kind)] = (dtype, unit.layout.shard_numel)
    entries |= {key: (values.dtype, values.numel()) for key, values in vectors.items()}
    plan = Plan(entries, {"save_id": save_id, "rank": str(rank), "states": dumps(_small_states(subject))})
    require_room(place, plan.num_bytes * world_size)
    engine = make_engine()
    try:
        writer = Writer(place / data_file_name(rank, world_size), plan, engine)
        try:
            for number, unit in enumerate(runtime.units):
                for kind in subject.survivors.kinds(unit):
                    with subject.survivors.shard(unit, kind) as parts:
                        writer.write(entry_key(number, kind), _Filler([(piece.shard_start, values) for piece, values in parts]))
            for key, values in vectors.items():
                writer.write(key, _Filler([(0, values)]))
            writer.finish()
        finally:
            writer.close()
    finally:
        engine.close()


class _Filler:
    """Copies ranges of a shard, made of parts with gaps, into chunks."""

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """`parts`: (first element in the shard, values)."""
        self._parts = parts

    def __call__(self, start: int, out: torch.Tensor) -> None:
        stop = start + out.numel()
        for at, values in self._parts:
            low, high = max(at, start), min(at + values.numel(), stop)
            if low < high:
                out[low - start : high - start].copy_(values.detach()[low - at : high - at])


def _small_states(subject: Subject) -> dict[str, Any]:
    """For each parameter with a Piece on this rank that was updated: [name, value, if it is not long] of its states, in order."""
    found: dict[str, Any] = {}
    for unit in subject.runtime.units:
        for number, update in enumerate(unit.pieces):
            name, states = unit.layout.slots[update.slot].name, subject.survivors.states_of(unit, number)
            if states is not None:
                what = f"an optimizer state of {name!r}"
                found[name] = [[kind] if value is LONG else [kind, encode(value, what)] for kind, value in states.items()]
    return found


def require_room(place: Path, num_bytes: int) -> None:
    """Raise if the file system has less space free than a save will take."""
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    if num_bytes > free:
        raise CheckpointError(
            f"{place.parent} has {format_bytes(free)} free, the checkpoint needs {format_bytes(num_bytes)}. Free space there, or "
            "save to another file system."
        )


# -- commit -----------------------------------------------------------------------------------------------------------


def _commit(runtime: Runtime, target: Path, place: Path, save_id: str, others: Mapping[str, Any]) -> None:
    """On rank 0: write the manifest and give the directory its name. All files are on the disk before the rename."""
    if runtime.world.rank != 0:
        return
    manifest = make_manifest(runtime, save_id, others)
    missing = [rank for rank in range(manifest.world_size) if not (place / manifest.file_name(rank)).is_file()]
    if missing:
        raise CheckpointError(
            f"rank 0 does not see the files of ranks {missing[:5]} in {target.parent}: the hosts share no file system there. "
            "Save to a directory that all hosts share."
        )
    with open(place / FILE_NAME, "xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    appear(place, target)


def appear(place: Path, target: Path) -> None:
    """Give a directory that is complete its name. All files in it are on the disk."""
    os.unlink(place / _LOCK)
    _sync_directory(place)
    if target.exists() or target.is_symlink():
        raise CheckpointError(
            f"{target} has appeared while this checkpoint was written, and is left as it is. Save to another path."
        )
    os.rename(place, target)  # fails if a directory with files has the name meanwhile
    _sync_directory(target.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(target: Path, place: Path) -> Iterator[None]:
    """On rank 0: make the directory to write to, locked for as long as this save lasts."""
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already. Save to another path, or remove it first.")
    remove_leftovers(target)
    place.mkdir(parents=True, exist_ok=True)
    lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def remove_leftovers(target: Path) -> None:
    """Remove what killed saves to the same path have left; raise if another run is saving there now."""
    for left in target.parent.glob(f".{glob.escape(target.name)}{SAVING}*") if target.parent.is_dir() else ():
        try:
            lock = os.open(left / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # killed before it was locked, or about to be locked by another run
            if time.time() - left.stat().st_mtime > _YOUNG_S:
                shutil.rmtree(left, ignore_errors=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            raise CheckpointError(f"another run is saving to {target} now. Save to another path.") from None
        finally:
            os.close(lock)
