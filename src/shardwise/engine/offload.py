"""Decides which of the model's states are offloaded, and fetches parameters when they are used.

    forward, backward   fetch this rank's shard into its slice of the full vector -> gather
    reduce              `OffloadedGrads`
    step                `optim.StreamedStep`

Built by assembly, called by `Gathering` and by everything that reads or writes shards. A rank must write only its own shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from shardwise.comm import Transport, World, own_slice
from shardwise.config import Offload
from shardwise.engine.grad_home import GradHome, GradsInMemory, OffloadedGrads
from shardwise.engine.unsaved import Unsaved
from shardwise.errors import ConfigError, DiskError, MemoryBudgetError
from shardwise.observe import format_bytes
from shardwise.optim import Region, StreamedStep, can_update, long_states
from shardwise.partition import Blueprint, Unit
from shardwise.ticket import Returning, Ticket
from shardwise.tiers import (
    DiskFile,
    DiskShelf,
    HostShelf,
    Kind,
    Ledger,
    Mover,
    Shelf,
    Tier,
    is_aligned,
    whole_quanta,
)


class Offloading:
    """The shelves of one model, and the mover that copies to and from them."""

    def __init__(self, asked: Offload, world: World, ledger: Ledger) -> None:
        self.asked = asked
        self.world = world
        self._ledger = ledger
        self.mover = Mover(world.device, ledger)
        self.disk: DiskFile | None = None
        self.regions: list[Region] = []
        self.grads: GradHome = GradsInMemory(ledger)
        """Where reduced gradients are kept."""
        self.step: StreamedStep | None = None
        """The streamed optimizer step; None if torch's own step is used."""
        self._region_of: dict[int, Region] = {}
        self._on_device: set[int] = set()  # Units whose shard or masters are borrowed now
        self.unsaved: Unsaved | None = None
        """What a save in the background has still to read; set by checkpoints."""
        self.states: dict[str, torch.dtype] = {}
        """Name and dtype of the optimizer's states that are as long as a Piece; empty without offload."""

    # -- set-up -----------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which of 'params', 'grads' and 'optimizer' are offloaded."""
        return self.asked.offloaded_kinds(host_is_apart=self.mover.is_apart)

    @property
    def offloads_params(self) -> bool:
        """Whether shards are offloaded between their uses."""
        return "params" in self.kinds

    def decide(self, blueprints: Sequence[Blueprint]) -> list[Blueprint]:
        """Decide for every Unit what will be offloaded."""
        if self.world.device.type not in ("cpu", "cuda") and not self.asked.is_idle:
            raise ConfigError(f"Offload is for CPU and CUDA ranks; parameters are on {self.world.device}. Leave offload out.")
        if self.mover.is_apart and self.kinds and "optimizer" not in self.kinds:
            raise ConfigError(
                f"Offload(params={self.asked.params!r}, grads={self.asked.grads!r}, optimizer='device'): what is offloaded from "
                f"{self.world.device} is updated by the CPU. Use optimizer='host' or 'disk'."
            )
        decided: list[Blueprint] = []
        by_dtypes: dict[tuple[object, ...], list[Blueprint]] = {}
        is_apart_from_params = self.mover.is_apart and not self.offloads_params
        for unit in blueprints:
            offloads_master = "optimizer" in self.kinds and unit.is_trainable and (unit.has_own_master or is_apart_from_params)
            unit = dataclasses.replace(unit, offloads_shard=self.offloads_params, offloads_master=offloads_master)
            decided.append(unit)
            by_dtypes.setdefault((unit.dtypes, unit.is_trainable), []).append(unit)
        self.regions = [Region(alike) for alike in by_dtypes.values()]
        self._region_of = {unit.index: region for region in self.regions for unit in region.blueprints}
        return decided

    def place(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Reserve the space; if one rank fails, all ranks raise."""
        if self.asked.host_bytes is not None:
            self._ledger.limit(Tier.HOST, self.asked.host_bytes)
        if optimizer is not None and not self.asked.is_idle:
            self.states = long_states(optimizer)
        self._agree(self._reserve)
        if "grads" in self.kinds:
            self.grads = OffloadedGrads(self.regions, self.mover)

    def _reserve(self) -> None:
        wanted = [(region, *entry) for region in self.regions for entry in self._wanted(region)]
        if self.asked.uses_disk:
            self.disk = DiskFile(self.asked.path or tempfile.gettempdir(), checks=self.asked.checks)
            self.disk.require(
                sum(
                    sum(map(whole_quanta, region.lengths.values())) * dtype.itemsize
                    for region, _, _, tier, dtype in wanted
                    if tier == "disk"
                )
            )
        for region, name, kind, tier, dtype in wanted:
            shelf: Shelf
            if tier == "disk":
                assert self.disk is not None
                shelf = DiskShelf(self.disk, kind, dtype, region.lengths, self._ledger, self.mover)
            else:
                shelf = HostShelf(kind, dtype, region.lengths, self._ledger, self.mover)
            if kind is Kind.MOMENT:
                region.moments[name] = shelf
            else:
                setattr(region, name, shelf)

    def _wanted(self, region: Region) -> Iterator[tuple[str, Kind, str, torch.dtype]]:
        """(name, kind, tier, dtype) of everything of a Region that is offloaded."""
        first = region.blueprints[0]
        if self.offloads_params:
            yield "param", Kind.PARAM, self.asked.params, first.dtypes.stored
        if not first.is_trainable:
            return
        if "grads" in self.kinds:
            yield "grad", Kind.GRAD, self.asked.grads, region.dtype
        if "optimizer" in self.kinds:
            if region.has_own_masters:
                yield "master", Kind.MASTER, self.asked.optimizer, region.dtype
            for name, dtype in self.states.items():
                yield name, Kind.MOMENT, self.asked.optimizer, torch.promote_types(dtype, region.dtype)

    def _agree(self, attempt: Callable[[], None]) -> None:
        outcome = self.world.try_together(attempt, OSError, MemoryBudgetError)
        if outcome.problem is not None:
            raise outcome.problem
        if outcome.first is not None:
            raise DiskError(errno.EIO, f"rank {outcome.first[0]} cannot offload: {outcome.first[1]}")

    def take_over(self, units: Mapping[int, Unit], optimizer: torch.optim.Optimizer) -> StreamedStep | None:
        """Make this optimizer's streamed step if a state is offloaded or the native update can do it; else return None."""
        trainable = [region for region in self.regions if region.blueprints[0].is_trainable]
        is_native = self.asked.optimizer != "device" and can_update(optimizer, {region.dtype for region in trainable})
        if not (self.kinds or is_native):
            return None  # everything is in memory: torch's own step is used
        factors = self.grads.factors if isinstance(self.grads, OffloadedGrads) else {}
        self.step = StreamedStep(
            optimizer,
            trainable,
            units,
            self.mover.buffers,
            self._ledger,
            self.asked.step_bytes,
            self.states,
            factors,
            self._before_change,
        )
        return self.step

    def meet_peers(self, transport: Transport) -> None:
        """Let ranks gather different Units from disk, if they can open each other's files."""
        disk = self.disk
        if disk is None or not transport.is_one_host or not self.offloads_params or self.mover.is_apart:
            return
        peers = self.world.inside
        handles = peers.gather_objects(disk.handle)
        try:
            disk.open_peers(handles)
            is_open = True
        except OSError:  # a container may hide other processes' files: then ranks must use the same Units
            is_open = False
        if all(peers.gather_objects(is_open)):  # also waits until all ranks have opened the files
            transport.read_peers_with(self._read_peer)

    def _read_peer(self, tag: int, rank: int, place: torch.Tensor) -> None:
        shelf = self._region_of[tag].param
        assert isinstance(shelf, DiskShelf)
        shelf.read_peer(rank, tag, place)

    # -- step -------------------------------------------------------------------------------------------------

    def before_step(self, agree_on: Callable[[Sequence[int]], list[tuple[int, int]]]) -> None:
        """Settle gradients. Raise if a save in the background failed; if it runs, let it write what torch's own step changes.

        `agree_on`: the smallest and the largest of values over all ranks. All of them raise, at the same step, or none.
        """
        self.grads.settle()
        unsaved = self.unsaved
        if unsaved is None:
            return
        (has_ended, _), (was_told, _) = agree_on([int(unsaved.has_ended_within(0.0)), int(unsaved.was_told)])
        if has_ended:
            self.unsaved = None
            if unsaved.failure is not None and not was_told:
                unsaved.was_told = True
                raise unsaved.failure
        elif self.step is None:
            self._before_change(max(self._region_of, default=0))

    def _before_change(self, unit: int) -> None:
        """Wait until a save in the background has read a Unit's states."""
        if self.unsaved is not None:
            self.unsaved.wait_for(unit)

    # -- parameters -------------------------------------------------------------------------------------------

    def source_of(self, unit: Unit) -> str:
        """Where a gather starts: from 'shards' on device, or the tier they are offloaded to."""
        return self.asked.params if unit.blueprint.offloads_shard else "shards"

    def gather(self, unit: Unit, full: torch.Tensor, transport: Transport) -> Ticket:
        """Start to fetch this rank's shard, into the full vector if that is possible, and to gather."""
        shelf = self._region_of[unit.index].param
        assert shelf is not None
        own = own_slice(self.world.inside, full)
        start = shelf.starts[unit.index]
        if own.dtype == shelf.dtype and (is_aligned(own) or self.mover.is_apart):
            return transport.gather(unit.index, own, full, shelf.fetch(own, start))
        buffers = self.mover.device_buffers
        buffer = buffers.borrow(whole_quanta(own.numel()) * shelf.dtype.itemsize)
        ready = shelf.fetch(buffer.raw, start)
        shard = buffer.as_vector(shelf.dtype, own.numel())

        def give_back() -> None:
            with contextlib.suppress(DiskError):  # the gather raises it; here the fetch only has to end
                ready.wait()
            buffers.give_back(buffer)

        return Returning(transport.gather(unit.index, shard, full, ready), give_back)

    @contextlib.contextmanager
    def on_device(self, unit: Unit, *, keeps_changes: bool, is_new: bool = False) -> Iterator[None]:
        """Borrow a Unit's shard and masters on device inside the context; evict them at its end if `keeps_changes`."""
        if keeps_changes:
            self._before_change(unit.index)
        region = self._region_of.get(unit.index)
        is_offloaded = unit.blueprint.offloads_shard or unit.blueprint.offloads_master
        if region is None or not is_offloaded or unit.index in self._on_device:
            yield
            return
        shard, master = unit.shard, unit.master
        self._on_device.add(unit.index)
        try:
            with contextlib.ExitStack() as stack:

                def borrow(shelf: Shelf) -> torch.Tensor:
                    return stack.enter_context(shelf.borrowed(unit.index, keeps_changes=keeps_changes, is_new=is_new))

                if region.param is not None:
                    unit.shard = borrow(region.param)
                if region.master is not None:
                    unit.master = borrow(region.master)
                elif not region.has_own_masters:
                    unit.master = unit.shard
                yield
        finally:
            unit.shard, unit.master = shard, master
            self._on_device.discard(unit.index)

    def shelf_of(self, unit: Unit) -> Shelf | None:
        """The shelf on which a Unit's masters are kept, or its stored values if it is frozen; None if they are in memory."""
        region = self._region_of.get(unit.index)
        if region is None:
            return None
        return region.master_shelf if unit.is_trainable else region.param

    # -- looking back -----------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """Lines for the report."""
        if self.asked.is_idle:
            return []
        on_cpu = " (device and host are one memory here)" if not self.mover.is_apart and "host" in self._places() else ""
        lines = [f"offload: params {self.asked.params}, grads {self.asked.grads}, optimizer {self.asked.optimizer}{on_cpu}"]
        if self.step is not None:
            how = "native Adam" if self.step.is_native else "the optimizer itself"
            lines.append(f"streamed step: {how}, portion by portion through {format_bytes(self.step.buffer_bytes)} of buffers")
        if self.disk is not None:
            direct = "direct" if self.disk.is_direct else "through the page cache"
            lines.append(
                f"disk: {format_bytes(self.disk.size)} in {os.fspath(self.disk.directory)}, {self.disk.engine.name} engine, "
                f"{direct}; {format_bytes(self.disk.bytes_read)} read, {format_bytes(self.disk.bytes_written)} written"
            )
            if self.disk.note:
                lines.append(f"note: {self.disk.note}")
        return lines

    def _places(self) -> tuple[str, ...]:
        return (self.asked.params, self.asked.grads, self.asked.optimizer)

    def close(self) -> None:
        """Wait for evictions, end threads and free the disk space."""
        self.grads.settle()
        self.mover.close()
        if self.disk is not None:
            self.disk.close()
