"""The disk tier by itself: both engines move every byte, survive what a kernel may do, and say what went wrong where."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from marks import needs_native
from shardwise import native
from shardwise.errors import DiskError
from shardwise.tiers import ALIGNMENT, DiskFile, aligned_memory
from shardwise.tiers.io import File, IoEngine, NativeIo, PythonIo

ENGINES = [pytest.param("native", marks=needs_native), "Python"]


def make(name: str, *, threads: int = 4, block: int = 1 << 16, delay_us: int = 0) -> IoEngine:
    library = native.library()
    if name == "Python":
        return PythonIo(threads, block, delay_us)
    assert library is not None
    return NativeIo(library, threads, block, delay_us)


@pytest.fixture(params=ENGINES)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskFile]:
    found = DiskFile(tmp_path, engine=make(request.param, delay_us=300))
    yield found
    found.close()


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    memory = aligned_memory(num_bytes)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return memory


def test_everything_written_is_read_back_whatever_its_size_and_order(disk: DiskFile) -> None:
    order = random.Random(1)
    sizes = [ALIGNMENT * order.choice([1, 1, 2, 3, 16, 17, 40]) for _ in range(40)]
    values = [noise(size, seed) for seed, size in enumerate(sizes)]
    offsets = [disk.reserve(size) for size in sizes]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    places = list(range(40))
    order.shuffle(places)
    for ticket in [disk.write(values[i], offsets[i]) for i in places]:
        ticket.wait()
        ticket.wait()
    order.shuffle(places)
    found = {i: aligned_memory(sizes[i]) for i in places}
    tickets = [disk.read(found[i], offsets[i]) for i in places]
    assert all(ticket.is_done_within(30) for ticket in tickets)
    for ticket in tickets:
        ticket.wait()
    assert all(torch.equal(found[i], values[i]) for i in places)
    assert disk.bytes_written == disk.bytes_read == sum(sizes)
    disk.flush()


def test_neighbours_are_merged_and_still_complete_one_by_one(disk: DiskFile) -> None:
    start = disk.reserve(64 * ALIGNMENT)
    whole = noise(64 * ALIGNMENT)
    tickets = [disk.write(whole[i * ALIGNMENT : (i + 1) * ALIGNMENT], start + i * ALIGNMENT) for i in range(64)]
    for ticket in reversed(tickets):
        ticket.wait()
    found = aligned_memory(64 * ALIGNMENT)
    disk.read(found, start).wait()
    assert torch.equal(found, whole)


def test_a_ticket_keeps_its_memory_until_the_transfer_has_ended(disk: DiskFile) -> None:
    starts = [disk.reserve(1 << 20) for _ in range(20)]
    for seed, start in enumerate(starts):
        disk.write(noise(1 << 20, seed), start)  # neither ticket nor memory is kept here
    disk.engine.drain()
    found = aligned_memory(1 << 20)
    for seed, start in enumerate(starts):
        disk.read(found, start).wait()
        assert torch.equal(found, noise(1 << 20, seed))


def test_a_file_truncated_underneath_is_an_error_that_names_the_place(disk: DiskFile) -> None:
    start = disk.reserve(1 << 20)
    disk.write(noise(1 << 20), start).wait()
    os.truncate(f"/proc/self/fd/{disk.file.descriptor}", 300 * 1024)
    with pytest.raises(DiskError, match="truncated") as caught:
        disk.read(aligned_memory(1 << 20), start).wait()
    text = str(caught.value)
    assert str(disk.directory) in text and "offset 307200" in text and "reading" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_device_is_an_error_with_its_errno(engine: str) -> None:
    io = make(engine)
    descriptor = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(DiskError, match="No space left on device") as caught:
        io.start(File(descriptor, "/dev/full"), noise(ALIGNMENT), 0, writes=True).wait()
    assert caught.value.errno == errno.ENOSPC and "/dev/full" in str(caught.value) and "Free space" in str(caught.value)
    os.close(descriptor)
    io.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_may_only_be_read_refuses_writes(engine: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(ALIGNMENT))
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    io = make(engine)
    with pytest.raises(DiskError) as caught:
        io.start(File(descriptor, "x"), noise(ALIGNMENT), 0, writes=True).wait()
    assert caught.value.errno == errno.EBADF
    os.close(descriptor)
    io.close()


SHIM = """
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <algorithm>
#include <atomic>
static std::atomic<int> calls{0};
template <class Real> static ssize_t shimmed(Real real, int fd, const iovec *parts, int count, off_t at) {
  const char *fault = getenv("FAULT");
  const int call = calls++;
  if (!strcmp(fault, "interrupted") && call % 3 != 2) { errno = EINTR; return -1; }
  if (!strcmp(fault, "broken") && call == 4) { errno = EIO; return -1; }
  if (!strcmp(fault, "short")) {
    iovec first = parts[0];
    first.iov_len = std::min<size_t>(first.iov_len, 512 + (call % 5) * 64);  // never past the end of the caller's memory
    return real(fd, &first, 1, at);
  }
  return real(fd, parts, count, at);
}
extern "C" ssize_t preadv(int fd, const iovec *parts, int count, off_t at) {
  static auto real = reinterpret_cast<decltype(&preadv)>(dlsym(RTLD_NEXT, "preadv"));
  return shimmed(real, fd, parts, count, at);
}
extern "C" ssize_t pwritev(int fd, const iovec *parts, int count, off_t at) {
  static auto real = reinterpret_cast<decltype(&pwritev)>(dlsym(RTLD_NEXT, "pwritev"));
  return shimmed(real, fd, parts, count, at);
}
"""
SHIMMED = """
import sys, torch
from shardwise import native
from shardwise.errors import DiskError
from shardwise.tiers import aligned_memory
from shardwise.tiers.io import File, NativeIo
import os
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
io = NativeIo(native.library(), 3, 8192, 0)
values = torch.arange(65536, dtype=torch.int64).to(torch.uint8)
found = torch.zeros_like(values)
try:
    for start in range(0, 65536, 16384):
        io.start(File(fd, "the file"), values[start : start + 16384], start, writes=True).wait()
    io.start(File(fd, "the file"), found, 0, writes=False).wait()
    print("equal" if torch.equal(values, found) else "different")
