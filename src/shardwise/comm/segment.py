"""Memory shared by the ranks of one host: anonymous files that vanish with the last process that maps them.

Every rank makes one file and opens its peers' through `/proc`; nothing has a name in the file system, so a killed run
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from shardwise.comm.world import World
from shardwise.errors import SharedMemoryError
from shardwise.tiers import FullBuffer, OverlaidBuffer

PAGE_BYTES = mmap.PAGESIZE


def host_identity() -> tuple[str, int, int]:
    """Equal on two ranks of one boot, one process and one network namespace: what counts as one host here.

    Such ranks can open each other's files through `/proc`.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return f"no /proc on process {os.getpid()}", 0, 0


def available_bytes() -> int:
    """What the machine, and this process's control group, have left."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, limit - used)
    return free


class SharedSegments:
    """One segment of equal size per rank of a host, all mapped here; this rank writes its own."""

    def __init__(self, host: World, num_bytes: int) -> None:
        self.host = host
        self.num_bytes = max(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
        self._check_room(min(host.gather_objects(available_bytes())))
        own, problem = self._make()
        handles = host.gather_objects((os.getpid(), own, problem))
        self.pids = [pid for pid, _, _ in handles]
        self._files = [own]
        weakref.finalize(self, _close_all, self._files)
        problems = [found for _, _, found in handles if found is not None]
        if not problems:
            try:
                self._files[:] = [own if r == host.rank else _open_peer(pid, fd) for r, (pid, fd, _) in enumerate(handles)]
            except OSError as error:
                problem = f"a peer's shared memory cannot be opened ({error})"
            problems = [found for found in host.gather_objects(problem) if found is not None]  # everyone has opened all by now
        if problems:
            raise SharedMemoryError(f"shared memory for {host.world_size} ranks: {problems[0]}. Use transport='pairwise'.")
        self._maps = [mmap.mmap(file, self.num_bytes, flags=mmap.MAP_SHARED) for file in self._files]
        self.bytes = [torch.frombuffer(m, dtype=torch.uint8) for m in self._maps]

    def _make(self) -> tuple[int, str | None]:
        """A file whose pages are all there: running out of memory is an error here, not a signal in the middle of a step."""
        own = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(own, 0, self.num_bytes)
        except OSError as error:
            return own, f"{self.num_bytes} bytes cannot be had ({error.strerror})"
        return own, None

    def _check_room(self, room: int) -> None:
        """The same answer on every rank, so that none is left waiting."""
        needed = self.num_bytes * self.host.world_size
        if needed > room:
            raise SharedMemoryError(
                f"shared memory for {self.host.world_size} ranks needs {needed} bytes, {room} are available. Use more ranks on "
                "more hosts, a higher stage, or a 16-bit precision."
            )

    def view(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements of rank `rank`'s segment from byte `start` on."""
        return self.bytes[rank][start : start + numel * dtype.itemsize].view(dtype)

    def words(self, rank: int, start: int, count: int) -> memoryview:
        """64-bit counters of rank `rank`'s segment from byte `start` on."""
        return memoryview(self._maps[rank])[start : start + 8 * count].cast("q")

    def overlay(self, ranges: Sequence[tuple[int, int]], length: int, dtype: torch.dtype) -> FullBuffer:
        """The (rank, start) ranges, `length` bytes each, seen one after the other as one vector; nothing is copied."""
        return OverlaidBuffer([(self._files[rank], start) for rank, start in ranges], length, dtype)


def _open_peer(pid: int, number: int) -> int:
    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


def _close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)
