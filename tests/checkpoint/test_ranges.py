"""`run.state_dict()`: one rank's part goes through storage of the user's own and comes back; others are refused together."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from cases import CASES, build
from shardwise.errors import CheckpointError
from shardwise.testing import RankPool

DISK = sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)
Options = dict[str, Any]


def train(run: sw.Run, model: Any, optimizer: Any, case: str, first: int, last: int) -> list[float]:
    """Losses depend on random numbers of this rank's own."""
    losses = []
    for number in range(first, last):
        loss = CASES[case].loss(model, number) * (1 + torch.rand(()) + random.random())
        run.scaler.scale(loss).backward()
        run.scaler.step(optimizer)
        run.scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held(run: sw.Run) -> list[Any]:
    """Everything on this rank that must not change when a load is refused."""
    ranges = [(name, kind, start, values.detach().clone()) for name, kind, start, values in run._survivors.ranges()]
    return [*ranges, *[(name, kind, 0, torch.as_tensor(value).clone()) for name, kind, value in run._survivors.counters()]]


def is_same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) > 0 and all(
        a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in zip(found, expected, strict=True)
    )


def there_and_back(directory: str, case: str, optimizer: str, options: Options) -> dict[str, bool]:
    rank = dist.get_rank()
    random.seed(rank)
    torch.manual_seed(100 + rank)
    run, model, opt, _, _ = build(case, optimizer, **options)
    train(run, model, opt, case, 0, 3)
    opt.param_groups[0]["lr"] = 0.003
    path = f"{directory}/mine-{rank}.pt"
    torch.save(run.state_dict(), path)
    before, buffers = held(run), [buffer.clone() for buffer in model.buffers()]
    expected = train(run, model, opt, case, 3, 6)
    after = held(run)
    run.close()

    other, model, opt, _, _ = build(case, optimizer, seed=1, **options)
    train(other, model, opt, case, 20, 22)
    other.load_state_dict(torch.load(path, weights_only=True))
    answers = {
        "states": is_same(held(other), before),
        "buffers": all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True)),
        "settings": opt.param_groups[0]["lr"] == 0.003,
        "steps": other._runtime.num_steps == 3,
        "losses": train(other, model, opt, case, 3, 6) == expected,
        "end": is_same(held(other), after),
    }
    other.close()
    return answers


JOBS: dict[str, tuple[str, str, Options]] = {
    "stage 0": ("frozen", "adamw", {"stage": 0}),
    "stage 1": ("mlp", "adagrad", {"stage": 1}),
    "stage 2, buffers": ("conv", "sgd", {"stage": 2, "transport": "pairwise"}),
    "stage 3, fp16 with a scale": ("gpt", "adamw", {"stage": 3, "precision": "fp16"}),
    "disk": ("frozen", "adamw", {"stage": 3, "offload": DISK}),
    "the native Adam": ("gpt", "fused", {"stage": 1, "offload": sw.Offload(optimizer="host")}),
    "parameters that were never used": ("branchy", "adamw", {"stage": 3}),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_rank_goes_on_from_its_own_dict_to_the_last_bit(pool: RankPool, tmp_path: Path, name: str) -> None:
    case, optimizer, options = JOBS[name]
    for answers in pool.run(there_and_back, str(tmp_path), case, optimizer, options):
        assert all(answers.values()), answers


def written(directory: str, case: str, options: Options) -> None:
    run, model, opt, _, _ = build(case, "adamw", **options)
    train(run, model, opt, case, 0, 2)
    torch.save(run.state_dict(), f"{directory}/mine-{dist.get_rank()}.pt")
    run.close()


def refused(directory: str, what: str) -> tuple[str, bool, bool]:
    """The error of this rank; whether nothing has changed; whether a later step works."""
    rank = dist.get_rank()
    case, options = ("mlp", {"stage": 3}) if what == "another model" else ("gpt", {"stage": 3})
    if what == "another layout":
        options["joins"] = "all"
    run, model, opt, _, _ = build(case, "sgd" if what == "another optimizer" else "adamw", seed=1, **options)
    train(run, model, opt, case, 0, 2)
    taken = 1 - rank if what == "another rank" else min(rank, 1)
    state = torch.load(f"{directory}/mine-{taken}.pt", weights_only=True)
    if what == "another world size":
        state["mark"]["rank"] = rank
    elif what == "one rank's was changed" and rank == 1:
        del state["values"][next(iter(state["values"]))]
    elif what == "one rank's state was cut" and rank == 1:
        state["states"][next(iter(state["states"]))]["exp_avg"] = ("long", torch.zeros(1))
    elif what == "something else":
        state = model.state_dict()
    before = held(run)
    draws = torch.get_rng_state()
    try:
        run.load_state_dict(state)
        text = "nothing"
    except CheckpointError as error:
        text = str(error)
    unchanged = is_same(held(run), before) and torch.equal(torch.get_rng_state(), draws)
    losses = train(run, model, opt, case, 2, 3)
    run.close()
    return text, unchanged, len(losses) == 1


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another rank", r"of rank \d; this is rank \d"),
        ("another world size", "of a run of world size 2; this is a run of world size 3"),
        ("another model", "of another model or layout: parameter '.*' is (not there|.*) in it, .* here"),
        ("another layout", "of another model or layout: parameter '.*' is .* in it"),
        ("another optimizer", "the optimizer is AdamW there, SGD here"),
        ("one rank's was changed", r"has None as 'value' of parameter '.*'; \d+ elements are needed"),
        ("one rank's state was cut", r"has a tensor of shape \[1\] as 'exp_avg' of parameter"),
        ("something else", "that run.state_dict.. has not made"),
    ],
)
def test_a_dict_that_is_not_this_ranks_is_refused_on_all_ranks(
    pool: RankPool, pool3: RankPool, tmp_path: Path, what: str, message: str
) -> None:
    pool.run(written, str(tmp_path), "gpt", {"stage": 3})
    found = (pool3 if what == "another world size" else pool).run(refused, str(tmp_path), what)
    assert any(re.search(message, text) for text, _, _ in found), found
    for text, unchanged, goes_on in found:
        assert text != "nothing" and unchanged and goes_on, text
