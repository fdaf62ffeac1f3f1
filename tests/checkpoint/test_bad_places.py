"""What goes wrong while a checkpoint is written or read: an error on all ranks, nothing lost or left, and training goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from cases import CASES, Patched, build, rank
from launching import Forked, run_program, without_launcher
from shardwise.checkpoint import claim
from shardwise.checkpoint.claim import claimed, place_of, remove_leftovers
from shardwise.errors import CheckpointError, DiskError
from shardwise.testing import RankPool

save_module = sys.modules["shardwise.checkpoint.save"]
writer_module = sys.modules["shardwise.checkpoint.writer"]
load_module = sys.modules["shardwise.checkpoint.load"]
Faults = Callable[[Path], contextlib.AbstractContextManager[Any]]


# -- what goes wrong, on one rank --------------------------------------------------------------------------------------


def _raising(number: int) -> Callable[..., Any]:
    def attempt(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return attempt


class _OsWith:
    """The module `os` with other functions."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def full_disk(_: Path) -> Any:
    """The disk is full when space is reserved."""
    return Patched(writer_module, "os", _OsWith(posix_fallocate=_raising(errno.ENOSPC)))


@contextlib.contextmanager
def small_files(_: Path) -> Iterator[None]:
    """The kernel itself refuses: files may have at most 8 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def failing_writes(_: Path) -> Iterator[None]:
    """The engine's third write fails, as when a disk breaks or a quota is reached in the middle."""
    make = save_module.make_engine

    def broken(**options: Any) -> Any:
        engine = make(**options)
        start, count = engine.start, iter(range(1000))

        def failing(file: Any, memory: torch.Tensor, offset: int, *, writes: bool) -> Any:
            if next(count) == 2:
                raise DiskError(errno.EDQUOT, f"writing to {file.path} failed: {os.strerror(errno.EDQUOT)}")
            return start(file, memory, offset, writes=writes)

        engine.start = failing
        return engine

    with Patched(save_module, "make_engine", broken):
        yield


def read_only(_: Path) -> Any:
    """A read-only file system: root may write anywhere else."""
    return Patched(writer_module, "os", _OsWith(open=_raising(errno.EROFS)))


def out_of_memory(_: Path) -> Any:
    """An error that no file system makes."""

    def attempt(*_: Any) -> None:
        raise MemoryError("cannot allocate")

    return Patched(save_module, "rng_states", attempt)


def removed_in_the_middle(path: Path) -> Any:
    """Somebody removes the directory that is written to."""
    writer = save_module.Writer

    def late(*args: Any) -> Any:
        for left in path.parent.glob(".*.saving-*"):
            shutil.rmtree(left, ignore_errors=True)
        return writer(*args)

    return Patched(save_module, "Writer", late)


def target_appears(path: Path) -> Any:
    """Something gets the checkpoint's name while it is written."""
    writer = save_module.Writer

    def late(*args: Any) -> Any:
        path.mkdir()
        (path / "precious").write_text("data")
        return writer(*args)

    return Patched(save_module, "Writer", late)


FAULTS: dict[str, tuple[Faults, str]] = {
    "a full disk": (full_disk, "No space left on device"),
    "files that may not grow": (small_files, "File too large"),
    "a write that fails": (failing_writes, "Disk quota exceeded"),
    "a read-only file system": (read_only, "Read-only file system"),
    "no memory": (out_of_memory, "cannot allocate"),
    "the directory is removed": (removed_in_the_middle, "does not see|No such file"),
    "the target appears": (target_appears, "has appeared while"),
}


