"""A job that is stopped by SIGTERM saves first and ends well; one that was killed goes on from its last checkpoint. Both end with
the bits of a job that was never interrupted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from launching import finish, run_ranks, started_ranks, without_launcher
from shardwise.checkpoint import read_manifest
from shardwise.checkpoint.chunks import Chunks
from shardwise.checkpoint.tensor_file import Reader

STEPS = 40
JOB = ("train", "--size", "tiny", "--batch", "2", "--sequence", "32", "--steps", str(STEPS), "--clip", "1.0", "--plain-log")


def argv(directory: Path, *args: str) -> list[str]:
    return ["-m", "shardwise.cli", *JOB, "--checkpoints", str(directory), "--checkpoint-every", "15", "--keep", "2", *args]


def bits(directory: Path) -> tuple[Any, list[str]]:
    """The losses of the whole job, to the last bit, and the checksums of all values in its last checkpoint."""
    path = directory / f"step-{STEPS:08d}"
    manifest = read_manifest(path)
    chunks = Chunks()
    sums = []
    for rank in range(manifest.world_size):
        reader = Reader(path / manifest.file_name(rank), chunks)
        sums.append(re.sub(r'"rng\.[^,}]*', "", reader.metadata["checksums"]))  # Python's generator is not seeded
        reader.close()
    chunks.close()
    return manifest.others, sums


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str]]:
    """What a job gives that nobody interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    code, shown = run_ranks(argv(directory), 2)
    assert code == 0, shown
    return bits(directory)


def stopped_after(shown: str) -> int:
    found = re.search(rf"stopped by SIGTERM after step (\d+) of {STEPS}; --resume goes on", shown)
    assert found is not None, shown
    return int(found[1])


def check_stopped_and_resume(directory: Path, shown: str, whole: tuple[Any, list[str]]) -> None:
    at = stopped_after(shown)
    assert 10 <= at < STEPS
    assert sw.Checkpoints(directory).all()[-1].name == f"step-{at:08d}"
    code, again = run_ranks(argv(directory, "--resume"), 2)
    assert code == 0 and f"resumed after step {at}" in again, again
    assert bits(directory) == whole
    assert all(name.startswith("step-") for name in os.listdir(directory)) and len(os.listdir(directory)) == 2


def test_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, whole: tuple[Any, list[str]]) -> None:
    with started_ranks(argv(tmp_path), 2) as ranks:
        ranks[0].wait_for_output("step 10/")
        ranks[1].send_signal(signal.SIGTERM)
        codes = [rank.finish() for rank in ranks]
        shown = ranks[0].out.read_text()
    assert codes == [0, 0], shown
    check_stopped_and_resume(tmp_path, shown, whole)


class Launched:
    """The command itself, in a session of its own; what it prints is in a file."""

    def __init__(self, directory: Path, out: Path) -> None:
        self._out = out
        with open(out, "w") as file:
            command = [sys.executable, *argv(directory)]
            self.process = subprocess.Popen(
                command, env=without_launcher(), stdout=file, stderr=file, text=True, start_new_session=True
            )

    @property
    def shown(self) -> str:
        return self._out.read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 240
        while text not in self.shown:
            assert self.process.poll() is None and time.monotonic() < deadline, self.shown
            time.sleep(0.005)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    job = Launched(tmp_path / "all", tmp_path / "out")
    try:
        job.wait_for("step 10/")
        yield job
    finally:
        finish(job.process, 0.1) if job.process.poll() is None else None


@pytest.mark.parametrize("whom", ["the launcher", pytest.param("all its processes", marks=pytest.mark.slow)])
def test_sigterm_to_the_command_saves_and_ends_with_code_0(
    launched: Launched, tmp_path: Path, whole: tuple[Any, list[str]], whom: str
) -> None:
    (os.kill if whom == "the launcher" else os.killpg)(launched.process.pid, signal.SIGTERM)
    assert launched.process.wait(120) == 0, launched.shown
    assert "Traceback" not in launched.shown
    check_stopped_and_resume(tmp_path / "all", launched.shown, whole)


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_from_its_last_checkpoint(
    launched: Launched, tmp_path: Path, whole: tuple[Any, list[str]]
) -> None:
    launched.wait_for("step 20/")
    os.killpg(launched.process.pid, signal.SIGKILL)
    launched.process.wait(30)
    time.sleep(1.0)  # until its processes, which are not children of this one, are gone
    code, again = run_ranks(argv(tmp_path / "all", "--resume"), 2)
    assert code == 0 and "resumed after step 15" in again, again
    assert bits(tmp_path / "all") == whole


@pytest.mark.slow
def test_sigterm_without_checkpoints_ends_the_command_as_ever(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+") as out:
        command = [sys.executable, "-m", "shardwise.cli", *JOB, "--steps", "100000"]
        process = subprocess.Popen(command, env=without_launcher(), stdout=out, stderr=out, start_new_session=True)
        try:
            deadline = time.monotonic() + 240
            while " 10/100000" not in (tmp_path / "out").read_text():
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(40)


def own_loop(directory: str, signalled: int) -> tuple[int, bool]:
    """A user's own loop, in which a rank gets SIGTERM in the middle of step 3."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    run = sw.shard(model, optimizer, stage=3)
    checkpoints = sw.Checkpoints(directory)
    before = signal.getsignal(signal.SIGTERM)
    with run.catching_sigterm() as stop_requested:
        for step in range(10):
            model(torch.ones(2, 8)).sum().backward()
            if step == 3 and rank == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.step()
            optimizer.zero_grad()
            if stop_requested():
                checkpoints.save(run, step + 1)
                break
    run.close()
    return step + 1, signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_users_own_loop_stops_on_all_ranks_at_once(pool: Any, tmp_path: Path, signalled: int) -> None:
    assert pool.run(own_loop, str(tmp_path), signalled) == [(4, True), (4, True)]
    assert os.listdir(tmp_path) == ["step-00000004"]


def test_ranks_end_with_the_command_that_started_them(launched: Launched, tmp_path: Path) -> None:
    ranks = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if session_of(pid) == launched.process.pid}
    assert len(ranks) > 3, "the command, what it forks ranks from, and ranks"
    os.kill(launched.process.pid, signal.SIGKILL)
    launched.process.wait(30)
    deadline = time.monotonic() + 60
    while any(session_of(pid) == launched.process.pid for pid in ranks):
        assert time.monotonic() < deadline, "ranks go on training"
        time.sleep(0.05)


def session_of(pid: int) -> int | None:
    """The session of a process that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[3])
