"""Resident memory of this process: private pages plus its share of shared ones, page cache excluded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class ProcessMemory(NamedTuple):
    """Bytes resident now. `anonymous` is private memory, `shared` the proportional share of shared memory."""

    anonymous: int
    shared: int

    @property
    def total(self) -> int:
        """Private and shared bytes together."""
        return self.anonymous + self.shared


def process_memory(pid: int | str = "self") -> ProcessMemory:
    """Read the kernel's figures (`/proc/<pid>/smaps_rollup`); file pages are left out."""
    found = {"Pss_Anon": 0, "Pss_Shmem": 0}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        for line in lines:
            key, _, rest = line.partition(":")
            if key in found:
                found[key] = int(rest.split()[0]) * 1024
    return ProcessMemory(found["Pss_Anon"], found["Pss_Shmem"])


_SHARED_STEP_BYTES = 4 << 20
_SHARED_PERIOD_S = 1.0


def _counters() -> tuple[int, int]:
    """Bytes of private pages, and of all shared pages that this process maps, even if other processes map them too."""
    with open("/proc/self/status", "rb") as file:
        text = file.read()

    def figure(key: bytes) -> int:
        at = text.index(key) + len(key)
        return int(text[at : text.index(b"kB", at)]) * 1024

    return figure(b"RssAnon:"), figure(b"RssShmem:")


class MemorySampler:
    """Samples this process's memory from a thread and keeps the peak. Use as a context manager.

    Private memory is read from the kernel's counters. For this process's share of shared memory the kernel walks all pages,
    which slows the process down by tens of milliseconds per gigabyte. So it is read only when the counter of shared pages
    has changed, and otherwise once a second.
    """

    def __init__(self, period_s: float = 0.01, note: Callable[[int], None] | None = None) -> None:
        """`note` is called with every sample, by the thread that took it."""
        self.peak_bytes = 0
        self._note = note
        self._shared = 0
        self._mapped = -1  # the counter when the share was last read
        self._shared_due = 0.0
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="memory-sampler", daemon=True)

    def sample(self) -> int:
        """Take one sample now and return it."""
        anonymous, mapped = _counters()
        has_moved = abs(mapped - self._mapped) > _SHARED_STEP_BYTES
        if has_moved or (mapped and time.monotonic() >= self._shared_due):
            self._shared = process_memory().shared
            self._mapped = mapped
            self._shared_due = time.monotonic() + _SHARED_PERIOD_S
        now = anonymous + self._shared
        self.peak_bytes = max(self.peak_bytes, now)
        if self._note is not None:
            self._note(now)
        return now

    def __enter__(self) -> MemorySampler:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def _loop(self) -> None:
        while not self._stop.wait(self._period_s):
            self.sample()
