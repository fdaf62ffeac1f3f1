"""The disk engines beside fio, on the same directory, in one interleaved run.

    python benchmarks/disk.py [--directory DIR] [--size-mib 2048] [--rounds 5]

fio runs with its fastest engine for each mode. Ours read and write the same number of bytes of one preallocated file in requests
of 32 MiB, as the streamed step does. Ratios are of medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import fio
from shardwise import native
from shardwise.tiers import DiskFile, aligned_memory
from shardwise.tiers.io import BLOCK_BYTES, NUM_THREADS, NativeIo, PythonIo

REQUEST_BYTES = 32 << 20
UNDER_WAY = 4


def main() -> None:
    args = parse()
    fio.set_up()
    size = args.size_mib << 20
    with tempfile.TemporaryDirectory(prefix="shardwise-disk-", dir=args.directory) as name:
        directory = Path(name)
        engines = fio.best_engines(directory, size)
        library = native.library()
        ours = {"Python engine": DiskFile(directory, engine=PythonIo(NUM_THREADS, BLOCK_BYTES, 0))}
        if library is not None:
            ours["native engine"] = DiskFile(directory, engine=NativeIo(library, NUM_THREADS, BLOCK_BYTES, 0))
        buffers = [aligned_memory(REQUEST_BYTES).fill_(number) for number in range(2 * UNDER_WAY)]
        for disk in ours.values():
            disk.reserve(size)
            move(disk, buffers, "write", size)  # the first write of a range also allocates it
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(args.rounds):
            for mode in fio.MODES:
                found.setdefault(("fio", mode), []).append(fio.bandwidth(directory, mode, engines[mode], size))
                for label, disk in ours.items():
                    found.setdefault((label, mode), []).append(move(disk, buffers, mode, size))
        fio.clean_up(directory)
        is_direct = all(disk.is_direct for disk in ours.values())
    chosen = ", ".join(f"{mode} {engine}" for mode, engine in engines.items())
    print(f"{args.size_mib} MiB, direct {is_direct}, fio: {chosen}; medians of {args.rounds}\n")
    print("| engine | read GB/s | x fio | write GB/s | x fio | both GB/s | x fio |")
    print("|---" * 7 + "|")
    for label in ("fio", *ours):
        cells = []
        for mode in fio.MODES:
            middle = statistics.median(found[label, mode])
            cells += [f"{middle / 1e9:.2f}", f"{middle / statistics.median(found['fio', mode]):.2f}"]
        print(f"| {label} | {' | '.join(cells)} |")


def move(disk: DiskFile, buffers: list[torch.Tensor], mode: str, size: int) -> float:
    """Bytes per second of moving `size` bytes; in both directions at once, half of them each way."""
    tickets: list = [None] * len(buffers)
    begin = time.perf_counter()
    count = size // REQUEST_BYTES
    for number in range(count):
        at = number % UNDER_WAY
        writes = mode == "write" or (mode == "both" and number % 2 == 1)
        place = (number // 2 + (count // 2 if writes else 0)) if mode == "both" else number
        slot = at + (UNDER_WAY if writes else 0)
        if tickets[slot] is not None:
            tickets[slot].wait()
        start = disk.write if writes else disk.read
        tickets[slot] = start(buffers[slot], place * REQUEST_BYTES)
    for ticket in tickets:
        if ticket is not None:
            ticket.wait()
    return size / (time.perf_counter() - begin)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
