"""What of the model's states lives away from the device, and how it comes up and goes down during a step.

    forward, backward   fetch own shard into its place in the full vector -> exchange with the other ranks
    reduce              a gradient shard is formed in a buffer -> measured -> evicted, while the next one is formed
    step                `optim.StreamedStep`

Built by assembly, called by the runtime and by `Gradients`. Every rank reads and writes its own shards only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from shardwise.comm import Transport, World, own_slice
from shardwise.config import Offload
from shardwise.errors import ConfigError, DiskError, MemoryBudgetError
from shardwise.observe import format_bytes
from shardwise.optim import Region, StreamedStep, can_update, long_states
from shardwise.partition import Unit
from shardwise.ticket import Deferred, Returning, Ticket
from shardwise.tiers import (
    Buffer,
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

MAX_EVICTIONS = 2
"""Gradient shards on their way to disk before the next reduction waits."""


class Offloading:
    """The shelves of one model, and the buffers everything passes through."""

    def __init__(self, asked: Offload, world: World, ledger: Ledger) -> None:
        self.asked = asked
        self.world = world
        self._ledger = ledger
        self.mover = Mover(world.device, ledger)
        self.disk: DiskFile | None = None
        self.regions: list[Region] = []
        self.step: StreamedStep | None = None
        self.grad_factors: dict[int, list[float]] = {}
        """What a Unit's gradient is multiplied by when it comes up: clipping."""
        self._region_of: dict[int, Region] = {}
        self._evictions: deque[tuple[int, Ticket, Buffer]] = deque()
        self._lent: dict[int, tuple[Buffer, Ticket | None]] = {}  # gradients being formed, and what is fetched into them
        self._here: set[int] = set()  # Units whose shard or masters are on the device for a while
        self.states: dict[str, torch.dtype] = {}
        """The optimizer's piece-long states, known if anything is offloaded."""

    # -- set-up -----------------------------------------------------------------------------------------------

    @property
    def kinds_away(self) -> tuple[str, ...]:
        """Which of 'params', 'grads' and 'optimizer' live away from the device."""
        return self.asked.kinds_away(host_is_away=self.mover.is_apart)

    @property
    def params_are_away(self) -> bool:
        """Whether shards are away between their uses."""
        return "params" in self.kinds_away

    @property
    def grads_are_away(self) -> bool:
        """Whether reduced gradients are away between backward and step."""
        return "grads" in self.kinds_away

    @property
    def optimizer_is_away(self) -> bool:
        """Whether moments are away from the device, so that the CPU updates."""
        return "optimizer" in self.kinds_away

    def decide(self, units: Sequence[Unit]) -> None:
        """Decide for every Unit what will be away."""
        if self.world.device.type not in ("cpu", "cuda") and not self.asked.is_idle:
            raise ConfigError(f"Offload is for CPU and CUDA ranks; parameters are on {self.world.device}. Leave offload out.")
        if self.mover.is_apart and self.kinds_away and not self.optimizer_is_away:
            raise ConfigError(
                f"Offload(params={self.asked.params!r}, grads={self.asked.grads!r}, optimizer='device'): what is away from "
                f"{self.world.device} is updated by the CPU. Use optimizer='host' or 'disk'."
            )
        by_dtypes: dict[tuple[object, ...], list[Unit]] = {}
        for unit in units:
            by_dtypes.setdefault((unit.dtypes, unit.is_trainable), []).append(unit)
            unit.shard_is_away = self.params_are_away
            is_apart_from_params = self.mover.is_apart and not self.params_are_away
            unit.master_is_away = (
                unit.is_trainable
                and self.optimizer_is_away
                and (unit.dtypes.master != unit.dtypes.stored or is_apart_from_params)
            )
        self.regions = [Region(its_units) for its_units in by_dtypes.values()]
        self._region_of = {unit.index: region for region in self.regions for unit in region.units}

    def place(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Reserve the space; an error on one rank is an error on all."""
        if self.asked.host_bytes is not None:
            self._ledger.limit(Tier.HOST, self.asked.host_bytes)
        if optimizer is not None and not self.asked.is_idle:
            self.states = long_states(optimizer)
        self._agree(self._reserve)

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
        """(name, kind, tier, dtype) of everything of a Region that lives away."""
        if self.params_are_away:
            yield "param", Kind.PARAM, self.asked.params, region.units[0].dtypes.stored
        if not region.units[0].is_trainable:
            return
        if self.grads_are_away:
            yield "grad", Kind.GRAD, self.asked.grads, region.dtype
        if self.optimizer_is_away:
            if region.has_own_masters:
                yield "master", Kind.MASTER, self.asked.optimizer, region.dtype
            for name, dtype in self.states.items():
                yield name, Kind.MOMENT, self.asked.optimizer, torch.promote_types(dtype, region.dtype)

    def _agree(self, attempt: Callable[[], None]) -> None:
        problem: Exception | None = None
        try:
            attempt()
        except (OSError, MemoryBudgetError) as error:
            problem = error
        texts = self.world.gather_objects(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text is not None:
                raise DiskError(errno.EIO, f"rank {rank} cannot offload: {text}")

    def take_over(self, optimizer: torch.optim.Optimizer) -> StreamedStep | None:
        """Stream this optimizer's step, if anything it touches is away or the update is asked for in host memory."""
        trainable = [region for region in self.regions if region.units[0].is_trainable]
        is_native = self.asked.optimizer != "device" and can_update(optimizer, {region.dtype for region in trainable})
        if not (self.kinds_away or is_native):
            return None  # everything is in memory, and torch's own step is the way
        step = StreamedStep(
            optimizer, trainable, self.mover.buffers, self._ledger, self.asked.step_bytes, self.states, self.grad_factors
        )
        self.step = step
        return step

    def meet_peers(self, transport: Transport) -> None:
        """Where ranks can open each other's files, let them gather different Units from disk."""
        disk = self.disk
        if disk is None or not transport.is_one_host or not self.params_are_away or self.mover.is_apart:
            return
        handles = self.world.gather_objects(disk.handle)
        try:
            disk.open_peers(handles)
            is_open = True
        except OSError:  # a container that hides other processes' files: ranks must use the same Units then
            is_open = False
        if all(self.world.gather_objects(is_open)):  # and nobody goes on before all have opened
            transport.read_peers_with(self._read_peer)

    def _read_peer(self, tag: int, rank: int, place: torch.Tensor) -> None:
        shelf = self._region_of[tag].param
        assert isinstance(shelf, DiskShelf)
        shelf.read_peer(rank, tag, place)

    # -- parameters -------------------------------------------------------------------------------------------

    def gather(self, unit: Unit, full: torch.Tensor, transport: Transport) -> Ticket:
        """Fetch this rank's shard, straight into its place where that is possible, and exchange it."""
        shelf = self._region_of[unit.index].param
        assert shelf is not None
        own = own_slice(self.world, full)
        start = shelf.starts[unit.index]
        if own.dtype == shelf.dtype and (is_aligned(own) or self.mover.is_apart):
            return transport.gather(unit.index, own, full, shelf.fetch(own, start))
        buffers = self.mover.device_buffers
        buffer = buffers.take(whole_quanta(own.numel()) * shelf.dtype.itemsize)
        ready = shelf.fetch(buffer.raw, start)
        shard = buffer.as_vector(shelf.dtype, own.numel())

        def give_back() -> None:
            with contextlib.suppress(DiskError):  # told by the gather; here only that it has ended counts
                ready.wait()
            buffers.give(buffer)

        return Returning(transport.gather(unit.index, shard, full, ready), give_back)

    @contextlib.contextmanager
    def resident(self, unit: Unit, *, keeps_changes: bool, is_new: bool = False) -> Iterator[None]:
        """A Unit's shard and masters in memory for a while; changes go back to disk if they are to be kept."""
        region = self._region_of.get(unit.index)
        is_here = unit.index in self._here
        if region is None or is_here or not (unit.shard_is_away or unit.master_is_away):
            yield
            return
        shard, master = unit.shard, unit.master
        self._here.add(unit.index)
        try:
            with contextlib.ExitStack() as stack:

                def lend(shelf: Shelf) -> torch.Tensor:
                    return stack.enter_context(shelf.lent(unit.index, keeps_changes=keeps_changes, is_new=is_new))

                if region.param is not None:
                    unit.shard = lend(region.param)
                if region.master is not None:
                    unit.master = lend(region.master)
                elif not region.has_own_masters:
                    unit.master = unit.shard
                yield
        finally:
            unit.shard, unit.master = shard, master
            self._here.discard(unit.index)

    # -- gradients --------------------------------------------------------------------------------------------

    def lend_grad(self, unit: Unit, *, accumulates: bool) -> Ticket | None:
        """Memory for a Unit's reduced gradient, as `unit.grad`; what was accumulated before is on its way into it."""
        shelf = self._region_of[unit.index].grad
        assert shelf is not None
        while len(self._evictions) >= MAX_EVICTIONS or any(index == unit.index for index, _, _ in self._evictions):
            self._finish_eviction()
        buffer = self.mover.device_buffers.take(whole_quanta(unit.span.numel) * shelf.dtype.itemsize)
        self._lent[unit.index] = (buffer, None)
        grad = unit.grad = buffer.as_vector(shelf.dtype, unit.span.numel)
        if not accumulates:
            return None
        factors = list(self.grad_factors.get(unit.index, ()))
        fetched = shelf.fetch(buffer.raw, shelf.starts[unit.index])
        self._lent[unit.index] = (buffer, fetched)

        def finish() -> None:
            fetched.wait()
            for factor in factors:
                grad.mul_(factor)

        return Deferred(finish)

    def evict_grad(self, unit: Unit) -> None:
        """The reduction has ended: send the gradient down."""
        shelf = self._region_of[unit.index].grad
        assert shelf is not None
        buffer, _ = self._lent.pop(unit.index)
        unit.grad = None
        self.grad_factors.pop(unit.index, None)  # what comes now was formed from scaled values, or is new
        self._evictions.append((unit.index, shelf.evict(buffer.raw, shelf.starts[unit.index]), buffer))

    def drop_grad(self, unit: Unit) -> None:
        """The reduction failed: keep what is on disk."""
        if unit.index in self._lent:
            buffer, fetched = self._lent.pop(unit.index)
            unit.grad = None
            if fetched is not None:
                with contextlib.suppress(DiskError):
                    fetched.wait()
            self.mover.device_buffers.give(buffer)

    def _finish_eviction(self) -> None:
        _, ticket, buffer = self._evictions[0]
        with self.mover.device_buffers.returned(buffer):
            try:
                ticket.wait()
            except Exception:
                self._evictions.popleft()
                raise
            self._evictions.popleft()  # not before: an interrupted wait leaves it on the list

    def settle(self) -> None:
        """Return when every gradient is down."""
        while self._evictions:
            self._finish_eviction()

    @contextlib.contextmanager
    def resident_grad(self, unit: Unit) -> Iterator[torch.Tensor | None]:
        """A Unit's reduced gradient in memory for a while, as it will be used: clipping included."""
        region = self._region_of[unit.index]
        if region.grad is None:
            yield unit.grad
            return
        self.settle()
        with region.grad.lent(unit.index, keeps_changes=False) as grad:
            for factor in self.grad_factors.get(unit.index, ()):
                grad.mul_(factor)
            yield grad

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
        """Give the disk space back."""
        self.settle()
        self.mover.close()
        if self.disk is not None:
            self.disk.close()
