"""A pool of gloo ranks for tests: started once, used for many functions, and able to show their stacks when they hang."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["torch", "shardwise.testing", "torch._dynamo"]
"""Imported once, not once per rank. torch imports torch._dynamo at an optimizer's first step."""


class RankError(RuntimeError):
    """At least one rank raised, ended or did not answer; the message says what happened on every rank."""


class RankPool:
    """`world_size` processes with an initialised gloo group, reused for many functions. Use as a context manager."""

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._directory: Path | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; return the results in rank order or raise RankError."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = self._collect(self.timeout_s if timeout_s is None else timeout_s)
        if any(answer is None or answer[0] != "ok" for answer in answers):
            accounts = self._accounts(answers)
            self.close()
            raise RankError(accounts)
        return [answer[1] for answer in answers if answer is not None]

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="shardwise-pool-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, str(self._directory), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, timeout_s: float) -> list[tuple[str, Any] | None]:
        answers: list[tuple[str, Any] | None] = [None] * self.world_size
        deadline = time.monotonic() + timeout_s
        while any(answer is None for answer in answers) and time.monotonic() < deadline:
            waiting = [rank for rank, answer in enumerate(answers) if answer is None]
            multiprocessing.connection.wait([self._pipes[rank] for rank in waiting], timeout=0.2)
            for rank in waiting:
                answers[rank] = self._answer(rank)
            if any(answer is not None and answer[0] != "ok" for answer in answers):
                deadline = min(deadline, time.monotonic() + 5.0)  # its peers may wait for it forever
        return answers

    def _answer(self, rank: int) -> tuple[str, Any] | None:
        try:
            if self._pipes[rank].poll():
                answer: tuple[str, Any] = self._pipes[rank].recv()
                return answer
        except EOFError:
            return ("ended", f"exit code {self._processes[rank].exitcode}")
        return None

    def _accounts(self, answers: list[tuple[str, Any] | None]) -> str:
        parts = []
        for rank, answer in enumerate(answers):
            if answer is None:
                parts.append(f"rank {rank} did not answer; its stack:\n{self._stack(rank)}")
            elif answer[0] != "ok":
                parts.append(f"rank {rank} {answer[0]}:\n{answer[1]}")
            else:
                parts.append(f"rank {rank} finished")
        return "\n".join(parts)

    def _stack(self, rank: int) -> str:
        assert self._directory is not None
        with contextlib.suppress(OSError, TypeError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
            return (self._directory / f"stack-{rank}").read_text()
        return "(none: the process is gone)"

    def close(self) -> None:
        """End the processes and remove their files."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._processes, self._pipes, self._directory = [], [], None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _serve(rank: int, world_size: int, directory: str, pipe: Connection) -> None:
    stack = open(Path(directory) / f"stack-{rank}", "w")  # noqa: SIM115  kept open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(directory) / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    while (job := pipe.recv()) is not None:
        function, args, kwargs = job
        try:
            answer = ("ok", function(*args, **kwargs))
        except BaseException:
            answer = ("raised", traceback.format_exc())
        pipe.send(answer)
    dist.destroy_process_group()
