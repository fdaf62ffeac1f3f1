"""The command line: real launches with two ranks, the default corpus, and every mistake answered in one line."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import shardwise as sw
from launching import run_program, run_ranks, without_launcher
from shardwise.checkpoint import read_manifest
from shardwise.cli import app
from shardwise.cli import train as train_module
from shardwise.cli.corpus import DEFAULT_BYTES, Corpus
from shardwise.cli.display import display, loss_verdict
from shardwise.cli.job import Job
from shardwise.cli.train import lr_factor, work
from shardwise.errors import ConfigError

SMALL = ("--size", "tiny", "--batch", "2", "--sequence", "32")
KINDS = ("param", "grad", "master", "moment", "buffer", "activation", "sum")


def run_cli(*args: str, launcher: Sequence[str] = (), env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *launcher, *(("-m",) if launcher else ()), "shardwise.cli", *args]
    return run_program(command, env=without_launcher() | (env or {}))


def train(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_cli("train", *SMALL, *args, env=env)


def train_as_ranks(*args: str) -> str:
    """Two ranks as torchrun starts them."""
    code, shown = run_ranks(["-m", "shardwise.cli", "train", *SMALL, *args], 2)
    assert code == 0, shown
    check_trained(shown)
    assert shown.count("GPT tiny") == 1, "only rank 0 prints"
    return shown


def check_trained(shown: str) -> None:
    assert "predicted" in shown and "measured" in shown
    for kind in KINDS:
        assert re.search(rf"\b{kind}\b", shown), f"no row {kind!r} in\n{shown}"
    assert re.search(r"loss \d\.\d{3} -> \d\.\d{3}", shown), shown
    assert "tokens/s" in shown


# -- launches -------------------------------------------------------------------------------------------------


def test_default_corpus_stage_3_two_ranks(tmp_path: Path) -> None:
    done = train("--steps", "12", "--clip", "1.0", "--plain-log", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    check_trained(done.stdout)
    assert "2 ranks" in done.stdout
    assert re.findall(r"step +(\d+)/12", done.stdout) == ["1", "10", "12"]
    assert "did NOT fall" not in done.stdout
    assert not list(tmp_path.glob("*elastic*")) and not list(tmp_path.glob("shardwise-*")), "files were left behind"


def test_stage_2_own_data_accumulation_bf16(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    shown = train_as_ranks("--stage", "2", "--precision", "bf16", "--accumulate", "2", "--steps", "3", "--data", str(tmp_path))
    assert "data: 1 files, 900 B" in shown


def test_fp16_scales_the_loss() -> None:
    shown = train_as_ranks("--precision", "fp16", "--accumulate", "2", "--steps", "3", "--clip", "1.0")
    assert re.search(r"loss scale [1-9]\d*, \d steps skipped", shown), shown


def test_training_from_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    places = [word for kind in ("params", "grads", "optimizer") for word in (f"--offload-{kind}", "disk")]
    shown = train_as_ranks("--steps", "12", "--clip", "1.0", *places, "--offload-path", str(tmp_path))
    assert "offload: params disk, grads disk, optimizer disk" in shown
    found = re.search(r"disk: (\d.*?) in (.*?), (\w+) engine", shown)
    assert found is not None and found[2] == str(tmp_path), shown
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_training_from_a_directory_that_is_not_there_is_one_line() -> None:
    done = train("--steps", "2", "--offload-optimizer", "disk", "--offload-path", "/nowhere/at/all")
    assert done.returncode != 0 and "does not exist" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_probe_measures_shows_and_keeps(tmp_path: Path) -> None:
    done = run_cli("probe", "--path", str(tmp_path), env={"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    for what in (
        "copy in memory",
        "disk read, blocks of 1024 KiB",
        "disk write",
        "matrix product, bfloat16",
        "shared",
        "pairwise",
    ):
        assert re.search(rf"{what}.*\d (GB|MB|GFLOP)/s", done.stdout), f"no figure for {what!r} in\n{done.stdout}"
    kept = re.search(r"kept in (\S+)", done.stdout.replace("\n", ""))
    assert kept is not None and Path(kept[1]).is_file() and str(tmp_path) in kept[1]


def test_same_seed_same_losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    losses = []
    for seed in (5, 5, 6):
        work(Job(size="tiny", batch=2, sequence=32, steps=2, seed=seed))  # a world of one needs no launcher
        losses.append(re.findall(r"loss (\S+)", capsys.readouterr().out))
    assert losses[0] and losses[0] == losses[1] != losses[2]


def test_training_that_was_interrupted_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    def losses(*args: str) -> str:
        shown = train_as_ranks("--accumulate", "2", "--clip", "1.0", *args)
        return re.findall(r"loss \d\.\d{3} -> \d\.\d{3}.*?\.", shown)[0]

    kept = ("--checkpoints", str(tmp_path / "all"), "--checkpoint-every", "2", "--keep", "2")
    whole = losses("--steps", "7", *kept)
    assert [path.name for path in sw.Checkpoints(tmp_path / "all").all()] == ["step-00000006", "step-00000007"]
    shutil.rmtree(tmp_path / "all" / "step-00000007")  # as if the job had been killed in the last step
    again = train_as_ranks("--accumulate", "2", "--clip", "1.0", "--steps", "7", "--stage", "1", *kept, "--resume")
    assert "resumed after step 6" in again and whole in again
    manifests = [read_manifest(path) for path in sw.Checkpoints(tmp_path / "all").all()]
    assert [manifest.num_steps for manifest in manifests] == [6, 7]


@pytest.mark.slow
def test_under_torchrun_it_is_a_rank() -> None:
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", *place)
    args = ("train", "--size", "tiny", "--batch", "2", "--sequence", "32", "--steps", "2", "--stage", "1")
    done = run_cli(*args, launcher=launcher, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    check_trained(done.stdout)
    assert done.stdout.count("GPT tiny") == 1, "only rank 0 prints"


# -- mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--stage", "7"], "stage=7 is not a ZeRO stage"),
        (["--sequence", "257"], "--sequence 257 is longer than the context of size tiny, 256"),
        (["--data", "{folder}/none.txt"], "none.txt does not exist"),
        (["--data", "{folder}/empty.txt"], "empty.txt is empty"),
    ],
)
def test_bad_value_is_one_line_and_code_2(args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.txt").touch()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["train", *SMALL, *(arg.format(folder=tmp_path) for arg in args)])
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_bad_value_ends_the_program_itself() -> None:
    done = train("--stage", "7")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "stage=7 is not a ZeRO stage" in done.stderr


def test_refused_by_the_ranks_is_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["train", *SMALL, "--transport", "nccl"])
    assert done.exit_code == 2, done.stderr
    assert "transport='nccl' needs an NCCL process group" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_failure_in_a_rank_surfaces() -> None:
    done = train("--steps", "5", "--lr", "1e30", "--clip", "1.0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"rank \d: .*gradient norm is", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_ranks_contradict_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(app, ["train", *SMALL, "--ranks", "3"])
    assert done.exit_code == 2
    assert "a launch of 2 ranks" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stage": -1}, "not a ZeRO stage"),
        ({"size": "smal"}, "did you mean small"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"transport": "shred"}, "did you mean 'shared'"),
        ({"size": "tiny", "sequence": 257}, "longer than the context"),
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"batch": -1}, "--batch -1"),
        ({"ranks": 0}, "--ranks 0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"clip": 0.0}, "--clip 0.0"),
    ],
)
def test_job_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Job(**options)


# -- corpus ---------------------------------------------------------------------------------------------------


def test_default_corpus_is_the_standard_library() -> None:
    corpus = Corpus.of(())
    assert 1_000_000 < corpus.num_bytes <= DEFAULT_BYTES
    assert all(file.suffix == ".py" and "site-packages" not in file.parts for file in corpus.files)
    assert list(corpus.files) == sorted(corpus.files)


def test_read_crosses_files(tmp_path: Path) -> None:
    for name, text in (("a", "abc"), ("b", ""), ("c", "defgh"), ("d", "i")):
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden").write_text("hidden")
    corpus = Corpus.of([tmp_path])
    whole = b"abcdefghi"
    assert corpus.num_bytes == len(whole)
    for start in range(len(whole)):
        for end in range(start, len(whole) + 1):
            assert corpus.read(start, end - start) == whole[start:end]


def test_batches_depend_on_the_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(250)))
    corpus = Corpus.of([file])
    tokens, targets = corpus.batch("0/1/0/0", 4, 16)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens + 1, targets)
    assert torch.equal(corpus.batch("0/1/0/0", 4, 16)[0], tokens)
    assert not torch.equal(corpus.batch("0/1/0/1", 4, 16)[0], tokens)


def test_a_corpus_of_one_window(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abcdefgh")
    corpus = Corpus.of([file])
    corpus.check_holds(7)
    assert bytes(corpus.batch("k", 1, 7)[0].flatten().tolist()) == b"abcdefg"
    with pytest.raises(ConfigError, match="holds 8 bytes in 1 files; a sequence of 8 needs at least 9"):
        corpus.check_holds(8)


def test_bad_data(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ConfigError, match="is empty"):
        Corpus.of([empty])
    with pytest.raises(ConfigError, match="does not exist"):
        Corpus.of([tmp_path / "none"])
    with pytest.raises(ConfigError, match="directory without text files"):
        Corpus.of([tmp_path])
    with pytest.raises(ConfigError, match="neither a file nor a directory"):
        Corpus.of([Path("/dev/null")])


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("abcdefgh")
    corpus = Corpus.of([file])
    file.write_text("abc")
    with pytest.raises(ConfigError, match="Leave data files unchanged"):
        corpus.read(0, 8)


# -- figures --------------------------------------------------------------------------------------------------


def test_verdict_is_honest() -> None:
    falling = [5.0 - 0.1 * step for step in range(20)]
    assert loss_verdict(falling) == "loss 4.800 -> 3.300 (mean of 5 steps each)."
    assert "did NOT fall" in loss_verdict(falling[::-1])
    assert "did NOT fall" in loss_verdict([1.0] * 8)
    assert "did NOT fall" in loss_verdict([5.0, 4.0, 3.0, float("nan")])
    assert "too few" in loss_verdict([5.0])


def test_bars_of_steps_and_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with display(5, False, is_shown=True) as show:
        show.step(2, 1.25, 1000.0, 10**6)
        for _ in range(2):  # two saves share a bar
            progress = show.moving("saving")
            assert progress is not None
            progress(3_000_000, 12_000_000)
            show._bar.refresh()  # type: ignore[attr-defined]
            progress(12_000_000, 12_000_000)
        assert len(show._bar.tasks) == 2  # type: ignore[attr-defined]
    text = shown.getvalue()
    assert re.search(r"step .*2/5", text) and "loss 1.250" in text
    assert re.search(r"saving .*3\.0/12\.0 MB", text), text
    with display(5, False, is_shown=False) as show:
        assert show.moving("saving") is None


@pytest.mark.parametrize("steps", [2, 9, 60, 5000])
def test_learning_rate_warms_up_and_decays(steps: int) -> None:
    factors = [lr_factor(step, steps) for step in range(steps + 1)]
    peak = factors.index(max(factors))
    assert max(factors) == 1.0 and min(factors) > 0
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)


def saved_job(directory: Path, **options: Any) -> Job:
    return Job(size="tiny", batch=2, sequence=32, checkpoints=directory, **options)


def test_checkpoints_of_another_job_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "all"
    work(saved_job(place, steps=2))
    (newest,) = sw.Checkpoints(place).all()
    for job, text in [
        (
            saved_job(place, steps=4, seed=9),
            r"has checkpoints of another job, the newest step-00000002\. Go on with it by --resume",
        ),
        (saved_job(newest, steps=4), r"is a checkpoint itself; name the directory that it is in"),
        (saved_job(newest / "manifest.json" / "x", steps=4), "cannot be written to"),
    ]:
        with pytest.raises(ConfigError, match=text):
            train_module.train(job)
    for options, text in [
        ({"lr": 0.5}, "--lr is 0.5, in the job that is resumed it was 0.001"),
        ({"seed": 3}, "--seed is 3"),
        ({"steps": 1}, "--steps 1: the job that is resumed has made 2 steps already"),
    ]:
        with pytest.raises(ConfigError, match=text):
            work(saved_job(place, **{"steps": 4, "resume": True, **options}))
    capsys.readouterr()
    work(saved_job(tmp_path / "none", steps=1, resume=True))
    assert "there is no checkpoint in" in capsys.readouterr().out
    assert sw.Checkpoints(place).all() == [newest]
