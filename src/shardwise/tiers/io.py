"""Moves bytes between memory and files in the background: the native engine, and one in Python that behaves the same.

Both split large requests into blocks, keep many in flight on a few threads, continue after short transfers and interrupted
calls, and release the GIL. A Ticket keeps the memory of its request alive until the request has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import random
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardwise import native
from shardwise.errors import DiskError
from shardwise.ticket import Ticket

NUM_THREADS = 8
BLOCK_BYTES = 1 << 20
_END_OF_FILE = -1  # used like an errno when the file ends early


class File(NamedTuple):
    """An open file, what to call it in messages, and what to do if it fails."""

    descriptor: int
    path: str
    remedy: str = ""
    """Instead of what is said of the files of offloaded states."""


class IoEngine(ABC):
    """A queue of reads and writes."""

    name: str

    @abstractmethod
    def start(self, file: File, memory: torch.Tensor, offset: int, *, writes: bool) -> Ticket:
        """Start moving all bytes of `memory` from (or, with `writes`, to) the file at `offset`."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until no request is in progress."""

    @abstractmethod
    def close(self) -> None:
        """Finish the queued requests and end the threads."""


def make_engine(*, num_threads: int = NUM_THREADS, block_bytes: int = BLOCK_BYTES, delay_us: int = 0) -> IoEngine:
    """The native engine if it was built, else the one in Python. `delay_us` (for tests) is the longest delay before a block."""
    library = native.library()
    if library is not None:
        return NativeIo(library, num_threads, block_bytes, delay_us)
    return PythonIo(num_threads, block_bytes, delay_us)


class _Request(Ticket):
    """Base of both engines' Tickets: the range of the request, and the error if it failed."""

    def __init__(self, file: File, memory: torch.Tensor, offset: int, writes: bool) -> None:
        self._file = file
        self._memory: torch.Tensor | None = memory
        self._length = memory.numel() * memory.element_size()
        self._offset = offset
        self._writes = writes
        self._failure: DiskError | None = None

    def _finish(self, error: int, offset: int, length: int) -> None:
        self._memory = None
        if error:
            remedy = self._file.remedy or _REMEDIES.get(error, _REMEDY)
            what = "the file ends there: it was truncated" if error == _END_OF_FILE else os.strerror(error)
            self._failure = DiskError(
                errno.EIO if error == _END_OF_FILE else error,
                f"{'writing' if self._writes else 'reading'} {length} bytes at offset {offset} of {self._file.path} failed: "
                f"{what} (request of {self._length} bytes at {self._offset}). {remedy}",
            )


_REMEDY = "States on this disk can no longer be trusted: check the disk and start again."
_REMEDIES = {errno.ENOSPC: "Free space on this file system, or name another directory in Offload(path=...), and start again."}


