"""A run that is dropped, closed or not, leaves nothing: no memory, no descriptors, no threads, no files."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import shardwise as sw
from cases import CASES, build
from shardwise.observe import process_memory
from shardwise.testing import RankPool

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer on disk": {"offload": sw.Offload(optimizer="disk")},
    "everything on disk": {"offload": "disk"},
    "16 bits": {"precision": "bf16"},
}


def _once(closes: bool, **options: Any) -> weakref.ref[Any]:
    run, model, opt, _, _ = build("gpt", "adamw", **options)
    for number in range(2):
        run.scaler.scale(CASES["gpt"].loss(model, number)).backward()
        opt.step()
        opt.zero_grad()
    CASES["gpt"].loss(model, 2)  # a graph that is never run
    found = weakref.ref(run._runtime)
    if closes:
        run.close()
    return found


def _account() -> dict[str, int]:
    for _ in range(100):  # what is under way keeps a run until it has ended; a lane's thread ends when it hears of it
        gc.collect()
        if not any(thread.name.startswith("shardwise-") for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    gc.collect()
    deleted = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "nameless files": sum("deleted" in target and "memfd" not in target for target in deleted),
        "shared memory": sum("memfd:shardwise" in target for target in deleted),
        "mappings": sum("shardwise" in line for line in open("/proc/self/maps")),
    }


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    ]


def _bytes_in_use() -> int:
    """What the C heap has handed out: freed memory that it keeps between threads' arenas grows with load, not with runs."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # an older C library
        return process_memory().total
    libc.mallinfo2.restype = _MallInfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def made_and_dropped(times: int, closes: bool, options: dict[str, Any]) -> dict[str, Any]:
    first = [_once(closes, **options) for _ in range(2)]
    before, memory, objects = _account(), _bytes_in_use(), len(gc.get_objects())
    refs = [_once(closes, **options) for _ in range(times - 2)]
    after = _account()
    return {
        "before": before,
        "after": after,
        "alive": sum(ref() is not None for ref in (*first, *refs)),
        "grown": _bytes_in_use() - memory,
        "objects": len(gc.get_objects()) - objects,
    }


def _check(found: dict[str, Any], times: int) -> None:
    assert found["alive"] == 0, f"{found['alive']} runs of {times} are still alive"
    assert all(found["after"][what] <= count for what, count in found["before"].items()), found
    assert found["grown"] < (1 << 20) + times * (64 << 10), f"{found['grown']} bytes more after {times} runs"
    assert found["objects"] < 1000, f"{found['objects']} Python objects more after {times} runs"


@pytest.mark.parametrize("transport", ["auto", "pairwise"])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2, 3])
def test_dropped_runs_leave_nothing(pool: RankPool, stage: int, transport: str) -> None:
    for found in pool.run(made_and_dropped, 6, False, {"stage": stage, "transport": transport}):
        _check(found, 6)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_dropped_placements_leave_nothing(pool: RankPool, name: str) -> None:
    for closes in (False, True):
        for found in pool.run(made_and_dropped, 6, closes, {"stage": 3, **PLACEMENTS[name]}):
            _check(found, 6)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "pairwise"])
@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_fifty_runs_of_every_placement(pool: RankPool, name: str, transport: str) -> None:
    for closes in (False, True):
        for found in pool.run(
            made_and_dropped, 50, closes, {"stage": 3, "transport": transport, **PLACEMENTS[name]}, timeout_s=300
        ):
            _check(found, 50)


def checked_twice() -> tuple[dict[str, int], dict[str, int], int]:
    run, _, _, _, _ = build("gpt", "adamw", stage=3)
    run.selfcheck(CASES["gpt"].loss, steps=1)
    before = _account()
    alive = len([o for o in gc.get_objects() if isinstance(o, torch.nn.Module)])
    for _ in range(3):
        run.selfcheck(CASES["gpt"].loss, steps=1)
    after = _account()
    grown = len([o for o in gc.get_objects() if isinstance(o, torch.nn.Module)]) - alive
    run.close()
    return before, after, grown


def test_selfcheck_leaves_no_models(pool: RankPool) -> None:
    for before, after, grown in pool.run(checked_twice):
        assert all(after[what] <= count for what, count in before.items()) and grown == 0
