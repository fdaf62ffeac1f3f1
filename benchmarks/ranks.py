"""Starts a benchmark's ranks as processes of their own on this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import IO


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_ranks(commands: list[list[str]], timeout_s: float, what: str, log: IO[str] | None = None) -> None:
    """One process per command, as the ranks of one launch; ends them all, and the benchmark if one fails.

    `log`: takes what they print; by default they print here.
    """
    port = free_port()
    processes = [
        subprocess.Popen(command, env=rank_environment(rank, len(commands), port), stdout=log, stderr=log)
        for rank, command in enumerate(commands)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.wait(timeout=max(deadline - time.monotonic(), 1))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        sys.exit(f"{what} failed")


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set for one of `ranks` local processes, with the cores shared out evenly."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // ranks, 1)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
