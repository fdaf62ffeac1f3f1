"""Returns freed memory to the system, which the C library's heap would keep otherwise.

`Heap` is called while a model is sharded, `SteadyHeap` after every step. Only glibc has `malloc_trim`; with other C libraries
both do nothing. `docs/decisions/0021-steady-memory.md` has the reasons.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

RETURN_EVERY_BYTES = 256 << 20
"""How many bytes must be freed before the heap is trimmed again; trimming walks the whole heap."""

TOLERANCE = 0.01
"""How far private memory may be above its level after the last trim, as a fraction of it, before the heap is trimmed again."""

SHARE = 0.2
"""The largest share of CPU time that trims may take, with the page faults that they cause."""

_MOST_CREDIT_S = 2.0
_TRIED_BYTES = 1 << 20


class Heap:
    """Trims the heap while a model is sharded. Otherwise the memory of the original parameters would stay resident."""

    def __init__(self) -> None:
        self._freed_bytes = 0
        self._trim = _malloc_trim()

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


class Readings(NamedTuple):
    """What `SteadyHeap` reads and does; tests replace it."""

    private_bytes: Callable[[], int]
    """Private memory of this process that is resident now."""
    trim: Callable[[], None]
    """Return free heap memory to the system."""
    cpu_s: Callable[[], float]
    """CPU seconds that this process has used."""
    touch_s_per_byte: Callable[[], float]
    """CPU seconds that it takes to get a byte back from the system."""


class SteadyHeap:
    """Keeps private memory level from step to step, where the C library's heap would keep what the longest steps have freed."""

    def __init__(self, release: Callable[[], None], readings: Readings | None = None) -> None:
        """`release` gives up memory that is only kept for reuse. `readings`: of this process, unless given."""
        self._release = release
        self._readings = _process_readings() if readings is None else readings
        self.is_on = self._readings is not None
        """Whether the heap is trimmed. Always False where the C library cannot."""
        self.num_trims = 0
        self.cost_s = 0.0
        """CPU seconds of all trims, with an upper estimate of the page faults that they have caused."""
        self._num_steps = 0
        self._level_bytes = 0  # the least private memory after a step, or what a trim has left if that was more
        self._credit_s = 0.0
        self._seen_cpu_s = 0.0

    def after_step(self) -> None:
        """Trim if private memory has risen, unless trims have used up their share of the time.

        The first step's trim removes what building has left. The second step, with all that is kept for reuse, sets the level:
        a loop whose sizes repeat is not trimmed any more.
        """
        if not self.is_on or self._readings is None:
            return
        self._num_steps += 1
        now, before = self._readings.cpu_s(), self._readings.private_bytes()
        if self._num_steps > 1:
            self._credit_s = min(self._credit_s + SHARE * (now - self._seen_cpu_s), _MOST_CREDIT_S)
        self._seen_cpu_s = now
        if self._num_steps == 1:
            self._trim(now, before)
        elif self._num_steps == 2 or not self._has_risen(before):
            self._level_bytes = before if self._num_steps == 2 else min(self._level_bytes, before)
        elif self._credit_s >= 0:
            self._level_bytes = max(self._level_bytes, self._trim(now, before))

    def _has_risen(self, private_bytes: int) -> bool:
        return private_bytes > self._level_bytes * (1 + TOLERANCE)

    def _trim(self, began_s: float, before: int) -> int:
        """Return free memory, and if that is not enough also what is kept for reuse; private memory that is left."""
        assert self._readings is not None
        self._readings.trim()
        after = self._readings.private_bytes()
        if self._num_steps > 1 and self._has_risen(after):
            self._release()
            self._readings.trim()
            after = self._readings.private_bytes()
        cost_s = self._readings.cpu_s() - began_s + max(before - after, 0) * self._readings.touch_s_per_byte()
        self._credit_s -= cost_s
        self.cost_s += cost_s
        self.num_trims += 1
        return after


def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only


def _process_readings() -> Readings | None:
    trim = _malloc_trim()
    try:
        _private_bytes()
    except OSError:  # no /proc
        return None
    return None if trim is None else Readings(_private_bytes, lambda: trim(0), time.process_time, _touch_s_per_byte)


def _private_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


@functools.cache
def _touch_s_per_byte() -> float:
    """Time the first write to new pages: the least of three trials."""
    trials = []
    for _ in range(3):
        with mmap.mmap(-1, _TRIED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            begin = time.thread_time()
            memory.write(b"\1" * _TRIED_BYTES)
            trials.append((time.thread_time() - begin) / _TRIED_BYTES)
    return min(trials)
