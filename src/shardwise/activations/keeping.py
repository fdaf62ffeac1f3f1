"""Keeps tensors from forward to backward: where they are, in host memory, or on disk; whole, or one part per rank of a group.

What is moved away is sent behind the forward pass and fetched ahead of backward, last one first: that is the order in which
backward needs it. Called by recomputation (inputs of calls) and by `Elsewhere` (whatever autograd saves).
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.activations.sizes import Sizes, StretchSize
from shardwise.activations.stores import Coming, DeviceStore, DiskStore, HostStore, Item, Store
from shardwise.config import Activations, Offload
from shardwise.engine import Runtime
from shardwise.errors import RanksDifferError, StaleGraphError
from shardwise.partition import Form, flat_values, is_dtensor, storage_stride
from shardwise.ticket import Ticket
from shardwise.tiers import DiskFile, HeldStorages, Tier, checksum, device_tier, own_part

SMALL_BYTES = 1 << 16
"""Smaller tensors stay where they are: moving them costs more than it frees."""


class Kept:
    """A tensor that stays where it is."""

    def __init__(self, tensor: torch.Tensor, what: str, held: HeldStorages) -> None:
        self._tensor, self._version, self._requires_grad = tensor.detach(), tensor._version, tensor.requires_grad
        self._what = what
        self._hold = held.hold(tensor)

    @property
    def taken_bytes(self) -> int:
        """What it takes of its tier."""
        return 0 if self._hold is None else self._hold.num_bytes

    def fetch(self) -> torch.Tensor:
        """The tensor, apart from the graph that it came from."""
        if self._tensor._version != self._version:
            raise StaleGraphError(
                f"an input of {self._what}, of shape {list(self._tensor.shape)}, was changed in place after the call, so that it "
                "cannot be computed again for backward. Change a copy (`x = x + y` instead of `x += y`), or use "
                "Activations(offload='host'), which keeps copies."
            )
        return self._tensor.detach().requires_grad_(self._requires_grad)


class KeptPart(Kept):
    """A DTensor: what this rank has of it is kept."""

    def __init__(self, tensor: torch.Tensor, kept: Kept) -> None:
        self._form, self._requires_grad, self._kept = Form.of(tensor), tensor.requires_grad, kept

    @property
    def taken_bytes(self) -> int:
        """What this rank's part takes."""
        return self._kept.taken_bytes

    def fetch(self) -> torch.Tensor:
        """The DTensor, apart from the graph that it came from."""
        return self._form.wrap(self._kept.fetch()).detach().requires_grad_(self._requires_grad)


class Moved(Kept):
    """A tensor whose bytes are away: in a store, or divided among ranks, or both."""

    def __init__(self, tensor: torch.Tensor, what: str, keeping: Keeping, *, is_divided: bool) -> None:
        self.is_divided = is_divided
        self._requires_grad, self._dtype, self._device = tensor.requires_grad, tensor.dtype, tensor.device
        self._shape, self._stride = tensor.shape, storage_stride(tensor.shape, tensor.stride())
        self.num_bytes = tensor.numel() * tensor.element_size()
        self._keeping = keeping
        self._coming: Coming | None = None
        self._gathering: tuple[torch.Tensor, dist.Work] | None = None
        flat = flat_values(tensor.detach(), self._stride).view(torch.uint8)
        self._item = keeping.put(flat, what, is_divided=is_divided)

    @property
    def taken_bytes(self) -> int:
        """What it takes of its tier: all bytes, or this rank's part."""
        return self._item.num_bytes

    def start(self) -> None:
        """Start to bring back what this rank has of it."""
        if self._coming is None and self._gathering is None:
            self._coming = self._keeping.bring(self._item, self._device)

    def start_gather(self) -> None:
        """Start to gather it from the ranks that have its parts. All of them must call, in the same order."""
        if self._gathering is None:
            self._gathering = self._keeping.gather(self._arrived())

    def _arrived(self) -> torch.Tensor:
        self.start()
        assert self._coming is not None
        coming, self._coming = self._coming, None
        self._keeping.wait_for(coming.ticket)
        return coming.memory

    def fetch(self) -> torch.Tensor:
        """A new tensor with its values."""
        if self.is_divided:
            self.start_gather()
            assert self._gathering is not None
            (flat, work), self._gathering = self._gathering, None
            work.wait()
        else:
            flat = self._arrived()
        self._keeping.fetched(self)
        found = flat[: self.num_bytes].view(self._dtype).as_strided(self._shape, self._stride)
        return found.requires_grad_(self._requires_grad)

    def __del__(self) -> None:
        if hasattr(self, "_item"):
            self._keeping.forget(self._item, self._coming, self._gathering)


