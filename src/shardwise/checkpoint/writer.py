"""Writes one rank's data file: chunks go from where they lie to the disk, several at a time, past the page cache.

A chunk that lies in aligned host memory is written from there. Any other is copied, or read from the disk tier, into one of a few
buffers. The header comes last, because it has the checksums.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from shardwise.checkpoint.header import CHUNK_BYTES, Entry
from shardwise.checkpoint.tensor_file import Plan
from shardwise.engine import OnDisk
from shardwise.errors import CheckpointError
from shardwise.observe import pause
from shardwise.ticket import Done, Ticket
from shardwise.tiers import ALIGNMENT, aligned, aligned_memory, checksum, is_aligned, make_direct
from shardwise.tiers.io import File, IoEngine

_NUM_BUFFERS = 8
_NUM_FILLING = 3  # buffers that are being filled; the others are being written


class Source(Protocol):
    """Where the elements of an entry come from."""

    def start(self, first: int, memory: torch.Tensor, dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, Ticket]:
        """Start to provide `numel` elements from `first` on: in `memory` (bytes, whole blocks) or where they lie.

        Returns them, to be read when the Ticket has ended.
        """


class InMemory:
    """A vector in memory, made of parts with gaps, which read as zeros."""

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """`parts`: (first element in the vector, values)."""
        self._parts = [(at, values.detach()) for at, values in parts]

    def start(self, first: int, memory: torch.Tensor, dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, Ticket]:
        """Return a view if the elements lie together in aligned host memory, else copy them."""
        out = memory.view(dtype)[:numel]
        found = []
        for at, values in self._parts:
            low, high = max(at, first), min(at + values.numel(), first + numel)
            if low < high:
                found.append((low - first, values[low - at : high - at]))
        if len(found) == 1 and found[0][1].numel() == numel:
            values = found[0][1]
            if values.device.type == "cpu" and values.dtype == dtype and values.is_contiguous() and is_aligned(values):
                return values, Done()
        if sum(values.numel() for _, values in found) < numel:
            out.zero_()
        for at, values in found:
            out[at : at + values.numel()].copy_(values)
        return out, Done()


class FromDisk:
    """A vector in the disk tier."""

    def __init__(self, place: OnDisk) -> None:
        self._place = place

    def start(self, first: int, memory: torch.Tensor, dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, Ticket]:
        """Start to read the blocks that contain the elements."""
        shelf, start = self._place.shelf, self._place.start + first
        skipped = start % (ALIGNMENT // dtype.itemsize)
        if not skipped:
            blocks = memory[: aligned(numel * dtype.itemsize)]
            return blocks.view(dtype)[:numel], shelf.read(blocks, start)
        # Only at stage 0, where a rank's shard begins inside a vector.
        blocks = aligned_memory((skipped + numel) * dtype.itemsize)
        shelf.read(blocks, start - skipped).wait()
        out = memory.view(dtype)[:numel]
        out.copy_(blocks.view(dtype)[skipped : skipped + numel])
        return out, Done()


@dataclasses.dataclass
class _Chunk:
    """One chunk on its way through a buffer."""

    memory: torch.Tensor
    key: str
    entry: Entry
    at: int
    """First byte in the entry."""
    values: torch.Tensor
    ticket: Ticket


class Writer:
    """Writes one file."""

    def __init__(self, path: Path, plan: Plan, engine: IoEngine, on_written: Callable[[str, int], None]) -> None:
        """`on_written(key, num_bytes)` is called for every chunk when it has been written, in order."""
        self._plan = plan
        self._engine = engine
        self._on_written = on_written
        self._checksums: dict[str, list[int]] = {key: [] for key in plan.entries}
        self._free = [aligned_memory(CHUNK_BYTES) for _ in range(_NUM_BUFFERS)]
        self._filling: collections.deque[_Chunk] = collections.deque()
        self._writing: collections.deque[_Chunk] = collections.deque()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        remedy = "Free space on this file system, or save to another path."
        self._file = File(os.open(path, flags, 0o644), str(path), remedy)
        try:
            os.posix_fallocate(self._file.descriptor, 0, plan.num_bytes)  # a full disk is noticed now
            make_direct(self._file.descriptor)
        except BaseException:
            os.close(self._file.descriptor)
            raise

    def write(self, key: str, source: Source) -> None:
        """Start to write an entry. Its source must not change before `on_written` was called for all of it."""
        entry = self._plan.entries[key]
        size = entry.dtype.itemsize
        for at in range(0, entry.num_bytes, CHUNK_BYTES):
            numel = min(CHUNK_BYTES, entry.num_bytes - at) // size
            if not self._free:
                self._end_oldest()
            memory = self._free.pop()
            pause("save.chunk")
            values, ready = source.start(at // size, memory, entry.dtype, numel)
            self._filling.append(_Chunk(memory, key, entry, at, values, ready))
            if len(self._filling) > _NUM_FILLING:
                self._send_oldest()

    def _send_oldest(self) -> None:
        """Start to write the chunk whose filling began first."""
        chunk = self._filling.popleft()
        self._writing.append(chunk)
        chunk.ticket.wait()
        values = chunk.values.view(torch.uint8)
        self._checksums[chunk.key].append(checksum(values))
        if not is_aligned(values):  # the end of an entry: the rest of its last block is padding
            whole = chunk.memory[: aligned(values.numel())]
            if values.data_ptr() != whole.data_ptr():
                whole[: values.numel()].copy_(values)
            whole[values.numel() :].zero_()
            values = whole
        place = self._plan.header_bytes + chunk.entry.start + chunk.at
        chunk.ticket = self._engine.start(self._file, values, place, writes=True)

    def _end_oldest(self) -> None:
        """Wait for the chunk whose writing began first."""
        if not self._writing:
            self._send_oldest()
        chunk = self._writing[0]
        chunk.ticket.wait()
        self._writing.popleft()
        self._free.append(chunk.memory)
        self._on_written(chunk.key, chunk.values.numel() * chunk.values.element_size())

    def finish(self) -> None:
        """Write the header, and wait until everything is on the disk."""
        while self._filling:
            self._send_oldest()
        while self._writing:
            self._end_oldest()
        missing = [key for key, entry in self._plan.entries.items() if len(self._checksums[key]) != entry.num_chunks]
        if missing:
            raise CheckpointError(f"{self._file.path}: {len(missing)} entries were not written, first {missing[0]!r}.")
        header = self._plan.header(self._checksums)
        memory = aligned_memory(len(header))[: len(header)]
        memory.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self._engine.start(self._file, memory, 0, writes=True).wait()
        os.fsync(self._file.descriptor)

    def close(self) -> None:
        """Wait for what is under way, and close the file."""
        try:
            self._engine.drain()
        finally:
            os.close(self._file.descriptor)
