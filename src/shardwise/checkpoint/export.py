"""Writes a run's parameters and buffers as a Hugging Face directory: every rank its own ranges, straight to their places.

Nothing is gathered, except Units with parameters whose elements do not lie in row-major order: those are gathered one at a time
and written by rank 0. The directory appears by one rename, as a checkpoint does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from shardwise.checkpoint.claim import appear, claimed, place_of, require_room
from shardwise.checkpoint.exported import Exported
from shardwise.checkpoint.hub_files import HubPlan, HubWriter
from shardwise.checkpoint.subject import Subject, try_together
from shardwise.engine import MASTER, VALUE
from shardwise.errors import CheckpointError
from shardwise.partition import Slot, Unit, is_row_major

Wanted = Mapping[tuple[int, int], str]
"""The key of each parameter that is exported, by the index of its Unit and its slot."""


def export(
    subject: Subject, path: str | os.PathLike[str], *, dtype: torch.dtype | None, max_file_bytes: int, adapters_only: bool
) -> None:
    """Write a Hugging Face directory `path`, which must not exist. All ranks must call.

    Raises CheckpointError on all ranks if any rank fails; nothing is left then.
    """
    runtime = subject.runtime
    runtime.changes.store_written()
    target = Path(os.path.abspath(path))
    place = place_of(target, subject.next_save_id())
    failure = f"{target} was not exported"
    is_first = runtime.world.rank == 0
    found: list[tuple[Exported, HubPlan]] = []

    def prepare() -> None:
        exported = Exported(subject.model, dtype, adapters_only=adapters_only)
        plan = HubPlan(exported.tensors, sys.maxsize if adapters_only else max_file_bytes, exported.stem)  # peft reads one file
        found.append((exported, plan))
        if is_first:
            stack.enter_context(claimed(target, place))
            require_room(place, plan.num_bytes)
            plan.create(place, exported.documents)

    with contextlib.ExitStack() as stack:
        try:
            try_together(runtime.world, prepare, failure)
            if len(set(runtime.world.gather_objects(found[0][1].mark()))) > 1:
                raise CheckpointError(f"{failure}: ranks were asked for different exports. Pass the same options on every rank.")
            try_together(runtime.world, lambda: _write(subject, place, *found[0]), failure)
            try_together(runtime.world, lambda: appear(place, target) if is_first else None, failure)
        except BaseException:
            if is_first:
                shutil.rmtree(place, ignore_errors=True)  # after the meeting: no rank writes there any more
            raise


def _write(subject: Subject, place: Path, exported: Exported, plan: HubPlan) -> None:
    problem: OSError | CheckpointError | None = None
    writer: HubWriter | None = None
    try:
        try:
            writer = HubWriter(place, plan)
        except FileNotFoundError as error:
            problem = CheckpointError(f"{error.filename} is not seen by this rank. Export to a directory that all hosts share.")
        except OSError as error:
            problem = error
        wanted = exported.wanted()
        for unit in subject.runtime.units:
            # Gathers need every rank, also one that has failed.
            strided = {key: slot for key, slot in _slots(unit, wanted) if not is_row_major(slot.shape, slot.stride)}
            full = subject.survivors.full_masters(unit) if strided else None
            if problem is None and writer is not None and not subject.runtime.world.replicate.rank:
                try:
                    _write_unit(subject, unit, writer, wanted, full, strided)
                except OSError as error:
                    problem = error
            del full
        if problem is not None:
            raise problem
        assert writer is not None
        if subject.runtime.world.rank == 0:
            for key, value in exported.others.items():
                writer.write(key, 0, value.detach().reshape(-1))
        writer.finish()
    finally:
        if writer is not None:
            writer.close()


def _write_unit(
    subject: Subject, unit: Unit, writer: HubWriter, wanted: Wanted, full: torch.Tensor | None, strided: Mapping[str, Slot]
) -> None:
    if full is not None and subject.runtime.world.rank == 0:
        for key, slot in strided.items():
            view = full.as_strided(slot.shape, slot.stride, full.storage_offset() + slot.offset)
            writer.write(key, 0, view.contiguous().view(-1))
    if len(strided) == len(_slots(unit, wanted)):
        return
    with subject.survivors.shard(unit, MASTER if unit.is_trainable else VALUE) as parts:
        for piece, values in parts:
            name = wanted.get((unit.index, piece.slot_index))
            if name is not None and name not in strided:
                writer.write(name, unit.layout.slots[piece.slot_index].start + piece.param_start, values)


def _slots(unit: Unit, wanted: Wanted) -> list[tuple[str, Slot]]:
    """What is exported of a Unit: (key, slot)."""
    numbered = enumerate(unit.layout.slots)
    return [(wanted[unit.index, number], slot) for number, slot in numbered if (unit.index, number) in wanted]
