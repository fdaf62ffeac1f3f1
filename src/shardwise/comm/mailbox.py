"""Chunks handed from rank to rank through shared memory: two slots per pair, a count of what was posted and consumed.

The writer waits until the slot's previous chunk was consumed, the reader until the next one was posted. Waiting sleeps
after a few looks, so that a peer on the same core can run; a peer that died or a wait past its limit raises.

Counters are single aligned 64-bit words. The data is written before the counter and read after it, in program order, which
x86-64 keeps; `make_transport` chooses this path there only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shardwise.comm.segment import PAGE_BYTES, SharedSegments
from shardwise.comm.world import World
from shardwise.errors import TransportError

SLOTS = 2
_LOOKS = 200  # before the first sleep: about the time a peer on another core needs to finish a chunk
_SLEEP_S = 50e-6
_ALIVE_S = 0.5  # how often a waiting rank checks that its peer still exists


class Mailboxes:
    """Every rank's outgoing slots and counters."""

    def __init__(self, world: World, slot_bytes: int, timeout_s: float) -> None:
        self.world = world
        self.slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        size = world.world_size
        self._words_bytes = -(-8 * size * (2 + SLOTS) // PAGE_BYTES) * PAGE_BYTES
        self._segments = SharedSegments(world, self._words_bytes + size * SLOTS * slot_bytes)
        words = [self._segments.words(rank, 0, size * (2 + SLOTS)) for rank in range(size)]
        self._posted = [w[:size] for w in words]  # [writer][reader]: chunks posted
        self._consumed = [w[size : 2 * size] for w in words]  # [reader][writer]: chunks consumed
        self._tags = [w[2 * size :] for w in words]  # [writer][reader * SLOTS + slot]: what the chunk is for
        self.names: dict[int, str] = {}  # what a tag is called in messages
        self._num_sent = [0] * size
        self._num_read = [0] * size

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's slots to other ranks, once they are touched."""
        return (self.world.world_size - 1) * SLOTS * self.slot_bytes

    def post(self, peer: int, tag: int, numel: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], object]) -> None:
        """Write the next chunk for `peer`; `fill` gets the memory to write to."""
        number = self._num_sent[peer]
        consumed = self._consumed[peer]
        me = self.world.rank
        self._await(lambda: consumed[me] > number - SLOTS, peer, tag, "to take an earlier chunk")
        fill(self._slot(me, peer, number, numel, dtype))
        self._tags[me][peer * SLOTS + number % SLOTS] = tag
        self._posted[me][peer] = number + 1
        self._num_sent[peer] = number + 1

    def read(self, peer: int, tag: int, numel: int, dtype: torch.dtype, use: Callable[[torch.Tensor], object]) -> None:
        """Wait for the next chunk from `peer` and hand it to `use`, which must not keep it."""
        number = self._num_read[peer]
        posted = self._posted[peer]
        me = self.world.rank
        self._await(lambda: posted[me] > number, peer, tag, "to send its part")
        found = self._tags[peer][me * SLOTS + number % SLOTS]
        if found != tag:
            raise TransportError(
                f"rank {me} is exchanging {self._name(tag)}, rank {peer} sent {self._name(found)}: "
                "the ranks disagree on the order."
            )
        use(self._slot(peer, me, number, numel, dtype))
        self._consumed[me][peer] = number + 1
        self._num_read[peer] = number + 1

    def _slot(self, writer: int, reader: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._words_bytes + (reader * SLOTS + number % SLOTS) * self.slot_bytes
        return self._segments.view(writer, start, numel, dtype)

    def _await(self, is_ready: Callable[[], bool], peer: int, tag: int, what: str) -> None:
        for _ in range(_LOOKS):
            if is_ready():
                return
        begin = checked = time.monotonic()
        while not is_ready():
            time.sleep(_SLEEP_S)
            now = time.monotonic()
            if now - checked > _ALIVE_S:
                checked = now
                self._check_peer(peer, tag, what, now - begin, is_ready)

    def _check_peer(self, peer: int, tag: int, what: str, waited_s: float, is_ready: Callable[[], bool]) -> None:
        waiting = f"rank {self.world.rank} waited {waited_s:.1f} s for rank {peer} {what} of {self._name(tag)}"
        if not _is_running(self._segments.pids[peer]) and not is_ready():
            raise TransportError(f"{waiting}; process {self._segments.pids[peer]} of rank {peer} has ended.")
        if waited_s > self._timeout_s:
            raise TransportError(f"{waiting}, longer than timeout_s={self._timeout_s:g}.")

    def _name(self, tag: int) -> str:
        return f"Unit {self.names[tag]!r}" if tag in self.names else f"Unit number {tag}"


def _is_running(pid: int) -> bool:
    """False for a process that is gone, or has ended and only waits for its parent to notice."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
