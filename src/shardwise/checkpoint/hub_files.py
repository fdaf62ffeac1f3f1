"""Writes tensors as a Hugging Face directory: safetensors files of a bounded size and, if there are several, an index.

All sizes are known before, so headers are planned first, and any rank may write any range of any tensor at its place.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.header import CHUNK_BYTES, Entry, framed, header_text
from shardwise.errors import ConfigError
from shardwise.ticket import Ticket
from shardwise.tiers import aligned_memory, checksum
from shardwise.tiers.io import File, IoEngine, make_engine

MAX_FILE_BYTES = 5_000_000_000
"""Data bytes of one file, unless a single tensor has more."""
_NUM_BUFFERS = 4  # chunks that are written at once
_ALIGN_BYTES = 8  # what the format's own library does


class HubPlan:
    """Which tensor lies where in which file."""

    def __init__(
        self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_file_bytes: int, stem: str = "model"
    ) -> None:
        """`tensors`: dtype and shape of each, in order. `stem`: how file names begin."""
        if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
            raise ConfigError(f"max_file_bytes={max_file_bytes!r} must be a positive whole number.")
        groups: list[list[str]] = [[]]
        room = max_file_bytes
        for key, (dtype, shape) in tensors.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes > room and groups[-1]:
                groups.append([])
                room = max_file_bytes
            groups[-1].append(key)
            room -= num_bytes
        self._stem = stem
        self.headers: dict[str, bytes] = {}
        self.entries: dict[str, Entry] = {}
        self.file_of: dict[str, str] = {}
        for number, keys in enumerate(groups, 1):
            name = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
            self._add_file(name, {key: tensors[key] for key in keys})

    def _add_file(self, name: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        at = 0
        found: dict[str, Entry] = {}
        # Wide elements first: every tensor then begins at a multiple of its element size.
        for key, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            found[key] = Entry(dtype, shape, at)
            at += found[key].num_bytes
        self.headers[name] = framed(header_text({"format": "pt"}, found), _ALIGN_BYTES)
        self.entries |= found
        self.file_of |= dict.fromkeys(found, name)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return self.data_bytes + sum(map(len, self.headers.values()))

    def mark(self) -> int:
        """A number that differs between different plans."""
        text = b"".join(name.encode() + header for name, header in self.headers.items())
        return checksum(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def file_bytes(self, name: str) -> int:
        """Size of one file."""
        data = sum(entry.num_bytes for key, entry in self.entries.items() if self.file_of[key] == name)
        return len(self.headers[name]) + data

    def place_of(self, key: str) -> int:
        """Where a tensor begins in its file."""
        return len(self.headers[self.file_of[key]]) + self.entries[key].start

    def create(self, place: Path, documents: Mapping[str, bytes]) -> None:
        """Make all files, with their headers and room for the data; `documents` are further small files, by name."""
        for name, header in self.headers.items():
            with open(place / name, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, self.file_bytes(name))  # a full disk is noticed now
                file.write(header)
        small = dict(documents)
        if len(self.headers) > 1:
            index: dict[str, Any] = {"metadata": {"total_size": self.data_bytes}, "weight_map": self.file_of}
            small[f"{self._stem}.safetensors.index.json"] = json_bytes(index)
        for name, content in small.items():
            with open(place / name, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())


class _ChunkWriter:
    """A few buffers through which chunks go to files in the background."""

    def __init__(self, engine: IoEngine) -> None:
        self._engine = engine
        self._buffers = [aligned_memory(CHUNK_BYTES) for _ in range(_NUM_BUFFERS)]
        self._tickets: list[Ticket | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory for the next chunk, at most CHUNK_BYTES. Fill it and pass it to `start`."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        ticket = self._tickets[self._turn]
        if ticket is not None:
            ticket.wait()
        return self._buffers[self._turn][:num_bytes]

    def start(self, file: File, memory: torch.Tensor, place: int) -> None:
        """Start writing the chunk that `buffer` returned last."""
        self._tickets[self._turn] = self._engine.start(file, memory, place, writes=True)

    def wait(self) -> None:
        """Wait until all chunks are written."""
        for ticket in self._tickets:
            if ticket is not None:
                ticket.wait()


class HubWriter:
    """Writes ranges of tensors into the files of a plan, converted to the dtypes of the plan."""

    def __init__(self, place: Path, plan: HubPlan) -> None:
        self._plan = plan
        self._engine: IoEngine = make_engine()
        self._files: dict[str, File] = {}
        try:
            self._chunks = _ChunkWriter(self._engine)
            for name in plan.headers:
                path = place / name
                self._files[name] = File(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW), str(path))
        except BaseException:
            self.close()
            raise

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Write elements from `start` on, row-major."""
        entry = self._plan.entries[key]
        size = entry.dtype.itemsize
        file, place = self._files[self._plan.file_of[key]], self._plan.place_of(key) + start * size
        values = values.detach()
        for at in range(0, values.numel(), CHUNK_BYTES // size):
            part = values[at : at + CHUNK_BYTES // size]
            memory = self._chunks.buffer(part.numel() * size)
            memory.view(entry.dtype).copy_(part)
            self._chunks.start(file, memory, place + at * size)

    def finish(self) -> None:
        """Wait until everything is on the disk."""
        self._chunks.wait()
        for file in self._files.values():
            os.fsync(file.descriptor)

    def close(self) -> None:
        """Wait for what is under way and close the files."""
        self._engine.drain()
        while self._files:
            os.close(self._files.popitem()[1].descriptor)
        self._engine.close()


def json_bytes(fields: Mapping[str, Any]) -> bytes:
    """JSON as Hugging Face tools write it."""
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
