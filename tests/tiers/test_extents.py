"""Free ranges of a linear space, and ranges of shelves and files that are released and reserved again."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from pathlib import Path

import pytest
import torch

from shardwise.errors import LifecycleError, MemoryBudgetError
from shardwise.tiers import DiskFile, DiskShelf, Extents, Kind, Ledger, Mover, Tier, aligned_memory
from shardwise.tiers import disk as disk_module


def test_random_reservations_never_overlap_and_nothing_is_lost() -> None:
    rng = random.Random(0)
    for _ in range(200):
        extents, size = Extents(), rng.randrange(1, 200)
        extents.release(0, size)
        taken: dict[int, int] = {}
        for _ in range(60):
            if taken and rng.random() < 0.45:
                start = rng.choice(list(taken))
                extents.release(start, taken.pop(start))
            else:
                length = rng.randrange(1, 40)
                found = extents.reserve(length)
                if found is None:
                    continue
                assert all(found + length <= s or s + n <= found for s, n in taken.items()), "overlap"
                assert found >= 0 and found + length <= size
                taken[found] = length
            assert extents.free == size - sum(taken.values())
        for start, length in taken.items():
            extents.release(start, length)
        assert extents.reserve(size) == 0, "all free ranges are joined again"


def test_a_range_is_not_released_twice() -> None:
    extents = Extents()
    extents.release(10, 10)
    for start, length in ((10, 10), (15, 2), (5, 6), (19, 4)):
        with pytest.raises(LifecycleError, match="released twice"):
            extents.release(start, length)


def test_a_shelf_releases_and_reserves(tmp_path: Path) -> None:
    ledger = Ledger()
    disk = DiskFile(tmp_path)
    mover = Mover(torch.device("cpu"), ledger)
    shelf = DiskShelf(disk, Kind.ACTIVATION, torch.float32, {0: 5000, 1: 3000, 2: 9000}, ledger, mover)
    before, blocks = ledger.now(Tier.DISK), os.fstat(disk.file.descriptor).st_blocks
    for unit, numel in ((0, 5000), (1, 3000), (2, 9000)):
        with shelf.borrowed(unit, keeps_changes=True, is_new=True) as vector:
            vector.copy_(torch.arange(numel) + unit)
    shelf.release(1)
    assert ledger.now(Tier.DISK) == before - 4096 * 4
    assert os.fstat(disk.file.descriptor).st_blocks < blocks, "the file system has the blocks"
    with pytest.raises(MemoryBudgetError, match="do not fit on this shelf"):
        shelf.reserve(7, 9000)
    shelf.reserve(7, 4000)
    with shelf.borrowed(7, keeps_changes=True) as vector:
        vector.fill_(7.0)
    for unit, numel in ((0, 5000), (2, 9000)):
        with shelf.borrowed(unit, keeps_changes=False) as vector:
            assert torch.equal(vector, (torch.arange(numel) + unit).float()), "neighbours are untouched"
    with pytest.raises(LifecycleError, match="already"):
        shelf.reserve(7, 1)
    mover.close()
    disk.close()


def test_a_file_reuses_what_was_released(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path)
    first, second = disk.reserve(10_000), disk.reserve(20_000)
    disk.release(first, 10_000)
    assert disk.reserve(8_000) == first
    assert disk.reserve(50_000) > second
    disk.close()


def test_reserving_in_the_middle_keeps_the_rest_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system cannot allocate, the size is set instead: it must never shrink."""

    class Refusing:
        argtypes: object = None

        def __call__(self, *_: object) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    library = type("Library", (), {"fallocate": Refusing()})
    monkeypatch.setattr(disk_module.ctypes, "CDLL", lambda *_, **__: library)
    disk = DiskFile(tmp_path)
    first, second = disk.reserve(4096), disk.reserve(4096)
    memory = aligned_memory(4096)
    memory.fill_(5)
    disk.write(memory, second).wait()
    disk.release(first, 4096)
    assert disk.reserve(4096) == first
    found = aligned_memory(4096)
    disk.read(found, second).wait()
    assert bool((found == 5).all())
    disk.close()
