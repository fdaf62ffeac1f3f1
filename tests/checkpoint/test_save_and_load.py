"""A checkpoint loads at any world size, stage and placement, with the same bits, and training goes on as if nothing had been."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from cases import CASES, Patched, build
from shardwise.checkpoint import read_manifest
from shardwise.errors import CheckpointError
from shardwise.testing import RankPool
from shardwise.tiers.disk import file_system_of

DISK = sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)
HOST = sw.Offload(optimizer="host", step_bytes=1 << 16)
Options = dict[str, Any]
Found = dict[tuple[str, str], torch.Tensor]


def states(run: sw.Run) -> list[tuple[str, str, int, torch.Tensor]]:
    """This rank's ranges of everything that must survive."""
    return [(name, kind, start, values.detach().clone()) for name, kind, start, values in run._survivors.ranges()]


def whole(ranks: list[list[tuple[str, str, int, torch.Tensor]]]) -> Found:
    """The ranges of all ranks put together; a frozen value and a master are both the value."""
    parts: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for found in ranks:
        for name, kind, start, values in found:
            parts.setdefault((name, "value" if kind == "master" else kind), []).append((start, values))
    return {key: torch.cat([values for _, values in sorted(found, key=lambda part: part[0])]) for key, found in parts.items()}


def train(run: sw.Run, model: Any, optimizer: Any, case: str, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        loss = CASES[case].loss(model, number)
        run.scaler.scale(loss).backward()
        run.scaler.step(optimizer)
        run.scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(path: str, case: str, optimizer: str, options: Options) -> tuple[Any, list[float], Any]:
    """Train three steps, save, go on for five: the states when saved, the losses after, the states at the end."""
    run, model, opt, _, _ = build(case, optimizer, **options)
    train(run, model, opt, case, 0, 3)
    before = states(run)
    run.save(path, extra={"epoch": 7, "curve": torch.arange(3.0)})
    losses = train(run, model, opt, case, 3, 8)
    after = states(run)
    run.close()
    return before, losses, after


def loaded(path: str, case: str, optimizer: str, options: Options, times: int = 1) -> tuple[Any, list[float], Any]:
    """The same from a checkpoint, into a model with other values that has made other steps."""
    run, model, opt, _, _ = build(case, optimizer, seed=1, **options)
    train(run, model, opt, case, 20, 22)
    for _ in range(times):
        found = run.load(path)
        assert found.extra["epoch"] == 7 and torch.equal(found.extra["curve"], torch.arange(3.0))
        assert found.num_steps == run._runtime.num_steps == 3 and found.left_out == ()
    before = states(run)
    losses = train(run, model, opt, case, 3, 8)
    after = states(run)
    run.close()
    return before, losses, after


def assert_same(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key], values.to(found[key].dtype)), key


SAME: dict[str, tuple[str, str, Options, Options]] = {
    "stage 1 to 3": ("gpt", "adamw", {"stage": 1}, {"stage": 3}),
    "stage 3 to 2, joined": ("gpt", "adamw", {"stage": 3}, {"stage": 2, "joins": "all"}),
    "stage 0 to 3": ("gpt", "adam", {"stage": 0}, {"stage": 3, "transport": "pairwise"}),
    "stage 3 to 0": ("frozen", "adamw", {"stage": 3}, {"stage": 0}),
    "memory to disk": ("gpt", "adamw", {"stage": 3}, {"stage": 3, "offload": DISK}),
    "disk to memory": ("frozen", "sgd", {"stage": 3, "offload": DISK}, {"stage": 2}),
    "disk to other portions": (
        "mlp",
        "adamw",
        {"stage": 3, "offload": DISK},
        {"stage": 1, "offload": sw.Offload(optimizer="disk")},
    ),
    "bf16": ("gpt", "adamw", {"stage": 3, "precision": "bf16"}, {"stage": 2, "precision": "bf16"}),
    "fp16 with a scale": ("gpt", "adamw", {"stage": 3, "precision": "fp16"}, {"stage": 1, "precision": "fp16"}),
    "stage 2 to 3, pairwise": ("gpt", "adamw", {"stage": 2}, {"stage": 3, "transport": "pairwise"}),
    "LoRA": ("lora", "adamw", {"stage": 3}, {"stage": 1, "offload": sw.Offload(optimizer="disk")}),
    "host, stage 3 to 2": ("gpt", "fused", {"stage": 3, "offload": HOST}, {"stage": 2, "offload": HOST}),
    "host to disk": ("gpt", "fused", {"stage": 1, "offload": HOST}, {"stage": 3, "offload": DISK}),
    "groups": ("gpt", "groups", {"stage": 3}, {"stage": 1}),
    "adagrad": ("mlp", "adagrad", {"stage": 1}, {"stage": 3}),
    "a custom optimizer": ("mlp", "lion", {"stage": 3}, {"stage": 2}),
    "buffers": ("conv", "sgd", {"stage": 2}, {"stage": 3}),
    "recurrent": ("lstm", "rmsprop", {"stage": 3, "joins": "all"}, {"stage": 3}),
    "parameters that were never used": ("branchy", "adamw", {"stage": 3}, {"stage": 1}),
    "the native Adam": ("gpt", "fused", {"stage": 3, "offload": DISK}, {"stage": 3, "offload": DISK}),
}


