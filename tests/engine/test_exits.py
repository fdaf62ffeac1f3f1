"""How a script ends while something is under way: by its own exit code, never by an abort."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from marks import needs_native
from shardwise import native
from shardwise.tiers import aligned_memory
from shardwise.tiers.io import File, NativeIo, PythonIo

BUSY_LANE = """
import time
import torch
from shardwise.ticket import Lane

def work():
    end = time.monotonic() + 0.4
    values = torch.randn(256, 256)
    while time.monotonic() < end:
        values = values @ values * 1e-3
    print("ended", flush=True)

lane = Lane("shardwise-test")
lane.submit(work)
time.sleep(0.05)
"""
STUCK_LANE = """
import threading
import time
from shardwise.ticket import Lane

stop = threading.Event()
def work():
    stop.wait(60.0)
    print("interrupted", flush=True)

lane = Lane("shardwise-test", stop.set)
lane.submit(work)
"""


@pytest.mark.parametrize(("script", "expected"), [(BUSY_LANE, "ended"), (STUCK_LANE, "interrupted")], ids=["busy", "stuck"])
def test_a_lane_is_not_inside_torch_when_the_interpreter_ends(script: str, expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize("library", [None, pytest.param(native.library(), marks=needs_native)], ids=["Python", "native"])
def test_an_engine_is_closed_while_another_thread_waits(tmp_path: Path, library: Any) -> None:
    for _ in range(20):
        io = PythonIo(2, 4096, 2000) if library is None else NativeIo(library, 2, 4096, 2000)
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        memory = aligned_memory(1 << 16)
        ticket = io.start(File(descriptor, "the file"), memory, 0, writes=True)
        waiter = threading.Thread(target=ticket.wait)
        waiter.start()
        io.close()
        waiter.join(timeout=30.0)
        assert not waiter.is_alive()
        ticket.wait()
        os.close(descriptor)


@pytest.mark.slow
def test_five_hundred_two_rank_runs_end_by_their_scripts() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "exits.py"), "500"],
        capture_output=True,
        text=True,
        timeout=7200,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    print(done.stdout[-500:])
    assert done.returncode == 0 and "0 processes ended otherwise" in done.stdout, done.stdout + done.stderr
