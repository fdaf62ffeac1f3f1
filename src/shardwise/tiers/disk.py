"""The disk tier: one file per rank in which every vector has its range.

The file has no name in its directory (or is unlinked at once), so the kernel frees its space when the process ends, however it
ends: nothing is left behind, and no other process opens it by mistake (`docs/decisions/0008-nameless-files.md`). Space is
allocated when it is reserved, so a disk that is too small raises before training starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from shardwise.errors import DiskError
from shardwise.observe import format_bytes, pause
from shardwise.ticket import Ticket
from shardwise.tiers.checksum import checksum
from shardwise.tiers.extents import Extents
from shardwise.tiers.io import File, IoEngine, make_engine
from shardwise.tiers.memory import MappedBuffer
from shardwise.tiers.pages import HUGE_PAGE_BYTES

ALIGNMENT = 4096
"""Alignment of offsets, lengths and addresses in bytes, as O_DIRECT needs it."""
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs")


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_memory(num_bytes: int) -> torch.Tensor:
    """Allocate private memory of whole pages, as bytes; the kernel provides pages when they are written.

    Large memory is a MappedBuffer, with huge pages where possible: O_DIRECT pins every page it transfers.
    """
    size = max(aligned(num_bytes), ALIGNMENT)
    if size >= HUGE_PAGE_BYTES:
        return MappedBuffer(size, torch.uint8).tensor
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector of zeros. If it is long and in host memory, it is aligned, so that the disk can read and write it directly."""
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(numel, dtype=dtype, device=device)
    return aligned_memory(num_bytes)[:num_bytes].view(dtype)


class DiskFile:
    """One rank's file: ranges are reserved, then read and written in the background."""

    def __init__(self, directory: str | os.PathLike[str], *, checks: bool = False, engine: IoEngine | None = None) -> None:
        self.directory = Path(directory)
        descriptor, self.is_direct = _open_nameless(self.directory)
        self.file = File(descriptor, f"the states' file in {self.directory}")
        self.engine = engine or make_engine()
        self._descriptors = [descriptor]  # this rank's own, then those of other ranks' files
        self._finalizer = weakref.finalize(self, _end, self.engine, self._descriptors)
        self._peers: list[File] = []
        self.size = 0
        self._extents = Extents()  # ranges that were released
        self.bytes_read = 0
        self.bytes_written = 0
        self._checksums: dict[tuple[int, int], int] | None = {} if checks else None

    # -- space ------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Free bytes of the file system."""
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize

    def require(self, num_bytes: int) -> None:
        """Raise if the file system has less than `num_bytes` free."""
        if num_bytes > self.free_bytes:
            raise DiskError(
                errno.ENOSPC,
                f"{self.directory} has {format_bytes(self.free_bytes)} free, {format_bytes(num_bytes)} more are needed for this "
                "rank's states. Free space there, name another directory in Offload(path=...), or keep some states in memory.",
            )

    def reserve(self, num_bytes: int) -> int:
        """Allocate a range of whole blocks and return its offset. A released range is reused if it is long enough."""
        assert self._finalizer.alive, "reserved after close"
        length = aligned(num_bytes)
        offset = self._extents.reserve(length) if length else None
        if offset is None:
            offset = self.size
        self.allocate(offset, length)
        self.size = max(self.size, offset + length)
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """Release a range; it may be reserved again."""
        self.punch(offset, num_bytes)
        self._extents.release(offset, aligned(num_bytes))

    def allocate(self, offset: int, num_bytes: int) -> None:
        """Allocate the blocks of a range, so that a full disk is noticed before anything is written."""
        length = aligned(num_bytes)
        self.require(length)
        if length:
            _allocate(self.file, offset, length)

    def punch(self, offset: int, num_bytes: int) -> None:
        """Return the blocks of a range to the file system, if it can take them; what the range reads as is undefined."""
        self.engine.drain()  # nothing may still be written there
        length = aligned(num_bytes)
        _punch(self.file, offset, length)
        if self._checksums is not None:
            self._forget(offset, length)

    # -- other ranks' files -----------------------------------------------------------------------------------

    @property
    def handle(self) -> tuple[int, int]:
        """What another process of this host needs to open the file: process and descriptor."""
        return os.getpid(), self.file.descriptor

    def open_peers(self, handles: Sequence[tuple[int, int]]) -> None:
        """Open the files of all ranks for reading, in rank order. They stay readable after their processes have ended."""
        for rank, (pid, number) in enumerate(handles):
            if (pid, number) == self.handle:
                self._peers.append(self.file)
                continue
            flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0)
            self._descriptors.append(os.open(f"/proc/{pid}/fd/{number}", flags))
            self._peers.append(File(self._descriptors[-1], f"the states' file of rank {rank} in {self.directory}"))

    def read_peer(self, rank: int, memory: torch.Tensor, offset: int) -> Ticket:
        """Start reading another rank's file, which has the same layout. It is not verified: only its owner has checksums."""
        pause("disk.read")
        self.bytes_read += _num_bytes(memory)
        return self.engine.start(self._peers[rank], memory, offset, writes=False)

    # -- moving -----------------------------------------------------------------------------------------------

    def read(self, memory: torch.Tensor, offset: int) -> Ticket:
        """Start reading the range at `offset` into `memory` (whole blocks, aligned)."""
        pause("disk.read")
        self.bytes_read += _num_bytes(memory)
        ticket = self.engine.start(self.file, memory, offset, writes=False)
        return ticket if self._checksums is None else _Checked(self, ticket, memory, offset)

    def write(self, memory: torch.Tensor, offset: int) -> Ticket:
        """Start writing `memory`, which must not change before the Ticket is waited for."""
        pause("disk.write")
        self.bytes_written += _num_bytes(memory)
        if self._checksums is not None:
            self._remember(memory, offset)
        return self.engine.start(self.file, memory, offset, writes=True)

    def _remember(self, memory: torch.Tensor, offset: int) -> None:
        assert self._checksums is not None
        length = _num_bytes(memory)
        self._forget(offset, length)  # a range is verified only if it is read exactly as it was written
        self._checksums[offset, length] = checksum(memory)

    def _forget(self, offset: int, length: int) -> None:
        assert self._checksums is not None
        for key in [k for k in self._checksums if k[0] < offset + length and offset < k[0] + k[1]]:
            del self._checksums[key]

    def verify(self, memory: torch.Tensor, offset: int) -> None:
        """Raise if what was read differs from what was written. Checks only ranges that were written in one call."""
        assert self._checksums is not None
        expected = self._checksums.get((offset, _num_bytes(memory)))
        if expected is not None and checksum(memory) != expected:
            raise DiskError(
                errno.EIO,
                f"{_num_bytes(memory)} bytes read at offset {offset} of {self.file.path} are not what was written there: the "
                "disk or another process changed them. Start again from a checkpoint, on another disk.",
            )

    def flush(self) -> None:
        """Wait until everything written is on the disk itself."""
        self.engine.drain()
        os.fdatasync(self.file.descriptor)

    @property
    def note(self) -> str:
        """For the report: a warning if the directory is in memory, on a network or without O_DIRECT; else empty."""
        kind = file_system_of(self.directory)
        if kind in _MEMORY_FILE_SYSTEMS:
            return f"{kind}: this directory is in memory, so nothing is saved by it"
        if kind in _NETWORK_FILE_SYSTEMS:
            return f"{kind}: a network file system, slower than a local disk"
        return "" if self.is_direct else f"{kind}: no direct access, so bytes go through the page cache"

    def close(self) -> None:
        """End the threads and free the space."""
        self._finalizer()


