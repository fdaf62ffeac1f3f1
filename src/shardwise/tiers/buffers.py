"""A pool of page-aligned buffers, so that transfers between tiers need a few buffers, whatever the model's size."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from shardwise.tiers.disk import ALIGNMENT, aligned, aligned_memory
from shardwise.tiers.ledger import Kind, Ledger, Tier


class Buffer:
    """A borrowed buffer: `raw` is its bytes, in whole blocks; `as_vector` views them as elements."""

    def __init__(self, memory: torch.Tensor, num_bytes: int) -> None:
        self.memory = memory
        self.raw = memory[: aligned(num_bytes)]

    def as_vector(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements as a flat tensor."""
        return self.raw[: numel * dtype.itemsize].view(dtype)


class Buffers:
    """A pool of buffers on one tier, for any thread. It holds no more than was ever borrowed at once."""

    def __init__(self, ledger: Ledger, tier: Tier = Tier.HOST, make: Callable[[int], torch.Tensor] = aligned_memory) -> None:
        """`make(num_bytes)` allocates memory."""
        self._ledger = ledger
        self._tier = tier
        self._make = make
        self._lock = threading.RLock()  # reentrant: the ledger may call `drop_free` during a reservation
        self._free: list[torch.Tensor] = []
        ledger.reclaim_with(self.drop_free)

    def borrow(self, num_bytes: int) -> Buffer:
        """Borrow the smallest free buffer that is large enough, or a new one. Its contents are undefined."""
        size = max(aligned(num_bytes), ALIGNMENT)
        with self._lock:
            fitting = [m for m in self._free if m.numel() >= size]
            if fitting:
                memory = min(fitting, key=torch.Tensor.numel)
                self._free = [m for m in self._free if m is not memory]
            else:
                self.drop_free()  # all are too small: the new one replaces them
                self._ledger.reserve(self._tier, Kind.BUFFER, size)
                try:
                    memory = self._make(size)
                except BaseException:
                    self._ledger.release(self._tier, Kind.BUFFER, size)
                    raise
        return Buffer(memory, num_bytes)

    def give_back(self, buffer: Buffer) -> None:
        """Return a borrowed buffer."""
        with self._lock:
            self._free.append(buffer.memory)

    @contextlib.contextmanager
    def returned(self, buffer: Buffer) -> Iterator[None]:
        """Return a buffer when the context ends, but not after a KeyboardInterrupt: a transfer may still be using it."""
        try:
            yield
        except Exception:
            self.give_back(buffer)
            raise
        self.give_back(buffer)

    def drop_free(self) -> None:
        """Free all buffers that are not borrowed."""
        with self._lock:
            for memory in self._free:
                self._ledger.release(self._tier, Kind.BUFFER, memory.numel())
            self._free.clear()
