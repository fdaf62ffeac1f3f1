"""Returns freed memory to the system, which the C library's heap would keep otherwise. Called while a model is sharded."""

from __future__ import annotations

import ctypes

RETURN_EVERY_BYTES = 256 << 20
"""How many bytes must be freed before the heap is trimmed again; trimming walks the whole heap."""


class Heap:
    """Trims the heap while a model is sharded. Otherwise the memory of the original parameters would stay resident."""

    def __init__(self) -> None:
        self._freed_bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only

    def freed(self, num_bytes: int) -> None:
        """Record that about `num_bytes` were freed; trim the heap every RETURN_EVERY_BYTES."""
        self._freed_bytes += num_bytes
        if self._freed_bytes >= RETURN_EVERY_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Return free heap memory to the system."""
        self._freed_bytes = 0
        if self._trim is not None:
            self._trim(0)