def steps(run: sw.Run, model: Any, optimizer: Any, first: int, last: int) -> list[str]:
    losses = []
    for number in range(first, last):
        loss = CASES["gpt"].loss(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def whole() -> list[str]:
    run, model, optimizer, _, _ = build("gpt", "adamw", stage=3)
    losses = steps(run, model, optimizer, 0, 6)
    run.close()
    return losses


def failing(directory: str, fault: str, whose: int) -> tuple[str, list[str], list[str], list[str]]:
    """The error of a save in which a rank meets a fault; losses before and after; what is there then and after another save."""
    path = Path(directory) / "bad"
    run, model, optimizer, _, _ = build("gpt", "adamw", stage=3)
    losses = steps(run, model, optimizer, 0, 2)
    run.save(Path(directory) / "before")
    with FAULTS[fault][0](path) if rank() == whose else contextlib.nullcontext():
        try:
            run.save(path)
            text = ""
        except CheckpointError as error:
            text = str(error)
    dist.barrier()  # rank 0 has removed what was written
    left = sorted(os.listdir(directory))
    losses += steps(run, model, optimizer, 2, 4)
    run.save(Path(directory) / "after")
    losses += steps(run, model, optimizer, 4, 6)
    dist.barrier()
    names = sorted(os.listdir(directory))
    run.close()
    return text, losses, left, names


def resumed(path: str, first: int) -> list[str]:
    run, model, optimizer, _, _ = build("gpt", "adamw", seed=1, stage=3)
    run.load(path)
    losses = steps(run, model, optimizer, first, 6)
    run.close()
    return losses


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> list[list[str]]:
    return pool.run(whole)


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_loses_nothing(
    pool: RankPool, expected: list[list[str]], tmp_path: Path, fault: str, whose: int
) -> None:
    found = pool.run(failing, str(tmp_path), fault, whose)
    assert all(text for text, *_ in found), "an error on every rank"
    assert any(re.search(FAULTS[fault][1], text) for text, *_ in found), [text for text, *_ in found]
    assert [losses for _, losses, _, _ in found] == expected, "training goes on to the last bit"
    stays = ["bad"] if fault == "the target appears" else []
    for _, _, left, names in found:
        assert left == sorted(["before", *stays]) and names == sorted(["after", "before", *stays])
    if stays:
        assert (tmp_path / "bad" / "precious").read_text() == "data"
    assert [losses[2:] for losses in expected] == pool.run(resumed, str(tmp_path / "before"), 2), "the earlier one is intact"
    assert [losses[4:] for losses in expected] == pool.run(resumed, str(tmp_path / "after"), 4)


# -- paths that cannot be ----------------------------------------------------------------------------------------------


def at_paths(directory: str, what: str) -> tuple[str, str]:
    """The errors of a save and of a load or resume, when ranks or hosts do not see the same."""
    run, _, _, _, _ = build("gpt", "adamw", stage=3)
    own = Path(directory) / f"of-rank-{rank()}"
    own.mkdir()
    dist.barrier()
    texts = []
    before = os.getcwd()
    try:
        if what == "a parent that is a file":
            (Path(directory) / f"file-{rank()}").write_text("x")
            dist.barrier()
            path: str | Path = Path(directory) / "file-0" / "checkpoint"
        elif what == "relative paths":
            os.chdir(own)
            path = "checkpoint"
        else:  # one name, two file systems
            os.chdir(own)
            path = "/proc/self/cwd/checkpoint"
        for attempt in (run.save, run.load):
            try:
                attempt(path)
                texts.append("")
            except CheckpointError as error:
                texts.append(str(error))
        if what != "a parent that is a file":
            if rank() == 0:
                (own / "all" / "step-00000001").mkdir(parents=True)
                (own / "all" / "step-00000001" / "manifest.json").write_text("{}")
            dist.barrier()
            with pytest.raises(CheckpointError):
                sw.Checkpoints("/proc/self/cwd/all").resume(run)
    finally:
        os.chdir(before)
    dist.barrier()
    assert not list(own.glob(".*"))
    run.close()
    return texts[0], texts[1]


@pytest.mark.parametrize(
    ("what", "saving", "loading"),
    [
        ("a parent that is a file", "Not a directory|File exists", "not a directory"),
        (
            "relative paths",
            "of-rank-0/checkpoint was not saved. Rank 1: .* does not see .* in .*of-rank-1",
            "not a directory",
        ),
        ("hosts without a common file system", "rank 1 does not see the directory that rank 0 has made", "not a directory"),
    ],
)
def test_ranks_that_do_not_see_the_same(pool: RankPool, tmp_path: Path, what: str, saving: str, loading: str) -> None:

    found = pool.run(at_paths, str(tmp_path), what)
    assert all(saved and loaded for saved, loaded in found), found
    assert any(re.search(saving, saved) for saved, _ in found), found
    assert any(re.search(loading, loaded) for _, loaded in found), found


def from_different_paths(directory: str) -> str:
    run, _, _, _, _ = build("gpt", "adamw", stage=3)
    for name in ("a", "b"):
        run.save(Path(directory) / name)
    try:
        run.load(Path(directory) / "ab"[rank()])
    except CheckpointError as error:
        return str(error)
    finally:
        run.close()
    return ""


def test_ranks_that_load_different_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(from_different_paths, str(tmp_path)):
        assert f"rank 0 load {tmp_path}/a, rank 1 load {tmp_path}/b" in text


# -- two runs, one path ------------------------------------------------------------------------------------------------

RIVAL = """
import sys, pathlib, time
import torch, shardwise as sw
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
run = sw.shard(model, optimizer, stage=1)
directory = pathlib.Path(sys.argv[1])
(directory / f"ready-{sys.argv[2]}").touch()
while len(list(directory.glob("ready-*"))) < 2:
    time.sleep(0.0005)
won = 0
for number in range(40):
    try:
        run.save(directory / f"step-{number}", extra={"by": int(sys.argv[2])})
        won += 1
    except sw.ShardwiseError as error:
        assert "exists already" in str(error) or "another run is saving" in str(error) or "has appeared" in str(error), error
print("won", won)
"""


def test_two_runs_that_save_to_one_path(tmp_path: Path) -> None:
    script, place = tmp_path / "rival.py", tmp_path / "all"
    script.write_text(RIVAL)
    place.mkdir()
    outs = [tmp_path / f"out-{number}" for number in range(2)]
    rivals = [Forked([str(script), str(place), str(number)], out=out, env=without_launcher()) for number, out in enumerate(outs)]
    codes = [rival.finish() for rival in rivals]
    assert codes == [0, 0], [out.read_text() for out in outs]
    won = [int(out.read_text().split()[1]) for out in outs]
    assert sum(won) == 40, f"each checkpoint has exactly one author: {won}"
    names = sorted(path.name for path in place.iterdir() if not path.name.startswith("ready-"))
    assert names == sorted(f"step-{number}" for number in range(40))


def test_a_checkpoint_that_appears_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, place = tmp_path / "checkpoint", place_of(tmp_path / "checkpoint", "1")
    for directory in (target, place):
        directory.mkdir()
        (directory / "file").write_text(directory.name)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(CheckpointError, match="has appeared while it was written"):
        claim.appear(place, target)
    assert (target / "file").read_text() == "checkpoint"


def test_a_save_that_runs_is_left_alone_and_a_killed_one_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    place = place_of(target, "1")
    with claimed(target, place):
        (place / "file").write_text("x")
        assert remove_leftovers(tmp_path) == [place] and (place / "file").exists()
        with pytest.raises(CheckpointError, match="another run is saving to"), claimed(target, place_of(target, "2")):
            pass
    assert sorted(os.listdir(tmp_path)) == [place.name], "the lock is gone with its save"
    assert remove_leftovers(tmp_path) == [] and not os.listdir(tmp_path), "however young it is"
    for names in (["1"], ["1.lock"], ["1", "1.lock"]):  # whatever a kill leaves
        for name in names:
            path = tmp_path / f".checkpoint.saving-{name}"
            path.write_text("") if name.endswith("lock") else path.mkdir()
        assert remove_leftovers(tmp_path) == [] and not os.listdir(tmp_path)


def test_a_lock_that_is_taken_for_a_leftover_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again: the other run may save elsewhere in this directory, and nobody would save here."""
    target, place = tmp_path / "checkpoint", place_of(tmp_path / "checkpoint", "1")
    lock = claim._is_locked_now

    def late(descriptor: int) -> bool:
        monkeypatch.setattr(claim, "_is_locked_now", lock)
        assert remove_leftovers(tmp_path) == []  # another run, between the making of the file and its locking
        return lock(descriptor)

    monkeypatch.setattr(claim, "_is_locked_now", late)
    with claimed(target, place):
        assert sorted(os.listdir(tmp_path)) == [place.name, f"{place.name}.lock"]


def removing(directory: str) -> list[str]:
    """Removing an old checkpoint is interrupted; the next save of any name removes the rest."""
    run, _, _, _, _ = build("gpt", "adamw", stage=3)
    kept = sw.Checkpoints(directory, keep=1)
    kept.save(run, 1)
    if rank() == 0:
        with Patched(claim, "shutil", _Shutil()), contextlib.suppress(KeyboardInterrupt):
            claim.remove_checkpoint(Path(directory) / "step-00000001")
        assert [name for name in os.listdir(directory) if name.startswith(".step-00000001")]
    dist.barrier()
    assert kept.all() == [], "what is half removed is no checkpoint"
    kept.save(run, 2)
    dist.barrier()
    run.close()
    return os.listdir(directory)


class _Shutil:
    @staticmethod
    def rmtree(path: Path, **_: Any) -> None:
        next(path.glob("rank-*")).unlink()
        raise KeyboardInterrupt


def test_a_removal_that_was_interrupted(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(removing, str(tmp_path)) == [["step-00000002"]] * 2


def interrupted(directory: str) -> tuple[list[str], list[str], bool]:
    run, model, optimizer, _, _ = build("gpt", "adamw", stage=3)
    losses = steps(run, model, optimizer, 0, 2)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    is_raised = False
    with Patched(save_module.Writer, "finish", stop):
        try:
            run.save(Path(directory) / "a")
        except KeyboardInterrupt:
            is_raised = True
    losses += steps(run, model, optimizer, 2, 6)
    run.save(Path(directory) / "a")
    dist.barrier()
    run.close()
    return losses, sorted(os.listdir(directory)), is_raised


def test_an_interrupt_in_the_middle_of_a_save(pool: RankPool, expected: list[list[str]], tmp_path: Path) -> None:
    found = pool.run(interrupted, str(tmp_path))
    assert found == [(losses, ["a"], True) for losses in expected]


# -- loading -----------------------------------------------------------------------------------------------------------


def half_read(directory: str, whose: int, transport: str) -> tuple[str, str, list[str]]:
    """A read error after everything was verified: on all ranks at once, and loading again repairs it."""
    run, model, optimizer, _, _ = build("gpt", "adamw", stage=3, transport=transport)
    steps(run, model, optimizer, 0, 2)
    run.save(Path(directory) / "a")

    def broken(*_: Any, **__: Any) -> None:
        raise DiskError(errno.EIO, "reading failed: Input/output error")

    with Patched(load_module.Reader, "read_into", broken) if rank() == whose else contextlib.nullcontext():
        try:
            run.load(Path(directory) / "a")
            text = ""
        except CheckpointError as error:
            text = str(error)
    run.load(Path(directory) / "a")
    losses = steps(run, model, optimizer, 2, 6)
    run.close()
    return text, "", losses


@pytest.mark.parametrize(("whose", "transport"), [(0, "shared"), (1, "pairwise")])
def test_a_read_error_after_verification_is_raised_on_all_ranks(
    pool: RankPool, expected: list[list[str]], tmp_path: Path, whose: int, transport: str
) -> None:
    found = pool.run(half_read, str(tmp_path), whose, transport)
    for text, _, _ in found:
        assert "Input/output error" in text and "loaded in part only: load again" in text, found
    assert [losses for *_, losses in found] == [losses[2:] for losses in expected]


def new_states_unread(directory: str) -> tuple[str, bool]:
    """A run without optimizer states meets a read error among those that it would get: nothing of it has changed."""
    run, model, optimizer, _, _ = build("gpt", "adamw", stage=3)
    steps(run, model, optimizer, 0, 2)
    run.save(Path(directory) / "a")
    run.close()
    run, model, optimizer, _, _ = build("gpt", "adamw", seed=4, stage=3)
    before = {name: values.clone() for name, values in run.iter_masters()}

    def broken(*_: Any, **__: Any) -> None:
        raise DiskError(errno.EIO, "reading failed: Input/output error")

    with Patched(load_module.Reader, "read_into", broken) if rank() == 1 else contextlib.nullcontext():
        try:
            run.load(Path(directory) / "a")
            text = ""
        except CheckpointError as error:
            text = str(error)
    is_same = all(torch.equal(before[name], values) for name, values in run.iter_masters()) and not optimizer.state
    run.close()
    return text, is_same


def test_a_read_error_of_new_states_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    for text, is_same in pool.run(new_states_unread, str(tmp_path)):
        assert "Input/output error" in text and "nothing was changed" in text and "in part only" not in text
        assert is_same


# -- progress ----------------------------------------------------------------------------------------------------------


def counted(directory: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    run, model, optimizer, _, _ = build("gpt", "adamw", stage=3)
    steps(run, model, optimizer, 0, 1)
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    path = Path(directory) / "a"
    run.save(path, progress=lambda done, total: written.append((done, total)))
    run.load(path, progress=lambda done, total: read.append((done, total)))
    run.close()
    return written, read, (path / f"rank-{rank():05d}-of-00002.safetensors").stat().st_size


def test_progress_ends_with_all_bytes(pool: RankPool, tmp_path: Path) -> None:
    for written, read, size in pool.run(counted, str(tmp_path)):
        assert written[-1][0] == written[-1][1] and 0.5 * size < written[-1][1] <= size, "without header and padding"
        assert len(read) > 3 and read[-1][0] == read[-1][1] > 0
        for told in (written, read):
            assert [done for done, _ in told] == sorted(done for done, _ in told) and len({total for _, total in told}) == 1


# -- killed ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_that_is_killed_again_and_again_goes_on_to_the_last_bit() -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "kill_trials.py"
    done = run_program([sys.executable, str(script), "--trials", "25", "--seed", "7"], env=without_launcher())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mismatches: 0" in done.stdout and "problems: 0" in done.stdout and "25 of 25 trials" in done.stdout
    assert "killed during a save: " in done.stdout
