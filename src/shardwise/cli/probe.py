"""`shardwise probe`: measure this machine, show it, and keep it for the library."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from shardwise.observe import format_bytes
from shardwise.planner import Probe, keep_probe, probe
from shardwise.testing import RankPool

_LINK_NUMEL = 1 << 23


def run_probe(directory: Path, *, links: bool) -> None:
    """Measure, print a table, keep the result."""
    found = probe(directory)
    if links:
        found = dataclasses.replace(found, links=measure_links())
    show(found, Console())
    print(f"kept in {keep_probe(found)}")


def show(found: Probe, console: Console) -> None:
    """Print a table with one row per figure."""
    table = Table(title=f"{found.host}, {os.cpu_count()} cores, kernels {found.kernels}")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row("copy in memory", _rate(found.copy))
    for name, rates in (("read", found.disk_read), ("write", found.disk_write)):
        for block, rate in rates.items():
            table.add_row(f"disk {name}, blocks of {int(block) >> 10} KiB", _rate(rate))
    for dtype, rate in found.products.items():
        table.add_row(f"matrix product, {dtype}", f"{rate / 1e9:.1f} GFLOP/s")
    for transport, rate in found.links.items():
        table.add_row(f"gather between two ranks, {transport}", _rate(rate))
    console.print(table)
    console.print(f"disk: {found.disk_path}, {'direct' if found.disk_is_direct else 'through the page cache'}")


def _rate(rate: float) -> str:
    return f"{format_bytes(rate)}/s"


def measure_links() -> dict[str, float]:
    """Bytes per second that a rank receives when two local ranks gather a vector."""
    with RankPool(2) as pool:
        return {transport: min(pool.run(_gather_rate, transport)) for transport in ("shared", "pairwise")}


def _gather_rate(transport: str) -> float:
    from shardwise.comm import World, make_transport

    world = World.of(None, torch.device("cpu"))
    moved, _ = make_transport(transport, world, (), 24 << 20, 60.0)
    shard, full = torch.ones(_LINK_NUMEL), torch.empty(2 * _LINK_NUMEL)
    times = []
    for _ in range(4):
        moved.fence()
        begin = time.perf_counter()
        moved.gather(0, shard, full).wait()
        times.append(time.perf_counter() - begin)
    moved.close()
    return 4 * _LINK_NUMEL / sorted(times[1:])[1]
