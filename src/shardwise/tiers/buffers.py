"""Page-aligned memory that is used again: what moves between tiers passes through a few buffers, whatever the model's size."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from shardwise.tiers.disk import ALIGNMENT, aligned, aligned_memory
from shardwise.tiers.ledger import Kind, Ledger, Tier


class Buffer:
    """Memory on loan: `raw` is all of it, whole blocks; `as_vector` shows elements."""

    def __init__(self, memory: torch.Tensor, num_bytes: int) -> None:
        self.memory = memory
        self.raw = memory[: aligned(num_bytes)]

    def as_vector(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first elements, as a flat tensor."""
        return self.raw[: numel * dtype.itemsize].view(dtype)


class Buffers:
    """Lends memory of a tier and takes it back, from any thread; holds no more than was ever lent at once."""

    def __init__(self, ledger: Ledger, tier: Tier = Tier.HOST, make: Callable[[int], torch.Tensor] = aligned_memory) -> None:
        """`make` takes memory for so many bytes."""
        self._ledger = ledger
        self._tier = tier
        self._make = make
        self._lock = threading.RLock()  # the ledger may ask for what is free while something is taken
        self._free: list[torch.Tensor] = []
        ledger.reclaim_with(self.drop_free)

    def borrow(self, num_bytes: int) -> Buffer:
        """The smallest free buffer that is large enough, or a new one; its contents are whatever they were."""
        size = max(aligned(num_bytes), ALIGNMENT)
        with self._lock:
            fitting = [m for m in self._free if m.numel() >= size]
            if fitting:
                memory = min(fitting, key=torch.Tensor.numel)
                self._free = [m for m in self._free if m is not memory]
            else:
                self.drop_free()  # a larger one takes their place
                self._ledger.reserve(self._tier, Kind.BUFFER, size)
                try:
                    memory = self._make(size)
                except BaseException:
                    self._ledger.release(self._tier, Kind.BUFFER, size)
                    raise
        return Buffer(memory, num_bytes)

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        with self._lock:
            self._free.append(buffer.memory)

    @contextlib.contextmanager
    def returned(self, buffer: Buffer) -> Iterator[None]:
        """Take a buffer back when the context ends, unless it was interrupted: then something may still be moving."""
        try:
            yield
        except Exception:
            self.give_back(buffer)
            raise
        self.give_back(buffer)

    def drop_free(self) -> None:
        """Give back what is not lent."""
        with self._lock:
            for memory in self._free:
                self._ledger.release(self._tier, Kind.BUFFER, memory.numel())
            self._free.clear()
