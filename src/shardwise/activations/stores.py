"""Where kept tensors are while they are away: in one reused range of host memory, or of a file.

Bytes go in behind the forward pass and come back as new memory. On a CPU, host and device are one memory, and a copy to the
host's is made at once.
"""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from shardwise.errors import MemoryBudgetError
from shardwise.ticket import Chain, Deferred, Done, Returning, Ticket
from shardwise.tiers import Arena, Buffer, DiskFile, Kind, Ledger, Mover, Room, Tier, aligned, device_tier


class Item(NamedTuple):
    """Bytes that are away."""

    room: Any
    """Where they are: a Room, or memory."""
    arrival: Ticket
    """Ends when they have arrived there."""
    num_bytes: int
    """What they take there."""


class Coming(NamedTuple):
    """Bytes on their way back."""

    memory: torch.Tensor
    ticket: Ticket
    """Ends when they are in `memory`."""


class Store(ABC):
    """Keeps bytes of any length."""

    tier: Tier
    """Where it keeps them."""

    @abstractmethod
    def put(self, source: torch.Tensor) -> Item:
        """Start to move bytes away. `source` must not be changed before they have arrived."""

    @abstractmethod
    def bring(self, item: Item, device: torch.device) -> Coming:
        """Start to bring bytes back, into new memory."""

    @abstractmethod
    def drop(self, item: Item) -> None:
        """Forget bytes that are not needed any more."""

    @abstractmethod
    def close(self) -> None:
        """Give the space back."""