except DiskError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    assert compiler, "this test interposes a library: it needs g++"
    place = tmp_path_factory.mktemp("shim")
    (place / "shim.cpp").write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", place / "shim.so", place / "shim.cpp", "-ldl"], check=True)
    return place / "shim.so"


@needs_native
@pytest.mark.parametrize(("fault", "expected"), [("short", "equal"), ("interrupted", "equal"), ("broken", "Input/output error")])
def test_the_native_engine_survives_what_a_kernel_may_do(shim: Path, tmp_path: Path, fault: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHIMMED, str(tmp_path / "file")],
        env={**os.environ, "LD_PRELOAD": str(shim), "FAULT": fault},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert expected in done.stdout, done.stdout + done.stderr
    if fault == "broken":
        assert "offset" in done.stdout and "the file" in done.stdout


def test_the_python_engine_survives_short_transfers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, parts, at, real=real: real(fd, [parts[0][:700]], at))
    io = PythonIo(3, 8192, 0)
    descriptor = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    values, found = noise(65536), aligned_memory(65536)
    io.start(File(descriptor, "x"), values, 0, writes=True).wait()
    io.start(File(descriptor, "x"), found, 0, writes=False).wait()
    assert torch.equal(values, found)
    io.close()
    os.close(descriptor)


def test_checksums_find_a_changed_byte(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, checks=True)
    start = disk.reserve(1 << 16)
    disk.write(noise(1 << 16), start).wait()
    found = aligned_memory(1 << 16)
    disk.read(found, start).wait()
    disk.flush()
    with open(f"/proc/self/fd/{disk.file.descriptor}", "r+b", buffering=0) as other:
        other.seek(5000)
        was = other.read(1)
        other.seek(5000)
        other.write(bytes([was[0] ^ 1]))
        os.fsync(other.fileno())
    with pytest.raises(DiskError, match="not what was written"):
        disk.read(found, start).wait()
    disk.close()


def test_a_directory_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="does not exist"):
        DiskFile(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="is not a directory"):
        DiskFile(tmp_path / "file")
    with pytest.raises(DiskError):
        DiskFile("/proc/self")  # nobody may make files there


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path)
    with pytest.raises(DiskError, match=r"free, .* more are needed") as caught:
        disk.reserve(1 << 60)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in str(caught.value)
    assert disk.size == 0
    disk.close()


def test_a_directory_in_memory_works_and_says_so(tmp_path: Path) -> None:
    disk = DiskFile("/dev/shm")
    assert "in memory" in disk.note
    start = disk.reserve(ALIGNMENT)
    disk.write(noise(ALIGNMENT), start).wait()
    found = aligned_memory(ALIGNMENT)
    disk.read(found, start).wait()
    assert torch.equal(found, noise(ALIGNMENT))
    disk.close()


def test_a_killed_process_leaves_nothing_and_its_neighbour_keeps_its_own(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from shardwise.tiers import DiskFile, aligned_memory
        disk = DiskFile(sys.argv[1])
        start = disk.reserve(64 << 20)
        disk.write(aligned_memory(64 << 20).fill_(7), start).wait()
        print("written", flush=True)
        time.sleep(60)
        """
    )
    mine = DiskFile(tmp_path)
    start = mine.reserve(1 << 20)
    mine.write(noise(1 << 20), start).wait()
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "written\n"
        during = mine.free_bytes
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert os.listdir(tmp_path) == [], "files have no names"
    deadline = time.monotonic() + 30
    while mine.free_bytes < during + (48 << 20) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert mine.free_bytes >= during + (48 << 20), "the space was not given back"
    found = aligned_memory(1 << 20)
    mine.read(found, start).wait()
    assert torch.equal(found, noise(1 << 20))
    mine.close()
