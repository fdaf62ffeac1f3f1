"""Memory shared by the ranks of one host: anonymous files that end with the last process that maps them.

Every rank makes one file and opens those of its peers through `/proc`. No file has a name in the file system, so a killed run
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch

from shardwise.comm.world import World
from shardwise.errors import SharedMemoryError
from shardwise.native import library
from shardwise.tiers import FullBuffer, OverlaidBuffer

PAGE_BYTES = mmap.PAGESIZE
_Answer = TypeVar("_Answer")


def host_identity() -> tuple[str, int, int]:
    """An identity that is equal on ranks of one host: the same boot, process namespace and network namespace.

    Such ranks can open each other's files through `/proc`.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return f"no /proc on process {os.getpid()}", 0, 0


def available_bytes() -> int:
    """Available bytes of the machine and this process's control group; file pages that can be dropped count as available."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))
    return free


class SharedSegments:
    """One segment of equal size per rank of a host. Every rank maps all of them and writes its own."""

    def __init__(self, host: World, num_bytes: int, *, keeps_files: bool = False) -> None:
        """`keeps_files`: keep the files open, because overlays will be made of them."""
        self.host = host
        self.num_bytes = max(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
        self._check_room(min(host.gather_objects(available_bytes())))
        self._files: list[int] = []  # open files, this rank's own first
        self._by_rank: list[int] = []
        self._maps: list[mmap.mmap] = []
        weakref.finalize(self, _close_all, self._files)
        handles = self._agree(self._make)
        self.pids = [pid for pid, _ in handles]
        self._agree(lambda: self._map(handles))  # all ranks fail together, and none goes on before all have mapped
        if not keeps_files:
            _close_all(self._files)
        self.bytes = [torch.frombuffer(m, dtype=torch.uint8) for m in self._maps]

    def _agree(self, attempt: Callable[[], _Answer]) -> list[_Answer]:
        """Run `attempt` on every rank; return all results, or raise on every rank if it failed on any."""
        outcome = self.host.try_together(attempt, OSError)
        if outcome.first is not None:
            raise SharedMemoryError(
                f"shared memory for {self.host.world_size} ranks, {self.num_bytes} bytes each, cannot be had: "
                f"{outcome.first[1]}. Use transport='pairwise'."
            )
        return [cast(_Answer, answer) for answer in outcome.results]

    def _make(self) -> tuple[int, int]:
        """Make a file with all pages allocated, so that a lack of memory raises now and does not kill the process in a step."""
        own = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        self._files.append(own)
        os.posix_fallocate(own, 0, self.num_bytes)
        return os.getpid(), own

    def _map(self, handles: Sequence[tuple[int, int]]) -> None:
        for rank, (pid, number) in enumerate(handles):
            if rank != self.host.rank:
                self._files.append(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))
            self._by_rank.append(self._files[0 if rank == self.host.rank else -1])
            self._maps.append(mmap.mmap(self._by_rank[-1], self.num_bytes, flags=mmap.MAP_SHARED))

    def _check_room(self, room: int) -> None:
        """Raise if `room` is too small. It is the same on every rank, so that all of them raise."""
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

    def address(self, rank: int, word: int) -> int:
        """Address of a 64-bit counter at the beginning of rank `rank`'s segment."""
        return self.bytes[rank].data_ptr() + 8 * word

    def wake(self, word: int) -> None:
        """Wake ranks that wait for a counter at the beginning of this rank's segment; to be called after it was increased."""
        if (native := library()) is not None:
            native.sw_wake(self.address(self.host.rank, word))

    def overlay(self, ranges: Sequence[tuple[int, int]], length: int, dtype: torch.dtype, numel: int) -> FullBuffer:
        """Map the (rank, start) ranges, `length` bytes each, one after the other as one vector of `numel` elements."""
        return OverlaidBuffer([(self._by_rank[rank], start) for rank, start in ranges], length, dtype, numel)


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())
