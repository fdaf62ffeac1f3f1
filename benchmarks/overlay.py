"""What it costs to make 28 MB of another process's shared memory usable: copying it against mapping it.

python benchmarks/overlay.py
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable

import torch

from shardwise.tiers import OverlaidBuffer, make_full_buffer

NUM_BYTES = 28 << 20


def milliseconds(work: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    file = os.memfd_create("overlay-benchmark")
    os.posix_fallocate(file, 0, NUM_BYTES)
    shards = torch.frombuffer(mmap.mmap(file, NUM_BYTES), dtype=torch.float32).normal_()
    overlaid = OverlaidBuffer([(file, 0), (file, NUM_BYTES // 2)], NUM_BYTES // 2, torch.float32, NUM_BYTES // 4)
    private = make_full_buffer(shards.numel(), torch.float32, torch.device("cpu"))
    assert torch.equal(overlaid.tensor, shards)
    x = torch.randn(128, 768)

    def products(full: torch.Tensor) -> None:
        for weight in full[: 3 * 768 * 3072].view(3, 768, 3072):
            torch.mm(x, weight)

    def copied() -> None:
        private.claim()
        private.tensor.copy_(shards)
        private.discard()

    def dropped() -> None:
        overlaid._map.madvise(mmap.MADV_DONTNEED)
        overlaid.tensor.sum()

    private.claim()
    private.tensor.copy_(shards)
    warm = milliseconds(lambda: products(private.tensor))
    mapped = milliseconds(lambda: products(overlaid.tensor))
    read = milliseconds(overlaid.tensor.sum)
    private.discard()
    print(f"copy into a fresh private vector and give it back    {milliseconds(copied):7.2f} ms")
    print(f"drop all pages of an overlay and find them again     {milliseconds(dropped) - read:7.2f} ms")
    print(f"look for written pages of an overlay, find none      {milliseconds(overlaid.discard):7.2f} ms")
    print(f"three products of 128 x 768 x 3072, private vector   {warm:7.2f} ms")
    print(f"the same from the overlay                            {mapped:7.2f} ms")


if __name__ == "__main__":
    main()
