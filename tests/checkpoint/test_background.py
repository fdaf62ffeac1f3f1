"""A save in the background: training goes on at once, and the checkpoint is that of the moment of the call."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_save_and_load import DISK, Options, assert_same, loaded, states, train, whole

import shardwise as sw
from cases import Patched, build
from shardwise.errors import CheckpointError
from shardwise.observe import delays
from shardwise.testing import RankPool


def slow(edge: str) -> None:
    """Chunks of a save take so long that the next step usually comes before the last ones are read."""
    if edge == "save.chunk":
        time.sleep(0.02)


class Gate:
    """A save writes nothing before the gate is opened; afterwards its chunks are slow."""

    def __init__(self) -> None:
        self._is_open = threading.Event()

    def __call__(self, edge: str) -> None:
        if edge == "save.chunk":
            assert self._is_open.wait(120.0)
        slow(edge)

    def open(self) -> None:
        self._is_open.set()


def saved_beside(path: str, case: str, optimizer: str, options: Options) -> tuple[Any, list[float], Any, bool]:
    """Train three steps, save in the background, go on at once for three, then wait."""
    run, model, opt, _, _ = build(case, optimizer, **options)
    train(run, model, opt, case, 0, 3)
    before = states(run)
    gate = Gate()
    with delays(gate):
        ticket = run.save(path, extra={"epoch": 7, "curve": torch.arange(3.0)}, wait=False)
        was_under_way = not ticket.is_done_within(0.0) and not os.path.exists(path)
        gate.open()
        losses = train(run, model, opt, case, 3, 8)
        ticket.wait()
    after = states(run)
    run.close()
    return before, losses, after, was_under_way


CASES: dict[str, tuple[str, str, Options]] = {
    "stage 0": ("gpt", "adamw", {"stage": 0}),
    "stage 1": ("gpt", "adamw", {"stage": 1}),
    "stage 2, pairwise": ("gpt", "adamw", {"stage": 2, "transport": "pairwise"}),
    "stage 3": ("frozen", "adamw", {"stage": 3}),
    "stage 3, bf16": ("gpt", "sgd", {"stage": 3, "precision": "bf16"}),
    "buffers": ("conv", "sgd", {"stage": 2}),
    "all on disk": ("gpt", "adamw", {"stage": 3, "offload": DISK}),
    "the native Adam, on disk": ("gpt", "fused", {"stage": 3, "offload": DISK}),
    "the native Adam, in memory": ("gpt", "fused", {"stage": 1, "offload": sw.Offload(optimizer="host", step_bytes=1 << 16)}),
    "stage 0, on disk": ("mlp", "adamw", {"stage": 0, "offload": sw.Offload(optimizer="disk")}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_that_of_the_moment_of_the_call(pool: RankPool, tmp_path: Path, name: str) -> None:
    case, optimizer, options = CASES[name]
    path = str(tmp_path / "checkpoint")
    kept = pool.run(saved_beside, path, case, optimizer, options)
    assert all(rank[3] for rank in kept), "it was written in the background"
    restored = pool.run(loaded, path, case, optimizer, options)
    assert_same(whole([rank[0] for rank in restored]), whole([rank[0] for rank in kept]))
    assert [rank[1] for rank in restored] == [rank[1] for rank in kept], "the same losses"
    assert_same(whole([rank[2] for rank in restored]), whole([rank[2] for rank in kept]))
    assert os.listdir(tmp_path) == ["checkpoint"]


# -- errors ------------------------------------------------------------------------------------------------------------


def full_disk(_: int, __: int, ___: int) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def failing(path: str, when: str) -> tuple[list[str], bool]:
    """The disk of rank 1 is full: who raises, and does training go on to the same values?"""
    run, model, opt, _, _ = build("gpt", "adamw", stage=3)
    train(run, model, opt, "gpt", 0, 2)
    raised = []
    writer = sys.modules["shardwise.checkpoint.writer"]
    broken = Patched(writer.os, "posix_fallocate", full_disk) if torch.distributed.get_rank() == 1 else delays(slow)
    with broken:
        ticket = run.save(path, wait=False)
        assert ticket.is_done_within(120.0)
    try:
        if when == "step":
            train(run, model, opt, "gpt", 2, 3)
        elif when == "save":
            run.save(path)
        else:
            ticket.wait()
    except CheckpointError as error:
        raised.append(str(error))
    opt.zero_grad()
    train(run, model, opt, "gpt", 2, 4)  # nothing was lost, and it is raised once only
    found = states(run)
    run.save(path)
    run.close()
    run, model, opt, _, _ = build("gpt", "adamw", stage=3)
    train(run, model, opt, "gpt", 0, 4)
    is_same = all(torch.equal(one[3], other[3]) for one, other in zip(found, states(run), strict=True))
    run.close()
    return raised, is_same


@pytest.mark.parametrize("when", ["step", "save", "wait"])
def test_an_error_is_raised_on_all_ranks_and_training_goes_on(pool: RankPool, tmp_path: Path, when: str) -> None:
    path = tmp_path / "checkpoint"
    for raised, is_same in pool.run(failing, str(path), when):
        assert len(raised) == 1 and f"the checkpoint {path} was not saved. Rank 1: [Errno 28] no space left" in raised[0]
        assert is_same
    assert os.listdir(tmp_path) == ["checkpoint"]


def told_late(path: str) -> list[str]:
    """Rank 1 learns of a failure later than rank 0, and rank 0 alone has waited for the Ticket: all raise at the same step."""
    run, model, opt, _, _ = build("gpt", "adamw", stage=3)
    train(run, model, opt, "gpt", 0, 1)
    os.makedirs(path, exist_ok=True)  # the path is taken

    is_late = torch.distributed.get_rank() == 1
    unsaved = sys.modules["shardwise.engine.unsaved"].Unsaved
    end = unsaved.end

    def slow_end(self: Any, failure: Any) -> None:
        time.sleep(0.5)
        end(self, failure)

    raised = []
    with Patched(unsaved, "end", slow_end) if is_late else contextlib.nullcontext():
        ticket = run.save(path, wait=False)
        if not is_late:
            with pytest.raises(CheckpointError, match="exists already"):
                ticket.wait()
        number, deadline = 1, time.monotonic() + 120.0
        while not raised and time.monotonic() < deadline:
            try:
                train(run, model, opt, "gpt", number, number + 1)
            except CheckpointError:
                raised.append(str(number))
                opt.zero_grad()
            number += 1
    train(run, model, opt, "gpt", number, number + 1)
    run.save(path + "-new")
    run.close()
    return raised


def test_all_ranks_raise_at_the_same_step(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(told_late, str(tmp_path / "checkpoint"))
    assert first == second and len(first) == 1


def unwaited(directory: str) -> list[str]:
    """Nobody waits for the Tickets: old checkpoints are removed all the same."""
    run, model, opt, _, _ = build("gpt", "adamw", stage=3)
    kept = sw.Checkpoints(directory, keep=1)
    for number in range(4):
        train(run, model, opt, "gpt", number, number + 1)
        kept.save(run, number, wait=False)
    run.close()
    torch.distributed.barrier()
    return sorted(os.listdir(directory))


def test_old_checkpoints_go_though_nobody_waits(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(unwaited, str(tmp_path / "all"))[0] == ["step-00000002", "step-00000003"]


def written_by_hand(path: str) -> str:
    run, model, opt, _, _ = build("gpt", "adamw", stage=1)
    train(run, model, opt, "gpt", 0, 1)
    gate = Gate()
    with delays(gate):
        ticket = run.save(path, wait=False)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2.0)
        gate.open()
        with pytest.raises(CheckpointError, match="was written by hand while it was being saved") as caught:
            ticket.wait()
    run.save(path)
    run.close()
    return str(caught.value)


def test_parameters_written_by_hand_meanwhile_are_not_saved_as_a_mixture(pool: RankPool, tmp_path: Path) -> None:
    assert len(pool.run(written_by_hand, str(tmp_path / "checkpoint"))) == 2


def two_at_once(directory: str) -> list[str]:
    run, model, opt, _, _ = build("gpt", "adamw", stage=3)
    kept = sw.Checkpoints(directory, keep=2)
    with delays(slow):
        for number in range(4):
            train(run, model, opt, "gpt", number, number + 1)
            last = kept.save(run, number, wait=False)
            assert len(list(Path(directory).glob(".*.lock"))) <= 1, "at most one is in flight"
        last.wait()
    torch.distributed.barrier()
    run.close()
    return sorted(os.listdir(directory))


def test_one_save_is_in_flight_and_the_newest_are_kept(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    assert pool.run(two_at_once, str(tmp_path / "all"))[0] == ["step-00000002", "step-00000003"]


SCRIPT = """
import sys, torch, shardwise as sw
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
run = sw.shard(model, optimizer, stage=3)
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
run.save(sys.argv[1], wait=False)
"""


def test_a_script_ends_when_its_last_checkpoint_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for expected in ("", "its last save in the background failed: "):
        found = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, timeout=120, check=True)
        assert expected in found.stderr and (expected or not found.stderr.strip())
        assert sorted(path.iterdir()) == [path / "manifest.json", path / "rank-00000-of-00001.safetensors"]
        path.joinpath("manifest.json").touch()  # the second time the path is taken