class Keeping:
    """Keeps the tensors of one run."""

    def __init__(
        self, device: torch.device, held: HeldStorages, store: Store | None, group: dist.ProcessGroup | None, moving_bytes: int
    ) -> None:
        """`store`: where they are moved to. `group`: whose ranks have equal tensors. `moving_bytes`: most on their way."""
        self.device = device
        self.held = held
        """Counts what stays where it is, and what is computed again."""
        self.sizes = Sizes()
        """What the last forward pass kept."""
        self._store = store
        self._group = group
        self.ahead_bytes = moving_bytes // 2
        """Most bytes that are fetched before their use."""
        self.leaving_bytes = moving_bytes if self.tier is Tier.DISK else 0
        """Most bytes of buffers that are on their way to the disk."""
        self._known: dict[object, tuple[StorageWeakRef, int, weakref.ref[Kept]]] = {}  # by memory, offset, shape, strides
        self._order: list[weakref.ref[Moved]] = []  # what is away, oldest first
        self.stall_s = 0.0
        """Seconds for which forward and backward have waited for tensors on their way."""
        self._is_closed = False
        self._is_first = True  # whether this is the first forward pass, in which ranks of a group compare

    @property
    def tier(self) -> Tier:
        """Where large tensors are kept."""
        return device_tier(self.device) if self._store is None else self._store.tier

    @property
    def is_divided(self) -> bool:
        """Whether every rank of a group keeps a part."""
        return self._group is not None

    def begin_stretch(self) -> StretchSize:
        """What is kept from now on belongs to another stretch; returns what that will take."""
        return self.sizes.begin_stretch(self.held.saved_bytes)

    def keep(self, tensor: torch.Tensor, what: str, *, is_part: bool = False) -> Kept:
        """Keep a tensor; one that is kept already is not kept twice. `what`: whose it is, for messages.

        `is_part`: other ranks have other parts of it, so that it is not divided further.
        """
        own = own_part(tensor)
        if is_dtensor(tensor):
            is_part = any(placement.is_shard() for placement in tensor.placements)  # type: ignore[attr-defined]
            return KeptPart(tensor, self.keep(own.detach(), what, is_part=is_part))
        if own is not tensor:
            tensor = own.detach().requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
        known = self._known.get(key)
        if known is not None and not known[0].expired() and known[1] == tensor._version:
            before = known[2]()
            if before is not None:
                return before
        num_bytes = tensor.numel() * tensor.element_size()
        is_divided = self.is_divided and not is_part
        is_small = num_bytes < SMALL_BYTES or type(tensor) is not torch.Tensor or not tensor.is_floating_point()
        if self._store is None or is_small or (self.is_divided and is_part and self.tier is device_tier(self.device)):
            found = Kept(tensor, what, self.held)
        else:
            found = moved = Moved(tensor, what, self, is_divided=is_divided)
            self._order.append(weakref.ref(moved))
        self.sizes.keep(found, is_away=isinstance(found, Moved) and self.tier is not device_tier(self.device))
        self._known[key] = StorageWeakRef(storage), tensor._version, weakref.ref(found)
        return found

    def close(self) -> None:
        """Give the space back. What graphs that are still there have kept is lost."""
        self._is_closed = True
        if self._store is not None:
            self._store.close()

    def end_forward(self) -> None:
        """No more will be kept; the last ones are needed first."""
        self._is_first = False
        self.sizes.end_forward()
        self._known.clear()
        self._order = [reference for reference in self._order if reference() is not None]
        self._start_before(len(self._order))

    def fetched(self, moved: Moved) -> None:
        """One was needed: start those before it."""
        at = next((at for at in reversed(range(len(self._order))) if self._order[at]() is moved), 0)
        del self._order[at + 1 :]
        self._start_before(at)

    def _start_before(self, position: int) -> None:
        num_bytes = 0
        for number, reference in enumerate(reversed(self._order[:position])):
            found = reference()
            if found is None:
                continue
            num_bytes += found.num_bytes
            if num_bytes > self.ahead_bytes:
                return
            found.start()
            if number == 0 and found.is_divided:
                found.start_gather()

    # -- called by Moved --------------------------------------------------------------------------------------

    def wait_for(self, ticket: Ticket) -> None:
        """Wait, and note how long that took."""
        begin = time.perf_counter()
        try:
            ticket.wait()
        finally:
            self.stall_s += time.perf_counter() - begin

    def put(self, flat: torch.Tensor, what: str, *, is_divided: bool) -> Item:
        """Send bytes away: all of them, or this rank's part."""
        assert self._store is not None
        if self._group is None or not is_divided:
            return self._store.put(flat)
        if self._is_first:
            self._compare(flat, what)
        rank, size = self._group.rank(), self._group.size()
        length = -(-flat.numel() // (16 * size)) * 16
        part = flat[rank * length : (rank + 1) * length]
        if part.numel() < length:
            part = torch.cat([part, part.new_zeros(length - part.numel())])
        return self._store.put(part)

    def _compare(self, flat: torch.Tensor, what: str) -> None:
        """Raise on all ranks if they do not have the same bytes."""
        assert self._group is not None
        mine = torch.tensor([flat.numel(), checksum(flat.cpu()) >> 1], device=flat.device)
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        for rank, other in enumerate(everyone):
            if not torch.equal(other, everyone[0]):
                raise RanksDifferError(
                    f"Activations(partition=...): ranks 0 and {rank} of the group have different inputs of {what}; only equal "
                    "ones can be divided. Give the group of the ranks that compute the same activations (tensor parallelism)."
                )

    def bring(self, item: Item, device: torch.device) -> Coming:
        """Start to bring bytes back."""
        assert self._store is not None
        return self._store.bring(item, device)

    def gather(self, part: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Start to gather the parts of all ranks."""
        assert self._group is not None
        flat = part.new_empty(self._group.size() * part.numel())
        work = dist.all_gather_into_tensor(flat, part, group=self._group, async_op=True)
        assert work is not None
        return flat, work

    def forget(self, item: Item, coming: Coming | None, gathering: tuple[torch.Tensor, dist.Work] | None) -> None:
        """A Moved is not needed any more."""
        assert self._store is not None
        if self._is_closed:
            return
        if coming is not None:
            coming.ticket.wait()
        if gathering is not None:
            gathering[1].wait()
        self._store.drop(item)


def make_keeping(runtime: Runtime, asked: Activations) -> Keeping:
    """What keeps the tensors of a run, as asked for."""
    mover, ledger, device = runtime.offload.mover, runtime.ledger, runtime.world.device
    group = None if asked.partition is False else asked.partition
    if asked.partition is True:
        assert runtime.world.tensor is not None, "checked by assembly"
        group = runtime.world.tensor.group
    store: Store | None = None if group is None else DeviceStore(ledger, device)
    if asked.offload == "host":
        store = HostStore(ledger, mover, asked.bytes)
    elif asked.offload == "disk":
        disk = runtime.offload.disk if asked.path is None else None
        found = disk or DiskFile(_directory(asked, runtime.offload.asked), checks=runtime.offload.asked.checks)
        store = DiskStore(found, ledger, mover, asked.bytes or _DISK_BYTES, closes_disk=disk is None)
    return Keeping(device, held_by(runtime), store, group, asked.bytes or _DISK_BYTES)


def held_by(runtime: Runtime) -> HeldStorages:
    """What counts the tensors that a run holds for backward."""
    units = runtime.units
    tier = device_tier(runtime.world.device)
    return HeldStorages(runtime.ledger, tier, lambda address: any(unit.has_address(address) for unit in units))


def check_directory(asked: Activations, states: Offload) -> None:
    """Raise DiskError if no file can be made where tensors are to be kept. Called before the model is changed."""
    if asked.offload == "disk" and (asked.path is not None or not states.uses_disk):
        DiskFile(_directory(asked, states)).close()


def _directory(asked: Activations, states: Offload) -> str | os.PathLike[str]:
    return asked.path or states.path or tempfile.gettempdir()


_DISK_BYTES = 128 << 20
"""Most bytes on their way to the disk, unless `Activations(bytes=...)` says otherwise."""
