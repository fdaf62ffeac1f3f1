"""Starts a benchmark's ranks as processes of their own on this host."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

if Path(sys.path[0]) == Path(__file__).parent:  # torch imports the standard library's `profile`, not our script of that name
    sys.path.append(sys.path.pop(0))


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


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
