"""Page-aligned memory that is used again: what moves between tiers passes through a few buffers, whatever the model's size."""

from __future__ import annotations

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
    """Lends memory and takes it back; holds no more than was ever lent at once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._free: list[torch.Tensor] = []
        ledger.reclaim_with(self.drop_free)

    def take(self, num_bytes: int) -> Buffer:
        """The smallest free buffer that is large enough, or a new one; its contents are whatever they were."""
        fitting = [m for m in self._free if m.numel() >= num_bytes]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            self._free = [m for m in self._free if m is not memory]
        else:
            self.drop_free()  # a larger one takes their place
            self._ledger.take(Tier.HOST, Kind.BUFFER, max(aligned(num_bytes), ALIGNMENT))
            memory = aligned_memory(num_bytes)
        return Buffer(memory, num_bytes)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        self._free.append(buffer.memory)

    def drop_free(self) -> None:
        """Give back what is not lent."""
        for memory in self._free:
            self._ledger.give(Tier.HOST, Kind.BUFFER, memory.numel())
        self._free.clear()