class DeviceStore(Store):
    """Parts of tensors, beside everything else on the device."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger, self.tier = ledger, device_tier(device)

    def put(self, source: torch.Tensor) -> Item:
        """Copy them: what they are a part of is freed."""
        self._ledger.reserve(self.tier, Kind.ACTIVATION, source.numel())
        return Item(source.clone(), Done(), source.numel())

    def bring(self, item: Item, device: torch.device) -> Coming:
        """They are there."""
        return Coming(item.room, Done())

    def drop(self, item: Item) -> None:
        """Free them."""
        self._ledger.release(self.tier, Kind.ACTIVATION, item.room.numel())

    def close(self) -> None:
        """There is none."""


class _SpaceStore(Store):
    """Keeps bytes in a space that is used again and again."""

    def __init__(self, tier: Tier, ledger: Ledger, mover: Mover) -> None:
        self.tier, self._ledger, self._mover = tier, ledger, mover
        self._arena: Arena[Any] = Arena(self._grow, self._shrink)

    def put(self, source: torch.Tensor) -> Item:
        """Start to move bytes away. `source` must not be changed before they have arrived."""
        room = self._arena.reserve(source.numel())
        self._account(aligned(source.numel()))
        try:
            return Item(room, self._send(room, source), aligned(source.numel()))
        except BaseException:
            self.drop(Item(room, Done(), 0))
            raise

    def drop(self, item: Item) -> None:
        """Forget bytes that are not needed any more."""
        item.arrival.wait()
        self._arena.release(item.room)
        self._account(-aligned(item.room.num_bytes))

    def _account(self, num_bytes: int) -> None:
        """Count bytes of the space as activations, or (if negative) as unused."""
        kinds = (Kind.SPARE, Kind.ACTIVATION) if num_bytes > 0 else (Kind.ACTIVATION, Kind.SPARE)
        self._ledger.release(self.tier, kinds[0], abs(num_bytes))
        self._ledger.reserve(self.tier, kinds[1], abs(num_bytes))

    def close(self) -> None:
        """Give the space back."""
        self._arena.close()

    @abstractmethod
    def _send(self, room: Room[Any], source: torch.Tensor) -> Ticket: ...

    @abstractmethod
    def _grow(self, num_bytes: int) -> Any: ...

    @abstractmethod
    def _shrink(self, slab: Any, num_bytes: int) -> None: ...


class HostStore(_SpaceStore):
    """Host memory, all of it in one piece once sizes repeat."""

    def __init__(self, ledger: Ledger, mover: Mover, max_bytes: int | None) -> None:
        super().__init__(Tier.HOST, ledger, mover)
        self._max_bytes = max_bytes
        if max_bytes is not None:  # what is not needed does not count against the budget
            self._arena = Arena(self._grow, self._shrink, least_bytes=0)
        ledger.reclaim_with(self._arena.drop_idle)

    def _grow(self, num_bytes: int) -> torch.Tensor:
        asked = self._arena.num_bytes + num_bytes
        if self._max_bytes is not None and asked > self._max_bytes:
            raise MemoryBudgetError(
                f"Activations(bytes={self._max_bytes}) does not suffice: {asked} bytes of host memory are needed so far. Raise "
                "it, keep checkpoints on disk, or keep fewer (checkpoint=k)."
            )
        self._ledger.reserve(Tier.HOST, Kind.SPARE, num_bytes)
        return self._mover.host_memory(num_bytes)

    def _shrink(self, slab: torch.Tensor, num_bytes: int) -> None:
        self._ledger.release(Tier.HOST, Kind.SPARE, num_bytes)

    def _send(self, room: Room[torch.Tensor], source: torch.Tensor) -> Ticket:
        target = room.slab[room.start : room.start + room.num_bytes]
        if self._mover.is_apart:
            return self._mover.copy_down(target, source)
        target.copy_(source)
        return Done()

    def bring(self, item: Item, device: torch.device) -> Coming:
        """Copy up; on a CPU when it is waited for."""
        room: Room[torch.Tensor] = item.room
        source = room.slab[room.start : room.start + room.num_bytes]
        memory = torch.empty(room.num_bytes, dtype=torch.uint8, device=device)
        if self._mover.is_apart:
            return Coming(memory, self._mover.copy_up(memory, source, after=item.arrival))

        def copy() -> None:
            memory.copy_(source)

        return Coming(memory, Deferred(copy))


class DiskStore(_SpaceStore):
    """A range of a rank's file, through a few buffers."""

    def __init__(self, disk: DiskFile, ledger: Ledger, mover: Mover, max_bytes: int, *, closes_disk: bool) -> None:
        """`max_bytes`: of the buffers that are on their way to the disk at once. `closes_disk`: nobody else uses the file."""
        super().__init__(Tier.DISK, ledger, mover)
        self._disk, self._max_bytes, self._closes_disk = disk, max_bytes, closes_disk
        self._leaving: collections.deque[tuple[Ticket, int]] = collections.deque()

    def _grow(self, num_bytes: int) -> list[int]:
        self._ledger.reserve(Tier.DISK, Kind.SPARE, num_bytes)
        return [self._disk.reserve(num_bytes)]  # a list, because slabs are told apart by identity

    def _shrink(self, slab: list[int], num_bytes: int) -> None:
        self._disk.release(slab[0], num_bytes)
        self._ledger.release(Tier.DISK, Kind.SPARE, num_bytes)

    def _send(self, room: Room[list[int]], source: torch.Tensor) -> Ticket:
        if aligned(room.num_bytes) > self._max_bytes:
            raise MemoryBudgetError(
                f"Activations(bytes={self._max_bytes}) does not suffice: one checkpoint takes a buffer of "
                f"{aligned(room.num_bytes)} bytes on its way to the disk. Raise it, or use smaller batches."
            )
        while self._leaving and sum(length for _, length in self._leaving) + aligned(room.num_bytes) > self._max_bytes:
            self._leaving.popleft()[0].wait()
        buffer = self._mover.buffers.borrow(room.num_bytes)
        place = room.slab[0] + room.start
        if self._mover.is_apart:
            writes: list[Ticket] = []
            copied = self._mover.copy_down(
                buffer.raw[: room.num_bytes], source, then=lambda: writes.append(self._disk.write(buffer.raw, place))
            )
            ticket = self._returning(Chain(copied, writes), buffer)
        else:
            buffer.raw[: room.num_bytes].copy_(source)
            ticket = self._returning(self._disk.write(buffer.raw, place), buffer)
        self._leaving.append((ticket, aligned(room.num_bytes)))
        return ticket

    def close(self) -> None:
        """End the threads of a file that nobody else uses."""
        super().close()
        if self._closes_disk:
            self._disk.close()

    def _returning(self, ticket: Ticket, buffer: Buffer) -> Ticket:
        return Returning(ticket, lambda: self._mover.buffers.give_back(buffer))

    def bring(self, item: Item, device: torch.device) -> Coming:
        """Read into a buffer, from there to new memory when it is waited for."""
        item.arrival.wait()
        room: Room[list[int]] = item.room
        buffer = self._mover.buffers.borrow(room.num_bytes)
        read = self._disk.read(buffer.raw, room.slab[0] + room.start)
        memory = torch.empty(room.num_bytes, dtype=torch.uint8, device=device)

        def finish() -> None:
            try:
                read.wait()
                memory.copy_(buffer.raw[: room.num_bytes])
            finally:
                self._mover.buffers.give_back(buffer)

        return Coming(memory, Deferred(finish))