@pytest.mark.parametrize("name", SAME)
def test_training_goes_on_to_the_last_bit(pool: RankPool, tmp_path: Path, name: str) -> None:
    case, optimizer, before, after = SAME[name]
    path = str(tmp_path / "new" / "checkpoint")
    kept = pool.run(saved, path, case, optimizer, before)
    restored = pool.run(loaded, path, case, optimizer, after, times=2)
    assert_same(whole([rank[0] for rank in restored]), whole([rank[0] for rank in kept]))
    assert [rank[1] for rank in restored] == [rank[1] for rank in kept], "the same losses"
    assert_same(whole([rank[2] for rank in restored]), whole([rank[2] for rank in kept]))
    assert sorted(os.listdir(tmp_path / "new")) == ["checkpoint"], "nothing else is left"


def few_files(path: str, options: Options) -> Any:
    with Patched(sys.modules["shardwise.checkpoint.saved_files"], "_MOST_OPEN", 1):
        return again(path, None, options)


def test_more_files_than_may_be_open(pool: RankPool, pool3: RankPool, tmp_path: Path) -> None:
    expected = whole([rank[0] for rank in pool3.run(saved, str(tmp_path / "3"), "frozen", "adamw", {"stage": 3})])
    assert_same(whole(pool.run(few_files, str(tmp_path / "3"), {"stage": 2})), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_any_number_of_ranks_and_back(pool: RankPool, pool3: RankPool, pool4: RankPool, tmp_path: Path, stage: int) -> None:
    place: Options = {"stage": stage, "offload": sw.Offload(optimizer="disk") if stage == 3 else None}
    expected = whole([rank[0] for rank in pool.run(saved, str(tmp_path / "2"), "frozen", "adamw", place)])
    with RankPool(1) as alone:
        pools = {1: alone, 3: pool3, 4: pool4}
        for number, ranks in pools.items():
            found = ranks.run(again, str(tmp_path / "2"), str(tmp_path / f"{number}"), {"stage": 4 - stage})
            assert_same(whole(found), expected)
        for number in pools:
            assert_same(whole(pool.run(again, str(tmp_path / f"{number}"), None, place)), expected)


def again(path: str, target: str | None, options: Options) -> Any:
    run, _, _, _, _ = build("frozen", "adamw", seed=5, **options)
    found = run.load(path)
    assert found.restored_rng == (read_manifest(path).world_size == torch.distributed.get_world_size())
    if target is not None:
        run.save(target)
    result = states(run)
    run.close()
    return result


class Counting(torch.optim.Optimizer):
    """Counts its steps in a number, not in a tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.sub_(param.grad, alpha=group["lr"] / state["step"])


def counted(path: str) -> set[type]:
    model = CASES["mlp"].build()
    optimizer = Counting(model.parameters())
    run = sw.shard(model, optimizer, stage=3)
    train(run, model, optimizer, "mlp", 0, 2)
    run.save(path)
    run.load(path)
    found = {type(state["step"]) for state in optimizer.state.values()}
    run.close()
    return found


def test_a_count_stays_what_it_was(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(counted, str(tmp_path / "counts")):
        assert found == {int}


def across(path: str, options: Options) -> tuple[str, Any]:
    """Save to a file system in memory, where O_DIRECT may not work, and load from there."""
    run, model, opt, _, _ = build("gpt", "adamw", **options)
    train(run, model, opt, "gpt", 0, 2)
    run.save(path)
    before = states(run)
    train(run, model, opt, "gpt", 2, 3)
    run.load(path)
    is_same = all(torch.equal(one[3], other[3]) for one, other in zip(before, states(run), strict=True))
    run.close()
    return file_system_of(Path(path)), is_same


@pytest.mark.parametrize("offload", [None, DISK], ids=["memory", "disk"])
def test_a_path_on_another_file_system_than_the_states(pool: RankPool, tmp_path: Path, offload: sw.Offload | None) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for kind, is_same in pool.run(across, f"{directory}/checkpoint", {"stage": 3, "offload": offload}):
            assert kind == "tmpfs" and is_same


# -- schedulers, random generators, a directory of checkpoints ---------------------------------------------------------


def resumed(directory: str) -> tuple[bool, list[str]]:
    run, model, optimizer, _, _ = build("gpt", "adamw", stage=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    kept = sw.Checkpoints(directory, keep=2)
    assert kept.latest() is None and kept.resume(run) is None

    def steps(first: int, last: int, saves: bool) -> list[Any]:
        seen: list[Any] = []
        for number in range(first, last):
            loss = CASES["gpt"].loss(model, number) * (1 + torch.rand(()))  # a random number of this rank's own
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            seen.append((loss.item(), optimizer.param_groups[0]["lr"]))
            if saves:
                kept.save(run, number + 1, scheduler=scheduler, extra={"position": number + 1})
        return seen

    torch.manual_seed(100 + torch.distributed.get_rank())
    steps(0, 4, True)
    expected = steps(4, 7, False)
    found = kept.resume(run, scheduler=scheduler)
    assert found is not None and found.extra == {"position": 4} and found.restored_rng
    is_same = steps(4, 7, False) == expected
    run.close()
    return is_same, [path.name for path in kept.all()]


def test_a_directory_of_checkpoints_with_a_scheduler(pool: RankPool, tmp_path: Path) -> None:
    for is_same, names in pool.run(resumed, str(tmp_path / "all")):
        assert is_same and names == ["step-00000003", "step-00000004"]
    with pytest.raises(CheckpointError, match="keep=0"):
        sw.Checkpoints(tmp_path, keep=0)


def lower_number(directory: str) -> list[str]:
    run, _, _, _, _ = build("gpt", "adamw", stage=3)
    kept = sw.Checkpoints(directory, keep=2)
    for number in (7, 8, 3):  # somebody went back to an earlier step
        kept.save(run, number)
    run.close()
    return [path.name for path in kept.all()]


def test_what_was_just_saved_is_never_removed(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(lower_number, str(tmp_path / "all"))[0] == ["step-00000003", "step-00000007", "step-00000008"]


# -- what does not fit -------------------------------------------------------------------------------------------------


def refused(path: str, what: str) -> tuple[str, bool]:
    """The error of loading or saving on this rank, and whether nothing has changed."""
    case, optimizer = {"another model": ("mlp", "adamw"), "another optimizer": ("gpt", "sgd")}.get(what, ("gpt", "adamw"))
    run, model, opt, _, _ = build(case, optimizer, seed=3, stage=3)
    train(run, model, opt, case, 0, 2)
    before = states(run)
    try:
        if what == "saved twice":
            run.save(path)
        elif what == "a value that cannot be saved":
            run.save(path + "-new", extra={"model": model})
        elif what == "no such directory":
            run.load(path + "-missing")
        else:
            run.load(path)
        text = "nothing"
    except CheckpointError as error:
        text = str(error)
    after = states(run)
    is_same = all(a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True))
    train(run, model, opt, case, 2, 3)  # the run goes on
    run.close()
    return text, is_same


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another model", r"does not fit the run; nothing was changed. \d+ differences: parameter '.*' is (not|only) in"),
        ("another optimizer", "the optimizer is AdamW there, SGD here"),
        ("saved twice", "exists already"),
        ("a value that cannot be saved", r"what is to be saved\['extra'\]\['model'\] is a GPT, which cannot be saved"),
        ("no such directory", "there is no checkpoint at"),
        ("a lost file", "cannot be opened"),
        ("a truncated file", "truncated or extended"),
        ("a flipped bit", "do not have the checksum that was saved"),
        ("a file of another checkpoint", "belongs to another checkpoint"),
        ("a lost manifest", "has no manifest.json"),
    ],
)
def test_what_does_not_fit_or_is_damaged_is_refused_on_all_ranks(pool: RankPool, tmp_path: Path, what: str, message: str) -> None:
    path = tmp_path / "checkpoint"
    pool.run(saved, str(path), "gpt", "adamw", {"stage": 3})
    second = path / "rank-00001-of-00002.safetensors"
    if what == "a lost file":
        second.unlink()
    elif what == "a truncated file":
        os.truncate(second, second.stat().st_size - 4096)
    elif what == "a flipped bit":
        data = bytearray(second.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start + 100] ^= 1
        second.write_bytes(data)
    elif what == "a file of another checkpoint":
        pool.run(saved, str(tmp_path / "other"), "gpt", "adamw", {"stage": 3})
        os.replace(tmp_path / "other" / second.name, second)
    elif what == "a lost manifest":
        (path / "manifest.json").unlink()
    found = pool.run(refused, str(path), what)
    assert all(is_same for _, is_same in found), "nothing was changed"
    assert all(text != "nothing" for text, _ in found)
    texts = [text for text, _ in found]
    assert any(re.search(message, text) for text in texts), texts
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], "nothing is left"


def partly(path: str) -> tuple[int, bool]:
    """A model with one block more than was saved."""
    from shardwise.testing.models import GPT, GPTConfig

    model = GPT(GPTConfig(vocabulary=67, context=16, layers=4, heads=2, hidden=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = sw.shard(model, optimizer, stage=3)
    found = run.load(path, strict=False)
    named = {name for name in found.left_out if name.startswith("blocks.3.")}
    result = len(found.left_out), len(named) == len(found.left_out) > 0
    run.close()
    return result


def test_what_is_left_out_is_listed(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path / "three"), "gpt", "adamw", {"stage": 3})
    for number, only_the_new_block in pool.run(partly, str(tmp_path / "three")):
        assert number == 12 and only_the_new_block
