"""`shardwise inspect` and `shardwise export`: what they show, what they find, and every mistake answered in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import shardwise as sw
from cases import CASES
from shardwise.checkpoint import diff
from shardwise.cli import app
from shardwise.testing import RankPool


def invoke(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def saved(path: str, steps: int, lr: float = 1e-2, case: str = "conv") -> None:
    """Two checkpoints a step apart, and an export of the last."""
    torch.manual_seed(0)
    model = CASES[case].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run = sw.shard(model, optimizer, stage=3)
    for number in range(steps):
        CASES[case].loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.save(path, extra={"note": "[/bold] of step", "curve": torch.arange(3.0)})
    run.export(path + "-exported", dtype="float16")
    run.close()


def test_inspect_shows_what_is_inside(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path / "one"), 2)
    found = invoke("inspect", tmp_path / "one", "--verify")
    assert found.exit_code == 0, found.output
    num_params = sum(p.numel() for p in CASES["conv"].build().parameters())
    for text in ("2 ranks", f"{num_params:,}", "optimizer: exp_avg", "values (trained)", "AdamW", "lr=0.01", "manifest.json",
                 "rank-00001-of-00002.safetensors", "extra: note", "[/bold] of step", "tensor [3] float32",
                 "every checksum is right"):  # fmt: skip
        assert text in found.output, f"{text!r} is not in\n{found.output}"


def test_verify_finds_every_flipped_byte(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path / "one"), 1)
    file = tmp_path / "one" / "rank-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for key in ("00000.exp_avg", "rng.torch"):
        data[start + header[key]["data_offsets"][0] + 1] ^= 4
    file.write_bytes(data)
    assert invoke("inspect", tmp_path / "one").exit_code == 0, "only --verify reads all values"
    found = invoke("inspect", tmp_path / "one", "--verify")
    assert found.exit_code == 2 and "damaged in 2 places" in found.output
    assert "'00000.exp_avg'" in found.output and "'rng.torch'" in found.output
    file.unlink()
    found = invoke("inspect", tmp_path / "one", "--verify")
    assert found.exit_code == 2 and "cannot be opened" in found.output


def test_diff_names_what_differs(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path / "one"), 1)
    pool.run(saved, str(tmp_path / "same"), 1)
    pool.run(saved, str(tmp_path / "two"), 2, 3e-3)
    pool.run(saved, str(tmp_path / "other"), 1, case="mlp")
    found = invoke("inspect", tmp_path / "one", "--diff", tmp_path / "same")
    assert found.exit_code == 0 and "have the same parameters" in found.output, found.output
    found = invoke("inspect", tmp_path / "one", "--diff", tmp_path / "two")
    assert found.exit_code == 1
    assert "steps: 1 against 2" in found.output and "group 0, lr: 0.01 against 0.003" in found.output
    for name, value in load_file(tmp_path / "one-exported" / "model.safetensors").items():
        assert not value.numel() or f"{name}: " in found.output
    one, two = (_exact(tmp_path / name, tmp_path / f"{name}-exact") for name in ("one", "two"))
    changes = {change.name: change for change in diff(tmp_path / "one", tmp_path / "two").changes}
    for name, value in one.items():
        gap = (value.double() - two[name].double()).abs()
        assert changes[name].largest == gap.max().item() and changes[name].num_differing == int((gap > 0).sum())
    found = invoke("inspect", tmp_path / "one", "--diff", tmp_path / "other")
    assert found.exit_code == 1 and ": only in the first" in found.output and ": only in the second" in found.output


def _exact(path: Path, target: Path) -> dict[str, torch.Tensor]:
    assert invoke("export", path, target).exit_code == 0
    return load_file(target / "model.safetensors")


def test_export_is_what_the_run_exports(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path / "one"), 1)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"dropout": 0.1}')
    found = invoke("export", tmp_path / "one", tmp_path / "hf", "--dtype", "float16", "--config", tmp_path / "config")
    assert found.exit_code == 0 and "in 1 files" in found.output, found.output
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "one-exported"))
    assert mine.keys() == theirs.keys() and len(mine) > 5
    assert all(torch.equal(mine[name], value) and mine[name].dtype == value.dtype for name, value in theirs.items())
    model = CASES["conv"].build().half()
    model.load_state_dict(mine)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("inspect", "nowhere"), "there is no checkpoint at"),
        (("inspect", "one", "--diff", "nowhere"), "there is no checkpoint at"),
        (("export", "nowhere", "new"), "there is no checkpoint at"),
        (("export", "one", "config.txt"), "exists already"),
        (("export", "one", "new", "--dtype", "int8"), "dtype int8 cannot be exported"),
        (("export", "one", "new", "--max-file-bytes", "0"), "max_file_bytes=0 must be"),
        (("export", "one", "new", "--config", "config.txt"), "is not valid"),
        (("export", "one", "new", "--config", "nowhere"), "is not a file"),
        (("export", "damaged", "new"), "do not have the checksum"),
    ],
)
def test_mistakes_end_with_one_line(pool: RankPool, tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    pool.run(saved, str(tmp_path / "one"), 0)
    if "damaged" in args:
        os.rename(tmp_path / "one", tmp_path / "damaged")
        file = tmp_path / "damaged" / "rank-00000-of-00002.safetensors"
        data = bytearray(file.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1
        file.write_bytes(data)
    (tmp_path / "config.txt").write_text("not JSON")
    before = sorted(os.listdir(tmp_path))
    places = [arg if arg.startswith("-") or arg in ("inspect", "export", "int8", "0") else str(tmp_path / arg) for arg in args]
    found = invoke(*places)
    assert found.exit_code == 2, found.output
    assert message in found.output and found.output.count("\n") == 1, found.output
    assert sorted(os.listdir(tmp_path)) == before, "nothing is left"


def with_states(directory: str) -> None:
    """Checkpoints with equal parameters: of other data, of other extras, and the same again."""
    for name, shift, note in (("a", 0, 1), ("same", 0, 1), ("data", 5, 1), ("extra", 0, 2)):
        torch.manual_seed(0)
        model = CASES["gpt"].build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        run = sw.shard(model, optimizer, stage=2)
        CASES["gpt"].loss(model, shift).backward()
        optimizer.step()
        run.save(f"{directory}/{name}", extra={"note": note, "tensor": torch.ones(2)})
        run.close()


def test_diff_compares_optimizer_states_and_extras(pool: RankPool, tmp_path: Path) -> None:
    pool.run(with_states, str(tmp_path))
    assert not diff(tmp_path / "a", tmp_path / "same")
    data = diff(tmp_path / "a", tmp_path / "data")
    assert {change.name.partition(", ")[2] for change in data.changes} == {"exp_avg", "exp_avg_sq"} and not data.facts
    assert diff(tmp_path / "a", tmp_path / "extra").facts == ("extra 'note' differs",)
    found = invoke("inspect", tmp_path / "a", "--diff", tmp_path / "data")
    assert found.exit_code == 1 and "exp_avg: " in found.output


def test_an_export_in_another_dtype_says_so(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path / "one"), 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "float32"}))
    found = invoke("export", tmp_path / "one", tmp_path / "out", "--dtype", "bfloat16", "--config", tmp_path / "config.json")
    assert found.exit_code == 0, found.output
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}
    found = invoke("export", tmp_path / "one", tmp_path / "out2", "--config", tmp_path / "nowhere")
    assert found.exit_code != 0 and "is not a file. Name a config.json" in found.output.replace("\n", " ")


def test_a_directory_that_is_no_checkpoint_says_what_it_is(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path / "all" / "step-00000001"), 1)
    for path, text in (
        (tmp_path / "all", "the last is step-00000001"),
        (tmp_path / "all" / "step-00000001-exported", "weights only"),
    ):
        found = invoke("inspect", path)
        assert found.exit_code != 0 and text in " ".join(found.output.split()), found.output
