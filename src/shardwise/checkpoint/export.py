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

from shardwise.checkpoint.boxes import linear_start
from shardwise.checkpoint.claim import appear, claimed, place_of, require_room
from shardwise.checkpoint.exported import Exported
from shardwise.checkpoint.hub_files import HubPlan, HubWriter
from shardwise.checkpoint.subject import Subject, try_together
from shardwise.engine import MASTER, VALUE
from shardwise.errors import CheckpointError
from shardwise.partition import Unit, full_of

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
    world = subject.everyone
    is_first = world.rank == 0
    own: list[Exported] = []
    plans: list[HubPlan] = []

    def look() -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        own.append(Exported(subject.model, dtype, adapters_only=adapters_only))
        return {} if runtime.world.pipe is None else own[0].tensors

    def prepare(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        plans.append(HubPlan(tensors, sys.maxsize if adapters_only else max_file_bytes, own[0].stem))  # peft reads one file
        if is_first:
            stack.enter_context(claimed(target, place))
            require_room(place, plans[0].num_bytes)
            plans[0].create(place, own[0].documents)

    with contextlib.ExitStack() as stack:
        try:
            stages = try_together(world, look, failure)
            tensors = {key: form for stage in stages if stage is not None for key, form in stage.items()} or own[0].tensors
            try_together(world, lambda: prepare(tensors), failure)
            if len(set(world.gather_objects(plans[0].mark()))) > 1:
                raise CheckpointError(f"{failure}: ranks were asked for different exports. Pass the same options on every rank.")
            try_together(world, lambda: _write(subject, place, own[0], plans[0]), failure)
            try_together(world, lambda: appear(place, target) if is_first else None, failure)
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
            apart = [(key, number) for key, number in _slots(unit, wanted) if linear_start(unit.layout.slots[number]) is None]
            full = subject.survivors.full_masters(unit) if apart else None
            wholes = {key: _whole(unit, number, full) for key, number in apart if full is not None}
            if problem is None and writer is not None and not subject.runtime.world.replicate.rank:
                try:
                    _write_unit(subject, unit, writer, wanted, wholes)
                except OSError as error:
                    problem = error
            del full, wholes
        if problem is not None:
            raise problem
        assert writer is not None
        if subject.runtime.world.is_first:
            for key, value in exported.others.items():
                writer.write(key, 0, value.detach().reshape(-1))
        writer.finish()
    finally:
        if writer is not None:
            writer.close()


def _whole(unit: Unit, number: int, full: torch.Tensor) -> torch.Tensor:
    """The whole value of a parameter of a gathered Unit. All ranks must call, if tensor parallelism has divided it."""
    slot = unit.layout.slots[number]
    return full_of(unit.held[number], full.as_strided(slot.shape, slot.stride, full.storage_offset() + slot.offset))


def _write_unit(subject: Subject, unit: Unit, writer: HubWriter, wanted: Wanted, wholes: Mapping[str, torch.Tensor]) -> None:
    if subject.runtime.world.is_first:
        for key, whole in wholes.items():
            writer.write(key, 0, whole.contiguous().view(-1))
    if len(wholes) == len(_slots(unit, wanted)):
        return
    with subject.survivors.shard(unit, MASTER if unit.is_trainable else VALUE) as parts:
        for piece, values in parts:
            name, slot = wanted.get((unit.index, piece.slot_index)), unit.layout.slots[piece.slot_index]
            first = linear_start(slot)
            if name is not None and first is not None and not slot.is_copy:
                writer.write(name, first + piece.param_start, values)


def _slots(unit: Unit, wanted: Wanted) -> list[tuple[str, int]]:
    """What is exported of a Unit: (key, number of the slot)."""
    numbers = range(len(unit.layout.slots))
    return [(wanted[unit.index, number], number) for number in numbers if (unit.index, number) in wanted]
