"""A few chunks of a checkpoint's files in memory: those that were used last, and the next ones, which are being read meanwhile.

They are read past the page cache where the file system can; elsewhere by one thread, so that the kernel reads ahead.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses

import torch

from shardwise.checkpoint.header import CHUNK_BYTES
from shardwise.ticket import Ticket
from shardwise.tiers import aligned, aligned_memory
from shardwise.tiers.io import File, IoEngine, make_engine

_NUM_BUFFERS = 6
NUM_AHEAD = 3
"""Chunks behind the one in use that are being read."""


Key = tuple[object, str, int]
"""Identifies a chunk: the reader of its file, its entry, and its number in the entry."""


@dataclasses.dataclass
class _Chunk:
    memory: torch.Tensor
    ticket: Ticket


class Chunks:
    """The buffers and threads with which the files of one checkpoint are read. Not for several threads."""

    def __init__(self) -> None:
        self._free = [aligned_memory(CHUNK_BYTES) for _ in range(_NUM_BUFFERS)]
        self._held: collections.OrderedDict[Key, _Chunk] = collections.OrderedDict()  # least recently used first
        self._engines: dict[bool, IoEngine] = {}

    def start(self, key: Key, file: File, place: int, num_bytes: int, *, is_direct: bool) -> bool:
        """Start to read a chunk, unless it is held already; return whether it was not."""
        if key in self._held:
            self._held.move_to_end(key)
            return False
        if not self._free:
            _, oldest = self._held.popitem(last=False)
            with contextlib.suppress(OSError):  # nobody has asked for it; if somebody does, it is read again
                oldest.ticket.wait()
            self._free.append(oldest.memory)
        memory = self._free.pop()
        target = memory[: aligned(num_bytes) if is_direct else num_bytes]
        try:
            self._held[key] = _Chunk(memory, self.read(file, target, place, is_direct=is_direct))
        except BaseException:
            self._free.append(memory)
            raise
        return True

    def read(self, file: File, memory: torch.Tensor, place: int, *, is_direct: bool) -> Ticket:
        """Start to read bytes into memory of the caller's."""
        if is_direct not in self._engines:
            self._engines[is_direct] = make_engine() if is_direct else make_engine(num_threads=1, block_bytes=CHUNK_BYTES)
        return self._engines[is_direct].start(file, memory, place, writes=False)

    def get(self, key: Key, num_bytes: int) -> torch.Tensor:
        """The bytes of a chunk that was started, valid until others are asked for."""
        chunk = self._held[key]
        try:
            chunk.ticket.wait()
        except BaseException:
            self._free.append(self._held.pop(key).memory)
            raise
        return chunk.memory[:num_bytes]

    def drop(self, owner: object) -> None:
        """Forget the chunks of a file that will be closed."""
        mine = [key for key in self._held if key[0] is owner]
        if mine:
            for engine in self._engines.values():
                engine.drain()
        self._free += [self._held.pop(key).memory for key in mine]

    def close(self) -> None:
        """Wait for what is being read, and end the threads."""
        for engine in self._engines.values():
            engine.drain()
            engine.close()
