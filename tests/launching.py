"""Programs that tests start: bounded in time, and ended with everything that they started.

`run_program` starts a new interpreter. `Forked` and `run_ranks` run a Python program in processes forked from one that has
imported torch, as the ranks of a RankPool are: importing it takes seconds of CPU time in every process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.testing.pool import PRELOAD

TIMEOUT_S = 240.0
"""Generous: several processes import torch at once, and other tests run beside them."""
_PATIENCE_S = 20.0


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Wait for a program of its own session; when time is up, end it and what it has started."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_program(
    command: Sequence[str], *, env: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    return finish(process, timeout_s)


_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def without_launcher() -> dict[str, str]:
    """This process's environment without what a launcher of ranks sets."""
    return {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}


class Forked:
    """A Python program in a forked process and a session of its own. `argv` is what follows `python` on a command line."""

    def __init__(self, argv: Sequence[str], *, out: Path, env: Mapping[str, str], network: str | None = None) -> None:
        """What it prints is appended to the file `out`, errors too. `network`: a network namespace to run in."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.out = out
        self._process = context.Process(target=_main, args=(list(argv), str(out), dict(env), network), daemon=True)
        self._process.start()

    def wait_for_output(self, start: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until it has printed a whole line that begins with `start`."""
        deadline = time.monotonic() + timeout_s
        while not any(line.startswith(start) and line.endswith("\n") for line in self.out.read_text().splitlines(keepends=True)):
            is_alive, code = self._process.is_alive(), self._process.exitcode
            assert is_alive and time.monotonic() < deadline, f"exit code {code}, {self.out.read_text()!r}"
            time.sleep(0.005)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def finish(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end and return its exit code; when time is up, end it and what it has started."""
        assert self._process.pid is not None
        try:
            self._process.join(timeout_s)
        finally:
            if self._process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.kill()
                self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code


def _main(argv: list[str], out: str, env: dict[str, str], network: str | None) -> None:
    os.setsid()
    if network is not None:
        with open(f"/var/run/netns/{network}") as space:
            assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    shown = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(shown, 1)
    os.dup2(shown, 2)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    what, *args = argv
    try:
        if what == "-m":
            sys.argv = args
            runpy.run_module(args[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(what).parent))
            runpy.run_path(what, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process ends without them


@contextlib.contextmanager
def started_ranks(argv: Sequence[str], ranks: int, **variables: str) -> Iterator[list[Forked]]:
    """A program as so many ranks of this host, as torchrun starts it. They are ended with the context."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the agent's, in torchrun's words
    env = {**without_launcher(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        out.touch()
        running = [Forked(argv, out=out, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
        try:
            yield running
        finally:
            for process in running:
                process.finish(0)


def run_ranks(argv: Sequence[str], ranks: int, *, timeout_s: float = TIMEOUT_S, **variables: str) -> tuple[int, str]:
    """Run a program as so many ranks of this host, as torchrun does. Returns the largest exit code and what was printed."""
    with started_ranks(argv, ranks, **variables) as running:
        codes = [process.finish(timeout_s) for process in running]
        return max(codes, key=abs), running[0].out.read_text()
