"""Finds parameters that user code has changed on any rank, and stores the changes in shards and masters on all ranks.

Called by the runtime before a step and after a backward, and before anything that reads shards. Every rank stores only its own
slice, so all ranks must have made the same change; if they have not, it raises and stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardwise.comm import Transport, World
from shardwise.engine.gathering import Gathering
from shardwise.engine.offload import Offloading
from shardwise.errors import RanksDifferError
from shardwise.partition import Unit, copy_assigned, differs, write_back
from shardwise.tiers import checksum


class Changes:
    """Changes that user code makes to the parameters of one run."""

    def __init__(self, gathering: Gathering, world: World, transport: Transport, offload: Offloading) -> None:
        self._gathering = gathering
        self._units = gathering.units
        self._world = world
        self._transport = transport
        self._offload = offload
        self._shared: list[Unit] = []  # Units whose memory user code on any rank held at the last `store_written`

    def store_written(self) -> None:
        """Store what user code on any rank has written to parameters in shards and masters.

        All ranks must call. It is a fence too: when it returns, every rank has called it.
        """
        for unit in self._units:
            use = self._gathering.use(unit)
            if unit.is_always_full:
                # With a narrower stored dtype masters would overwrite an unnoticed write: compare all values.
                if unit.may_be_written() or (unit.blueprint.is_narrow and differs(unit)):
                    copy_assigned(unit)
                    use.is_written = True
            elif unit.was_written_while_freed:
                unit.reopen() if unit.keeps_memory else self._gathering.gather(unit)  # gathering an overlay needs no other rank
                use.is_written = True
        written = [int(use.is_written) for use in self._gathering.uses]
        shared = [int(not unit.is_always_full and not unit.is_overlaid and unit.is_shared) for unit in self._units]
        found = [flag for _, flag in self.agree_on([*written, *shared])]
        self._shared = [unit for unit, is_shared in zip(self._units, found[len(written) :], strict=True) if is_shared]
        self.store(self.chosen(found[: len(written)]))

    def chosen(self, flags: Iterable[int | bool]) -> list[Unit]:
        """The Units whose flag is set; there is one flag per Unit."""
        return [unit for unit, flag in zip(self._units, flags, strict=True) if flag]

    def show_new_values(self) -> None:
        """After a step: write the new values into memory that user code on any rank still holds."""
        for unit in self._shared:
            self._gathering.gather(unit)
            self._gathering.free(unit)
        self._shared = []

    def round(self) -> None:
        """Before a forward: round what user code has written to the stored dtype, so that the model computes with it."""
        for unit in self._units:
            if unit.is_always_full and unit.blueprint.is_narrow and unit.may_be_written():
                copy_assigned(unit)
                with self._offload.on_device(unit, keeps_changes=True):
                    write_back(unit)
                unit.writes.note()
                self._gathering.use(unit).is_written = True  # ranks still have to check that all made the same change

    def store(self, units: Sequence[Unit]) -> None:
        """Write what user code changed in gathered parameters back to the shards."""
        if not units:
            return
        self.require_alike(units)
        for unit in units:
            with self._offload.on_device(unit, keeps_changes=True):
                write_back(unit)
            unit.outdate_views()
            unit.writes.note()
            self._gathering.use(unit).is_written = False
        self._transport.fence()
        for unit in units:
            self._gathering.free(unit)

    def require_alike(self, units: Sequence[Unit]) -> None:
        """Raise if ranks have not all made the same changes."""
        found = self.agree_on([checksum(unit.full) if unit.is_gathered or unit.is_overlaid else -1 for unit in units])
        for unit, (low, high) in zip(units, found, strict=True):
            if low != high:
                self._forget(units)
                raise RanksDifferError(
                    f"parameters of Unit {unit.name!r} ({unit.layout.slots[0].name!r} ...) were changed by user code, and not "
                    "alike on every rank: one value cannot stand for all, and nothing was stored. Make the same change on every "
                    "rank (seed alike, or all-reduce what it depends on), or keep such values in a buffer."
                )

    def _forget(self, units: Iterable[Unit]) -> None:
        for unit in units:
            use = self._gathering.use(unit)
            use.is_written = False
            if unit.is_gathered and not unit.is_always_full and not use.scopes:
                use.passages.clear()
                unit.free()
            unit.drop_own_pages()

    def agree_on(self, values: Sequence[int]) -> list[tuple[int, int]]:
        """All-reduce: the smallest and the largest of every value over all ranks."""
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device=self._world.device)
        found = self._transport.all_reduce(both, torch.distributed.ReduceOp.MAX).tolist()
        return [(-low, high) for high, low in zip(found[: len(values)], found[len(values) :], strict=True)]
