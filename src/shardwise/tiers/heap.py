"""The C library's heap: memory that was freed but not returned to the system."""

from __future__ import annotations

import ctypes

RETURN_EVERY_BYTES = 256 << 20
"""Freed since the last time, before it is worth looking through the heap again."""


class Heap:
    """Has freed memory returned while a model is taken apart: what parameters were built in would otherwise stay resident."""

    def __init__(self) -> None:
        self._freed_bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it

    def freed(self, num_bytes: int) -> None:
        """Note that about so much was freed; now and then return it."""
        self._freed_bytes += num_bytes
        if self._freed_bytes >= RETURN_EVERY_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Return what is free."""
        self._freed_bytes = 0
        if self._trim is not None:
            self._trim(0)
