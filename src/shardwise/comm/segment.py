"""Memory shared by the ranks of one host: anonymous files that vanish with the last process that maps them.

Every rank makes one file and opens its peers' through `/proc`; nothing has a name in the file system, so a killed run
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import torch

from shardwise.comm.world import World
from shardwise.errors import MemoryBudgetError, TransportError

PAGE_BYTES = mmap.PAGESIZE


def host_identity() -> tuple[str, int]:
    """Equal on two ranks of one boot and one process namespace, which can open each other's files through `/proc`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return f"no /proc on process {os.getpid()}", 0


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
    """One segment of equal size per rank, all mapped here; this rank writes its own."""

    def __init__(self, world: World, num_bytes: int) -> None:
        self.world = world
        self.num_bytes = max(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
        self._maps: list[mmap.mmap] = []
        own = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        os.ftruncate(own, self.num_bytes)
        handles = world.gather_objects((os.getpid(), own, available_bytes()))
        self.pids = [pid for pid, _, _ in handles]
        self._check_room(min(room for _, _, room in handles))
        try:
            for rank, (pid, number, _) in enumerate(handles):
                self._maps.append(self._map(own if rank == world.rank else None, pid, number))
        finally:
            world.barrier()  # nobody closes its file before everyone has opened it
            os.close(own)
        self.bytes = [torch.frombuffer(m, dtype=torch.uint8) for m in self._maps]

    def _map(self, own: int | None, pid: int, number: int) -> mmap.mmap:
        path = f"/proc/{pid}/fd/{number}"
        try:
            handle = os.open(path, os.O_RDWR) if own is None else os.dup(own)
        except OSError as error:
            raise TransportError(
                f"cannot open a peer's shared memory ({path}: {error.strerror}). Use transport='pairwise'."
            ) from error
        try:
            return mmap.mmap(handle, self.num_bytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(handle)

    def _check_room(self, room: int) -> None:
        """The same answer on every rank, so that none is left waiting."""
        needed = self.num_bytes * self.world.world_size
        if needed > room:
            raise MemoryBudgetError(
                f"shared memory for {self.world.world_size} ranks needs {needed} bytes, {room} are available. Use more ranks on "
                "more hosts, a higher stage, or a 16-bit precision."
            )

    def view(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements of rank `rank`'s segment from byte `start` on."""
        return self.bytes[rank][start : start + numel * dtype.itemsize].view(dtype)

    def words(self, rank: int, start: int, count: int) -> memoryview:
        """64-bit counters of rank `rank`'s segment from byte `start` on."""
        return memoryview(self._maps[rank])[start : start + 8 * count].cast("q")
