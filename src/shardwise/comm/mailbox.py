"""Passes chunks between ranks through shared memory: two slots per pair, and counters of the chunks posted and consumed.

The writer waits until the slot's previous chunk was consumed, the reader until the next one was posted.

Counters are single aligned 64-bit words. The data is written before the counter and read after it. x86-64 keeps this order;
`make_transport` uses mailboxes on x86-64 only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.comm.segment import PAGE_BYTES, SharedSegments
from shardwise.comm.watch import Operation, Watch
from shardwise.comm.world import World
from shardwise.errors import TransportError

SLOTS = 2
MAX_CHUNK_BYTES = 1 << 20
"""Small enough that a chunk stays in the cache between being written by one core and read by another."""


def chunk_bytes_for(limit_bytes: int, world_size: int) -> int:
    """The size of one chunk if all of a rank's slots together may take `limit_bytes`."""
    per_peer = limit_bytes // (SLOTS * max(world_size - 1, 1))
    return max(min(per_peer, MAX_CHUNK_BYTES) // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)


class PartedError(Exception):
    """Ranks no longer use these mailboxes. The transport catches this error; users never see it."""


class Mailboxes:
    """Outgoing slots and counters of every rank of one host.

    If `may_part` is set, a rank whose peer runs another operation leaves the mailboxes instead of failing. From then on no rank
    uses them: every call raises PartedError, also a call that is waiting.
    """

    def __init__(self, host: World, slot_bytes: int, watch: Watch) -> None:
        self.host = host
        self.slot_bytes = slot_bytes
        self.may_part = False
        self._watch = watch
        size = host.world_size
        num_words = size * (2 + 2 * SLOTS) + 1
        self._words_bytes = -(-8 * num_words // PAGE_BYTES) * PAGE_BYTES
        self._segments = SharedSegments(host, self._words_bytes + size * SLOTS * slot_bytes)
        words = [self._segments.words(rank, 0, num_words) for rank in range(size)]
        self._posted = [w[:size] for w in words]  # [writer][reader]: chunks posted
        self._consumed = [w[size : 2 * size] for w in words]  # [reader][writer]: chunks consumed
        self._labels = [w[2 * size : -1] for w in words]  # [writer][2 * (reader * SLOTS + slot)]: sequence, kind and Unit
        self._left = [w[-1:] for w in words]  # [rank][0]: whether it has left
        self._num_sent = [0] * size
        self._num_read = [0] * size

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's slots to other ranks, once they are touched."""
        return (self.host.world_size - 1) * SLOTS * self.slot_bytes

    @property
    def have_parted(self) -> bool:
        """Whether any rank has left the mailboxes."""
        return self.may_part and any(left[0] for left in self._left)

    def part(self) -> None:
        """Leave the mailboxes, and make the other ranks leave them."""
        self._left[self.host.rank][0] = 1

    def _wait(self, is_ready: Callable[[], bool], operation: Operation, peer: int, word: int, target: int) -> None:
        """Wait until a counter of `peer`, the number `word` of its words, has reached `target`: then `is_ready()`."""
        rank = self.host.ranks[peer]
        if not self.may_part:
            self._watch.until(is_ready, operation, lambda: [rank], [(self._segments.address(peer, word), target)])
            return

        def lagging() -> list[int]:
            if self._watch.will_not_come(operation, rank):
                self.part()
            return [] if self.have_parted else [rank]

        self._watch.until(lambda: self.have_parted or is_ready(), operation, lagging)
        if self.have_parted:
            raise PartedError

    def post(
        self, peer: int, operation: Operation, numel: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], object]
    ) -> None:
        """Write the next chunk for `peer`: `fill` is called with the memory to write to."""
        number = self._num_sent[peer]
        consumed = self._consumed[peer]
        me = self.host.rank
        self._wait(lambda: consumed[me] > number - SLOTS, operation, peer, self.host.world_size + me, number - SLOTS + 1)
        fill(self._slot(me, peer, number, numel, dtype))
        label = 2 * (peer * SLOTS + number % SLOTS)
        self._labels[me][label], self._labels[me][label + 1] = operation.sequence, operation.code
        self._posted[me][peer] = number + 1
        self._segments.wake(peer)
        self._num_sent[peer] = number + 1

    def read(
        self, peer: int, operation: Operation, numel: int, dtype: torch.dtype, use: Callable[[torch.Tensor], object]
    ) -> None:
        """Wait for the next chunk from `peer` and pass it to `use`, which must not keep it."""
        number = self._num_read[peer]
        posted = self._posted[peer]
        me = self.host.rank
        self._wait(lambda: posted[me] > number, operation, peer, me, number + 1)
        label = 2 * (me * SLOTS + number % SLOTS)
        found = (self._labels[peer][label], self._labels[peer][label + 1])
        if found != (operation.sequence, operation.code):
            if self.may_part:
                self.part()
                raise PartedError
            raise self._mismatch(peer, operation, *found)
        use(self._slot(peer, me, number, numel, dtype))
        self._consumed[me][peer] = number + 1
        self._segments.wake(self.host.world_size + peer)
        self._num_read[peer] = number + 1

    def _slot(self, writer: int, reader: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._words_bytes + (reader * SLOTS + number % SLOTS) * self.slot_bytes
        return self._segments.view(writer, start, numel, dtype)

    def _mismatch(self, peer: int, operation: Operation, sequence: int, code: int) -> TransportError:
        other = Operation.decode(operation.channel, sequence, code)
        return self._watch.failed(
            operation, [self.host.ranks[peer]], 0.0, f"but that rank sent its part of {self._watch.name(other)}: they disagree"
        )