class NativeIo(IoEngine):
    """The engine of `native/io.cpp`."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, num_threads: int, block_bytes: int, delay_us: int) -> None:
        self._library = library
        self._handle: int | None = library.sw_io_open(num_threads, block_bytes, delay_us)
        self._calls = threading.Condition()  # reentrant: a request collected while it is held waits in __del__
        self._num_calls = 0  # calls that use the handle now
        if not self._handle:
            raise DiskError(errno.EAGAIN, f"the disk engine could not start {num_threads} threads.")

    def start(self, file: File, memory: torch.Tensor, offset: int, *, writes: bool) -> Ticket:
        """Queue one request."""
        length = memory.numel() * memory.element_size()
        with self._calling() as handle:
            if handle is None:
                raise _closed(file)
            number = self._library.sw_io_submit(handle, file.descriptor, writes, memory.data_ptr(), offset, length)
        if number < 0:
            raise DiskError(errno.ENOMEM, f"no memory to queue a request of {length} bytes for {file.path}.")
        return _NativeRequest(self, number, file, memory, offset, writes)

    def wait(self, number: int, timeout_s: float) -> tuple[int, int, int] | None:
        """(errno, offset, length) of a request, or None if it is still under way."""
        with self._calling() as handle:
            if handle is None:  # the engine was closed before this request was waited for
                return errno.ESHUTDOWN, 0, 0
            error, at, length = ctypes.c_int(), ctypes.c_int64(), ctypes.c_int64()
            if self._library.sw_io_wait(handle, number, timeout_s, error, at, length) == 1:
                return None
            self._library.sw_io_forget(handle, number)
            return error.value, at.value, length.value

    @contextlib.contextmanager
    def _calling(self) -> Iterator[int | None]:
        """Yield the handle, which `close` does not free while a call uses it; None after `close`."""
        with self._calls:
            handle = self._handle
            self._num_calls += handle is not None
        try:
            yield handle
        finally:
            if handle is not None:
                with self._calls:
                    self._num_calls -= 1
                    self._calls.notify_all()

    def drain(self) -> None:
        """Wait until the queue is empty and no thread is busy."""
        with self._calling() as handle:
            if handle is not None:
                self._library.sw_io_drain(handle)

    def close(self) -> None:
        """Finish the queued requests, end the threads and free the engine. Tickets may outlive it."""
        with self._calls:
            handle, self._handle = self._handle, None
            while self._num_calls:  # other threads wait for requests, which will end
                self._calls.wait()
        if handle is not None:
            self._library.sw_io_close(handle)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the threads end with the process
            self.close()


def _closed(file: File) -> DiskError:
    return DiskError(errno.EBADF, f"{file.path} is closed: run.close() gave its space back, and states on disk went with it.")


class _NativeRequest(_Request):
    def __init__(self, engine: NativeIo, number: int, file: File, memory: torch.Tensor, offset: int, writes: bool) -> None:
        super().__init__(file, memory, offset, writes)
        self._engine = engine
        self._number = number

    def is_done_within(self, patience_s: float) -> bool:
        return self._memory is None or self._look(patience_s)

    def _look(self, timeout_s: float) -> bool:
        outcome = self._engine.wait(self._number, timeout_s)
        if outcome is not None:
            self._finish(*outcome)
        return outcome is not None

    def wait(self) -> None:
        if self._memory is not None:
            self._look(-1.0)
        if self._failure is not None:
            raise self._failure

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None:  # never waited for: the memory must outlive the transfer
            self._look(-1.0)


class PythonIo(IoEngine):
    """The same engine with Python threads and `os.preadv` and `os.pwritev`, which release the GIL."""

    name = "Python"

    def __init__(self, num_threads: int, block_bytes: int, delay_us: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: queue.SimpleQueue[tuple[_PythonRequest, memoryview, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=_work_off, args=(self._blocks, self._lock, delay_us, n), name="shardwise-io", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._requests: weakref.WeakSet[_PythonRequest] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _end, self._blocks, num_threads)

    def start(self, file: File, memory: torch.Tensor, offset: int, *, writes: bool) -> Ticket:
        """Queue one request, block by block."""
        if not self._finalizer.alive:
            raise _closed(file)
        length = memory.numel() * memory.element_size()
        request = _PythonRequest(file, memory, offset, writes, -(-length // self._block_bytes))
        self._requests.add(request)
        view = memoryview((ctypes.c_char * length).from_address(memory.data_ptr())).cast("B") if length else memoryview(b"")
        for start in range(0, length, self._block_bytes):
            self._blocks.put((request, view[start : start + self._block_bytes], offset + start))
        return request

    def drain(self) -> None:
        """Wait for every request."""
        for request in list(self._requests):
            request.ended.wait()

    def close(self) -> None:
        """End the threads after the last request."""
        self._finalizer()
        for thread in self._threads:
            thread.join()


class _PythonRequest(_Request):
    def __init__(self, file: File, memory: torch.Tensor, offset: int, writes: bool, num_blocks: int) -> None:
        super().__init__(file, memory, offset, writes)
        self.file, self.writes = file, writes
        self.ended = threading.Event()
        self._left = num_blocks
        self._outcome = (0, 0, 0)
        if not num_blocks:
            self.ended.set()

    def finish_block(self, error: int, offset: int, length: int) -> None:
        """One block is done; called under the engine's lock."""
        if error and (not self._outcome[0] or offset < self._outcome[1]):
            self._outcome = (error, offset, length)
        self._left -= 1
        if not self._left:
            self.ended.set()

    def is_done_within(self, patience_s: float) -> bool:
        return self.ended.wait(patience_s)

    def wait(self) -> None:
        self.ended.wait()
        if self._memory is not None:
            self._finish(*self._outcome)
        if self._failure is not None:
            raise self._failure

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the threads that would finish it no longer run
            self.ended.wait()  # the memory must outlive the transfer


def _end(blocks: queue.SimpleQueue[tuple[_PythonRequest, memoryview, int] | None], num_threads: int) -> None:
    for _ in range(num_threads):
        blocks.put(None)


def _work_off(
    blocks: queue.SimpleQueue[tuple[_PythonRequest, memoryview, int] | None], lock: threading.Lock, delay_us: int, seed: int
) -> None:
    naps = random.Random(seed)
    while (block := blocks.get()) is not None:
        request, view, offset = block
        if delay_us:
            time.sleep(naps.uniform(0, delay_us) * 1e-6)
        error, moved = _move(request.file.descriptor, view, offset, request.writes)
        with lock:
            request.finish_block(error, offset + moved, len(view) - moved)
        del request, view, block  # while it waits for work, the thread must not keep memory alive


def _move(descriptor: int, view: memoryview, offset: int, writes: bool) -> tuple[int, int]:
    """Move all bytes of one block, in as many calls as it takes; return (errno or 0, bytes moved)."""
    moved = 0
    while moved < len(view):
        try:
            rest = [view[moved:]]
            done = os.pwritev(descriptor, rest, offset + moved) if writes else os.preadv(descriptor, rest, offset + moved)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                continue
            return error.errno or errno.EIO, moved
        if done == 0:
            return (errno.EIO if writes else _END_OF_FILE), moved
        moved += done
    return 0, moved