def _end(engine: IoEngine, descriptors: list[int]) -> None:
    engine.close()  # first, because it may still use the files
    while descriptors:
        os.close(descriptors.pop())


class _Checked(Ticket):
    """A read that is verified when it is waited for."""

    def __init__(self, disk: DiskFile, ticket: Ticket, memory: torch.Tensor, offset: int) -> None:
        self._disk, self._ticket, self._memory, self._offset = disk, ticket, memory, offset
        self._is_verified = False

    def is_done_within(self, patience_s: float) -> bool:
        return self._ticket.is_done_within(patience_s)

    def wait(self) -> None:
        self._ticket.wait()
        if not self._is_verified:
            self._disk.verify(self._memory, self._offset)
            self._is_verified = True


def file_system_of(path: Path) -> str:
    """The kernel's name for the type of file system that a path is on; empty if it is not known."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return ""


def _open_nameless(directory: Path) -> tuple[int, bool]:
    """Open a file without a name; return its descriptor and whether it supports O_DIRECT."""
    if not directory.is_dir():
        if directory.exists():
            raise DiskError(errno.ENOTDIR, f"{directory} is not a directory. Name one that is (path=...).")
        raise DiskError(errno.ENOENT, f"directory {directory} does not exist. Make it, or name another one (path=...).")
    try:
        descriptor = _open_anonymous(directory)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DiskError(
                error.errno,
                f"directory {directory} cannot be written: {error.strerror}. Name one that this user may write in, as path=....",
            ) from None
        raise DiskError(error.errno or errno.EIO, f"no file could be made in {directory}: {error.strerror}.") from None
    return descriptor, make_direct(descriptor)


def make_direct(descriptor: int) -> bool:
    """Set O_DIRECT for a new file that is open for reading and writing, if it can be used; return whether it can.

    The file may have a first block of zeros afterwards.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        if _takes_direct(descriptor):
            return True
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return False


def _open_anonymous(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, path = tempfile.mkstemp(prefix=".shardwise-", dir=directory)
    os.unlink(path)
    return descriptor


def reads_direct(descriptor: int) -> None:
    """Read the first block of a file that was opened with O_DIRECT; raises OSError where only opening works."""
    block = aligned_memory(ALIGNMENT)
    os.preadv(descriptor, [memoryview((ctypes.c_char * ALIGNMENT).from_address(block.data_ptr())).cast("B")], 0)


def _takes_direct(descriptor: int) -> bool:
    block = aligned_memory(ALIGNMENT)
    view = memoryview((ctypes.c_char * ALIGNMENT).from_address(block.data_ptr())).cast("B")
    try:
        took = os.pwritev(descriptor, [view], 0) == ALIGNMENT == os.preadv(descriptor, [view], 0)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return True
        took = False
    return took


def _allocate(file: File, offset: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    while libc.fallocate(file.descriptor, 0, offset, length) != 0:
        error = ctypes.get_errno()
        if error == errno.EINTR:
            continue
        if error in (errno.EOPNOTSUPP, errno.ENOSYS):  # only set the size; writes allocate the blocks
            if os.fstat(file.descriptor).st_size < offset + length:
                os.ftruncate(file.descriptor, offset + length)
            return
        raise DiskError(
            error,
            f"allocating {format_bytes(length)} at offset {offset} of {file.path} failed: {os.strerror(error)}. Free space there "
            "or name another directory in Offload(path=...).",
        )


_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def _punch(file: File, offset: int, length: int) -> None:
    """Free the blocks of a range, if the file system can; otherwise they stay until the file is closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if length:
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        libc.fallocate(file.descriptor, _PUNCH_HOLE, offset, length)


def _num_bytes(memory: torch.Tensor) -> int:
    return memory.numel() * memory.element_size()
