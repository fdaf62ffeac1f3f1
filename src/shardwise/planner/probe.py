"""What can this machine do? Measures copies, matrix products and disk once, and keeps the result.

Takes a few seconds. The result is kept in the user's cache directory, by host, and read back by `cached_probe`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise import native
from shardwise.tiers import DiskFile, aligned_memory
from shardwise.tiers.io import make_engine

BLOCK_SIZES = (128 << 10, 1 << 20, 8 << 20)
_DISK_BYTES = 256 << 20
_COPY_NUMEL = 1 << 24
_ROUNDS = 5
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Bandwidths in bytes per second, matrix products in floating-point operations per second."""

    host: str
    kernels: str
    """Which native kernels are active."""
    copy: float
    """Bytes copied per second, memory to memory."""
    disk_path: str
    disk_is_direct: bool
    disk_read: dict[str, float]
    """By block size in bytes."""
    disk_write: dict[str, float]
    products: dict[str, float]
    """Products of square matrices, by dtype."""
    links: dict[str, float] = dataclasses.field(default_factory=dict)
    """Bytes per second that one of two local ranks receives in a gather, by transport."""


def probe(directory: str | os.PathLike[str]) -> Probe:
    """Measure this machine; the disk is the one `directory` is on."""
    reads, writes, is_direct = _disk_rates(directory)
    return Probe(
        host=socket.gethostname(),
        kernels=native.description(),
        copy=_copy_rate(),
        disk_path=os.fspath(directory),
        disk_is_direct=is_direct,
        disk_read=reads,
        disk_write=writes,
        products={str(dtype).removeprefix("torch."): _product_rate(dtype) for dtype in _PRODUCT_SIZES},
    )


_PRODUCT_SIZES = {torch.float32: 1024, torch.bfloat16: 256, torch.float16: 256}
"""Sizes of the matrices. 16-bit products may be emulated and a hundred times slower, so small ones are measured."""


def _best(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _copy_rate() -> float:
    source, target = torch.ones(_COPY_NUMEL), torch.empty(_COPY_NUMEL)
    target.copy_(source)
    return 4 * _COPY_NUMEL / _best(lambda: target.copy_(source))


def _product_rate(dtype: torch.dtype) -> float:
    size = _PRODUCT_SIZES[dtype]
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    left @ right
    return 2.0 * size**3 / _best(lambda: left @ right)


def _disk_rates(directory: str | os.PathLike[str]) -> tuple[dict[str, float], dict[str, float], bool]:
    reads, writes = {}, {}
    memory = aligned_memory(_DISK_BYTES).fill_(1)
    for block in BLOCK_SIZES:
        disk = DiskFile(directory, engine=make_engine(block_bytes=block))
        try:
            start = disk.reserve(_DISK_BYTES)
            disk.write(memory, start).wait()  # the first write of a range also allocates it
            writes[str(block)] = _DISK_BYTES / _best(lambda d=disk, s=start: d.write(memory, s).wait(), 3)  # type: ignore[misc]
            reads[str(block)] = _DISK_BYTES / _best(lambda d=disk, s=start: d.read(memory, s).wait(), 3)  # type: ignore[misc]
            is_direct = disk.is_direct
        finally:
            disk.close()
    return reads, writes, is_direct


def _cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardwise" / f"probe-{socket.gethostname()}.json"


def keep_probe(found: Probe) -> Path:
    """Write a result atomically to where `cached_probe` finds it."""
    path = _cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps({"version": _VERSION, **dataclasses.asdict(found)}, indent=1))
    beside.replace(path)
    return path


def cached_probe() -> Probe | None:
    """The last result of this host, if there is one that this version can read."""
    try:
        values = json.loads(_cache_path().read_text())
        if values.pop("version") != _VERSION:
            return None
        return Probe(**values)
    except (OSError, ValueError, KeyError, TypeError):
        return None
