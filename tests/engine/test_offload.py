"""States on host and disk: the same bits as in memory, at every stage, wherever they live; and nothing is lost or left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from cases import CASES, build, parity, sharded
from launching import Forked, run_program, without_launcher
from shardwise import native
from shardwise.errors import ConfigError, DiskError, MemoryBudgetError, OptimizerError
from shardwise.observe import delays
from shardwise.testing import ParityReport, RankPool, compare_with_plain
from shardwise.testing.models import GPT, GPTConfig
from shardwise.tiers import Kind, Tier
from shardwise.tiers import disk as disk_module
from shardwise.tiers import mover as mover_module
from shardwise.tiers.io import make_engine

TIERS = ("device", "host", "disk")
EVERYTHING = {"params": "disk", "grads": "disk", "optimizer": "disk"}
STEP_BYTES = 1 << 16


def placements(stage: int) -> list[dict[str, str]]:
    """Every placement that makes sense: below stage 3 parameters are whole and stay where they are."""
    return [
        {"params": params, "grads": grads, "optimizer": optimizer}
        for params in (TIERS if stage == 3 else ("device",))
        for grads in TIERS
        for optimizer in TIERS
    ]


MANNERS = [(1, None), (4, None), (1, 0.05), (4, 0.05)]
"""Accumulation and clipping."""


def some(
    stage: int, jobs: list[tuple[dict[str, str], int, float | None]], name: str = "gpt", steps: int = 2, **options: Any
) -> dict[str, ParityReport]:
    """Runs on a rank: parity for several placements and manners."""
    found = {}
    for place, accumulate, max_norm in jobs:
        offload = sw.Offload(**place, step_bytes=STEP_BYTES)
        key = f"{name} stage {stage} {place} accumulate {accumulate} clip {max_norm}"
        found[key] = parity(name, stage=stage, steps=steps, accumulate=accumulate, max_norm=max_norm, offload=offload, **options)
    return found


def assert_bitwise(answers: list[dict[str, ParityReport]], count: int) -> None:
    for rank, reports in enumerate(answers):
        assert len(reports) == count
        for what, report in reports.items():
            assert report.is_bitwise, f"{what} rank {rank}: {report}"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_placement_gives_the_bits_of_plain_training(pool: RankPool, stage: int) -> None:
    """Each placement once here, the manners in turn; the whole grid is among the slow tests."""
    jobs = [(place, *MANNERS[(7 * number + stage) % 4]) for number, place in enumerate(placements(stage))]
    assert_bitwise(pool.run(some, stage, jobs), len(jobs))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_placement_with_every_manner(pool: RankPool, stage: int) -> None:
    places = placements(stage) if stage else [{"optimizer": tier} for tier in TIERS]
    jobs = [(place, *manner) for place in places for manner in MANNERS]
    assert_bitwise(pool.run(some, stage, jobs, timeout_s=600), len(jobs))


@pytest.mark.parametrize("name", ["paged", "mlp", "frozen", "branchy", "lstm"])
def test_other_models_from_disk(pool: RankPool, name: str) -> None:
    assert_bitwise(pool.run(some, 3, [(EVERYTHING, 4, 0.05), ({"optimizer": "disk"}, 1, None)], name), 2)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rmsprop", "lion", "groups"])
def test_any_elementwise_optimizer_streams(pool: RankPool, optimizer: str) -> None:
    for stage, place in ((3, EVERYTHING), (1, {"optimizer": "disk"}), (2, {"grads": "disk"})):
        assert_bitwise(pool.run(some, stage, [(place, 1, 0.1)], optimizer=optimizer, steps=4), 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_from_disk(pool: RankPool, precision: str) -> None:
    jobs = [(place, 2, 0.05) for place in (EVERYTHING, {"params": "disk"}, {"optimizer": "disk"}, {"grads": "disk"})]
    assert_bitwise(pool.run(some, 3, jobs, precision=precision), 4)
    assert_bitwise(pool.run(some, 1, [({"optimizer": "disk"}, 1, None)], precision=precision), 1)


@pytest.mark.parametrize("transport", ["pairwise", "reference"])
def test_other_transports_from_disk(pool: RankPool, transport: str) -> None:
    assert_bitwise(pool.run(some, 3, [(EVERYTHING, 2, 0.05)], transport=transport), 1)


def delayed(steps: int) -> ParityReport:
    """Every edge is late by chance, and so is every block on the disk."""
    slow = disk_module.make_engine
    disk_module.make_engine = lambda: make_engine(num_threads=3, block_bytes=8192, delay_us=3000)  # type: ignore[assignment]
    try:
        chance = random.Random(7 + dist.get_rank())
        with delays(lambda edge: time.sleep(chance.uniform(0, 0.002))):
            return parity(
                "gpt", stage=3, steps=steps, accumulate=2, max_norm=0.05, offload=sw.Offload(**EVERYTHING, step_bytes=STEP_BYTES)
            )
    finally:
        disk_module.make_engine = slow


def test_delays_in_reads_and_writes_change_nothing(pool: RankPool) -> None:
    for report in pool.run(delayed, 4):
        assert report.is_bitwise, str(report)


# -- two memories ---------------------------------------------------------------------------------------------


def as_two_memories(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Runs on a rank as if the device had memory of its own: what is away is copied up and down, as on an accelerator."""
    with mock.patch.object(mover_module, "are_apart", return_value=True):
        return function(*args, **options)


def apart(stage: int) -> list[dict[str, str]]:
    """Every placement in which the CPU updates what is away."""
    return [place for place in placements(stage) if place["optimizer"] != "device" or set(place.values()) == {"device"}]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_memories_give_the_bits_of_one(pool: RankPool, stage: int) -> None:
    jobs = [(place, *MANNERS[(5 * number + stage) % 4]) for number, place in enumerate(apart(stage))]
    assert_bitwise(pool.run(as_two_memories, some, stage, jobs), len(jobs))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_memories_with_every_manner(pool: RankPool, stage: int) -> None:
    jobs = [(place, *manner) for place in apart(stage) for manner in MANNERS]
    assert_bitwise(pool.run(as_two_memories, some, stage, jobs, timeout_s=600), len(jobs))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_memories_in_16_bits(pool: RankPool, precision: str) -> None:
    host, mixed = dict.fromkeys(EVERYTHING, "host"), {"params": "disk", "grads": "host", "optimizer": "disk"}
    for stage, places in ((2, [{"optimizer": "host"}]), (3, [{"optimizer": "host"}, host, mixed])):
        assert_bitwise(pool.run(as_two_memories, some, stage, [(p, 2, 0.05) for p in places], precision=precision), len(places))


@pytest.mark.parametrize("name", ["paged", "mlp", "frozen", "branchy"])
def test_other_models_in_two_memories(pool: RankPool, name: str) -> None:
    places = [EVERYTHING, dict.fromkeys(EVERYTHING, "host"), {"params": "disk", "grads": "host", "optimizer": "host"}]
    jobs = [(place, 2, 0.05) for place in places]
    for optimizer in ("adamw", "sgd"):
        assert_bitwise(pool.run(as_two_memories, some, 3, jobs, name, optimizer=optimizer, transport="pairwise"), len(jobs))


def on_the_host(stage: int) -> tuple[bool, dict[str, int], int]:
    """What an accelerator would keep: which kinds are in host memory, and whether masters are apart from parameters."""
    place = dict(grads="host", optimizer="host", **({"params": "host"} if stage == 3 else {}))
    run, model, opt, _, _ = build("gpt", "fused", stage=stage, offload=sw.Offload(**place, step_bytes=STEP_BYTES))
    CASES["gpt"].loss(model, 0).backward()
    opt.step()
    regions = run._runtime.offload.regions
    kinds = {
        "param": sum(r.param is not None for r in regions),
        "grad": sum(r.grad is not None and r.grad.vector is not None for r in regions),
        "master": sum(r.master is not None for r in regions),
        "moment": sum(len(r.moments) for r in regions),
    }
    found = run._runtime.offload.step.is_native, kinds, run.ledger.now(Tier.DISK)
    run.close()
    return found


def test_states_in_a_host_of_its_own_are_updated_there(pool: RankPool) -> None:
    for stage, params, masters in ((1, 0, 1), (2, 0, 1), (3, 1, 0)):
        for is_native, kinds, on_disk in pool.run(as_two_memories, on_the_host, stage):
            assert is_native == (native.library() is not None) and on_disk == 0
            assert kinds == {"param": params, "grad": 1, "master": masters, "moment": 2}


def test_the_rest_works_in_two_memories(pool: RankPool) -> None:
    for stage in (0, 2, 3):  # masters apart from parameters that stay on the device
        for found in pool.run(as_two_memories, reading_and_writing, stage, {"optimizer": "host"}):
            assert all(found.values()), (stage, found)
    for found in pool.run(as_two_memories, reading_and_writing):
        assert all(found.values()), found
    for report in pool.run(as_two_memories, delayed, 2):
        assert report.is_bitwise, str(report)
    assert all(pool.run(as_two_memories, clipped_without_a_step))
    for is_equal, in_memory, on_disk in pool.run(as_two_memories, built_on_disk):
        assert is_equal and in_memory == 0 and on_disk > 0


@pytest.mark.parametrize("place", [{"params": "host"}, {"grads": "host"}, {"params": "disk", "grads": "disk"}])
def test_in_two_memories_what_is_away_is_updated_by_the_cpu_or_refused(place: dict[str, str]) -> None:
    model, optimizer = small()
    with mock.patch.object(mover_module, "are_apart", return_value=True), pytest.raises(ConfigError, match="optimizer='host'"):
        sharded(model, optimizer, stage=3, offload=sw.Offload(**place))
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)).backward()
    optimizer.step()


# -- the native Adam ------------------------------------------------------------------------------------------


def final_parameters(stage: int, place: dict[str, str], steps: int = 4) -> dict[str, torch.Tensor]:
    run, model, opt, _, _ = build("gpt", "fused", stage=stage, offload=sw.Offload(**place, step_bytes=STEP_BYTES))
    assert run._runtime.offload.step.is_native
    for step in range(steps):
        CASES["gpt"].loss(model, step).backward()
        run.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
    found = run.full_state_dict(rank0_only=False)
    run.close()
    return found


@pytest.mark.skipif(native.library() is None, reason="built without a C++ compiler")
def test_the_native_adam_gives_the_same_bits_wherever_states_live(pool: RankPool) -> None:
    jobs = [(1, {"optimizer": "host"}), (1, {"optimizer": "disk"}), (2, {"optimizer": "host", "grads": "disk"})]
    jobs += [(3, {"optimizer": "host"}), (3, EVERYTHING), (3, {"params": "disk", "optimizer": "host"})]
    first = pool.run(final_parameters, *jobs[0])
    for job in jobs[1:]:
        for expected, found in zip(first, pool.run(final_parameters, *job), strict=True):
            assert all(torch.equal(expected[name], found[name]) for name in expected), job


@pytest.mark.skipif(native.library() is None, reason="built without a C++ compiler")
@pytest.mark.parametrize("stage", [1, 3])
def test_the_native_adam_stays_within_its_bound_of_torch(pool: RankPool, stage: int) -> None:
    """docs/numerics.md."""
    offload = sw.Offload(optimizer="host")
    # Not a model with attention: the gradient of a key's bias is zero but for rounding, and Adam makes steps of its sign.
    for report in pool.run(parity, "mlp", optimizer="fused", stage=stage, steps=10, offload=offload):
        assert report.compared_elements > 0
        assert report.largest <= 1e-5, str(report)


# -- around the step ------------------------------------------------------------------------------------------


def reading_and_writing(stage: int = 3, place: dict[str, str] = EVERYTHING) -> dict[str, Any]:
    """What users do outside the loop, with states away: gathered contexts, state dicts, evaluation, closures."""
    run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=stage, offload=sw.Offload(**place, step_bytes=STEP_BYTES))
    found: dict[str, Any] = {}
    with run.gathered(model.blocks[1]), torch.no_grad():
        model.blocks[1].up.weight.mul_(2.0)
    with torch.no_grad():
        plain.blocks[1].up.weight.mul_(2.0)
    found["after gathered"] = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=2).is_bitwise
    state = run.full_state_dict(rank0_only=False)
    with torch.no_grad():
        found["evaluation"] = torch.equal(CASES["gpt"].loss(model, 5), CASES["gpt"].loss(plain, 5))
    model.load_state_dict({name: value * 0.5 for name, value in state.items()})
    again = run.full_state_dict(rank0_only=False)
    found["loaded"] = all(torch.equal(again[name], state[name] * 0.5) for name in state)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = CASES["gpt"].loss(model, 3)
        loss.backward()
        return loss

    before = run.full_state_dict(rank0_only=False)["blocks.0.up.weight"].clone()
    found["closure's loss"] = bool(torch.isfinite(opt.step(closure)))
    found["closure's step"] = not torch.equal(before, run.full_state_dict(rank0_only=False)["blocks.0.up.weight"])
    found["pieces kept"] = all(len(group["params"]) > 0 for group in opt.param_groups)
    run.close()
    return found


def test_everything_around_the_step_works_from_disk(pool: RankPool) -> None:
    for found in pool.run(reading_and_writing):
        assert all(found.values()), found


def clipped_without_a_step() -> bool:
    """A clip that no step followed must not reach the next gradients."""
    run, model, opt, plain, plain_opt = build("gpt", "sgd", stage=3, offload=sw.Offload(**EVERYTHING, step_bytes=STEP_BYTES))
    CASES["gpt"].loss(model, 9).backward()
    run.clip_grad_norm_(1e-3)
    opt.zero_grad()
    is_bitwise = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=2).is_bitwise
    run.close()
    return is_bitwise


def test_a_clip_without_a_step_leaves_no_trace(pool: RankPool) -> None:
    assert all(pool.run(clipped_without_a_step))


def built_on_disk() -> tuple[bool, int, int]:
    torch.manual_seed(0)
    expected = {name: value.clone() for name, value in CASES["paged"].build().state_dict().items()}
    torch.manual_seed(0)
    offload = sw.Offload(**EVERYTHING)
    with sw.sharded_init(offload=offload):
        model = CASES["paged"].build()
    run = sharded(model, torch.optim.AdamW(model.parameters()), stage=3, offload=offload)
    found = run.full_state_dict(rank0_only=False)
    in_memory = run.ledger.now(Tier.HOST, Kind.PARAM)
    on_disk = run.ledger.now(Tier.DISK, Kind.PARAM)
    run.close()
    return all(torch.equal(found[name], expected[name]) for name in expected), in_memory, on_disk


def test_a_model_built_on_disk_has_the_bits_of_plain_construction(pool: RankPool) -> None:
    for is_equal, in_memory, on_disk in pool.run(built_on_disk):
        assert is_equal and in_memory == 0 and on_disk > 0


def bytes_read() -> tuple[int, int]:
    run, model, _, _, _ = build("paged", "adamw", stage=3, offload=sw.Offload(params="disk"), prefetch_bytes=0)
    disk = run._runtime.offload.disk
    before = disk.bytes_read
    with torch.no_grad():
        CASES["paged"].loss(model, 0)
    found = disk.bytes_read - before
    stored = sum(unit.layout.shard_numel * 4 for unit in run._runtime.units)
    run.close()
    return found, stored


def test_every_rank_reads_its_own_slice_only(pool: RankPool) -> None:
    for found, stored in pool.run(bytes_read):
        assert stored <= found < 1.1 * stored, "each shard once, whole blocks"


def zeroed_in_place(place: dict[str, str]) -> dict[str, torch.Tensor]:
    run, model, opt, _, _ = build("gpt", "sgd", stage=3, offload=sw.Offload(**place, step_bytes=STEP_BYTES))
    for step in range(3):
        CASES["gpt"].loss(model, step).backward()
        run.clip_grad_norm_(0.05)
        opt.step()
        opt.zero_grad(set_to_none=False)
    opt.step()  # with gradients of zero: momentum goes on
    run.clip_grad_norm_(0.05)
    found = run.full_state_dict(rank0_only=False)
    run.close()
    return found


def test_gradients_zeroed_in_place_are_zero_on_disk_too(pool: RankPool) -> None:
    for expected, found in zip(pool.run(zeroed_in_place, {}), pool.run(zeroed_in_place, EVERYTHING), strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)


class HalfUsed(torch.nn.Module):
    """Blocks of which each rank uses another half."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            used = block[dist.get_rank() % 2]
            x = x + torch.tanh(used(x)) + 0.0 * block[1 - dist.get_rank() % 2].weight.detach().sum()
        return x.square().mean()


def half_used() -> ParityReport:
    torch.manual_seed(0)
    model, plain = HalfUsed(), HalfUsed()
    plain.load_state_dict(model.state_dict())
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    run = sharded(
        model,
        opts[0],
        stage=3,
        offload=sw.Offload(**EVERYTHING, step_bytes=STEP_BYTES),
        units=torch.nn.ModuleList,
        timeout_s=20.0,
    )

    def loss_of(m: torch.nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = m(torch.randn(3, 16, generator=torch.Generator().manual_seed(step)))
        return loss

    report = compare_with_plain(run, model, opts[0], plain, opts[1], loss_of, steps=3)
    run.close()
    return report


def test_parameters_that_only_some_ranks_use(pool: RankPool) -> None:
    for report in pool.run(half_used):
        assert report.is_bitwise, str(report)


def test_after_close_states_on_disk_are_gone_and_say_so(tmp_path: Path) -> None:
    model, optimizer = small()
    run = sharded(model, optimizer, stage=3, offload=sw.Offload(**EVERYTHING, path=tmp_path))
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    for _ in range(2):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(tokens[:, :-1], tokens[:, 1:])  # gathers for its backward were started early
    run.close()
    run.close()
    with pytest.raises(DiskError, match="is closed"):
        loss.backward()
    with pytest.raises(DiskError, match="is closed"):
        run.full_state_dict()


def two_models() -> bool:
    torch.manual_seed(0)
    offload = sw.Offload(**EVERYTHING)
    with sw.sharded_init(offload=offload):
        first, second = CASES["paged"].build(), CASES["paged"].build()
    torch.manual_seed(0)
    plain = [CASES["paged"].build() for _ in range(2)]
    runs = [sharded(m, torch.optim.SGD(m.parameters(), lr=0.1), stage=3, offload=offload) for m in (first, second)]
    found = [run.full_state_dict(rank0_only=False) for run in runs]
    for run in runs:
        run.close()
    return all(torch.equal(values[n], v) for values, m in zip(found, plain, strict=True) for n, v in m.state_dict().items())


def test_two_models_built_side_by_side_on_disk(pool: RankPool) -> None:
    assert all(pool.run(two_models))


class Noted(torch.optim.AdamW):
    """A subclass whose step calls its parent's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def subclassed() -> bool:
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # its step announces itself from here on
    torch.manual_seed(0)
    model, plain = (GPT(GPTConfig(vocabulary=67, context=16, layers=2, heads=2, hidden=24)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    opts = [Noted(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sharded(model, opts[0], stage=3, offload=sw.Offload(**EVERYTHING, step_bytes=STEP_BYTES))
    is_bitwise = compare_with_plain(run, model, opts[0], plain, opts[1], CASES["gpt"].loss, steps=3).is_bitwise
    run.close()
    return is_bitwise


def test_a_subclass_that_calls_its_parents_step(pool: RankPool) -> None:
    assert all(pool.run(subclassed))


def groups_with_other_states() -> bool:
    torch.manual_seed(0)
    model, plain = (GPT(GPTConfig(vocabulary=67, context=16, layers=2, heads=2, hidden=24)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    opts = []
    for m in (model, plain):
        groups = [{"params": [m.wte.weight]}, {"params": list(m.blocks.parameters()), "momentum": 0.9}]
        opts.append(torch.optim.SGD(groups, lr=0.1))
    run = sharded(model, opts[0], stage=3, offload=sw.Offload(**EVERYTHING, step_bytes=STEP_BYTES))
    is_bitwise = compare_with_plain(run, model, opts[0], plain, opts[1], CASES["gpt"].loss, steps=3).is_bitwise
    run.close()
    return is_bitwise


def test_groups_whose_states_differ(pool: RankPool) -> None:
    assert all(pool.run(groups_with_other_states))


@pytest.mark.parametrize("place", [{}, {"optimizer": "disk"}])
def test_one_rank_at_stage_0_in_16_bits(place: dict[str, str]) -> None:
    report = parity("gpt", stage=0, steps=3, precision="bf16", offload=sw.Offload(**place))
    assert report.is_bitwise, str(report)


class Counting(torch.optim.SGD):
    """Keeps a count of its own calls, which a step in portions would spoil."""

    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    with torch.no_grad():
                        param.add_(param.grad, alpha=-group["lr"] / self.calls)


def test_an_optimizer_that_counts_its_calls_is_refused() -> None:
    model, _ = small()
    with pytest.raises(OptimizerError, match=r"cannot stream.*two calls"):
        sharded(model, Counting(model.parameters(), lr=0.1), stage=3, offload=sw.Offload(optimizer="disk"))


def part_of_the_model() -> bool:
    """Parameters that the optimizer was not given have gradients and stay as they are."""
    model, _ = small()
    optimizer = torch.optim.AdamW(model.blocks[0].parameters())
    run = sharded(model, optimizer, stage=3, offload=sw.Offload(**EVERYTHING, step_bytes=STEP_BYTES))
    before = run.full_state_dict(rank0_only=False)
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    after = run.full_state_dict(rank0_only=False)
    run.close()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    return bool(changed) and all(name.startswith("blocks.0.") for name in changed)


def test_what_no_group_has_is_not_updated(pool: RankPool) -> None:
    assert all(pool.run(part_of_the_model))


# -- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": "dsk"}, "did you mean 'disk'"),
        ({"optimiser": "disk"}, "did you mean 'optimizer'"),
        ({"path": "/tmp"}, "nothing is on disk"),
        ({"step_bytes": 10}, "step_bytes=10"),
        ({"host_bytes": 0}, "host_bytes=0"),
        ({"path": 7, "grads": "disk"}, "must be a directory"),
    ],
)
def test_an_offload_that_makes_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        sw.Offload(**options)


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = GPT(GPTConfig(vocabulary=67, context=16, layers=2, heads=2, hidden=24))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("stage", "offload", "text"),
    [
        (2, sw.Offload(params="disk"), "Use stage=3"),
        (0, sw.Offload(grads="disk"), "Use stage 1, 2 or 3"),
        (3, "tape", "is not a tier"),
        (3, 5, "must be a shardwise.Offload"),
    ],
)
def test_a_placement_that_makes_no_sense_is_refused(stage: int, offload: Any, text: str) -> None:
    model, optimizer = small()
    with pytest.raises(ConfigError, match=text):
        sharded(model, optimizer, stage=stage, offload=offload)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"path": "/nowhere/at/all"}, DiskError, "does not exist"),
        ({"path": "/proc/self"}, DiskError, "/proc/self"),
        ({"host_bytes": 1000}, MemoryBudgetError, r"\d+ bytes are needed.*largest Unit, 'blocks"),
        ({"host_bytes": 1 << 60}, MemoryBudgetError, "more than this machine's memory"),
    ],
)
def test_a_place_that_cannot_hold_it_is_refused_and_nothing_is_changed(options: dict[str, Any], kind: Any, text: str) -> None:
    model, optimizer = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind, match=text):
        sharded(model, optimizer, stage=3, offload=sw.Offload(**{**EVERYTHING, **options}))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)).backward()
    optimizer.step()


def test_a_model_built_on_disk_does_not_come_back_to_memory_unasked() -> None:
    with sw.sharded_init(offload="disk"):
        model, optimizer = small()
    with pytest.raises(ConfigError, match="no offload"):
        sharded(model, optimizer, stage=3)
    run = sharded(model, optimizer, stage=3, offload=sw.Offload())
    assert run.ledger.now(Tier.DISK) == 0 and not run.placement()
    run.close()


def test_after_sharding_a_model_built_on_disk_its_construction_is_gone() -> None:
    with sw.sharded_init(offload="disk"):
        model, optimizer = small()
    construction = next(iter(model.parameters()))._shardwise.unit.owner
    gone = weakref.ref(construction)
    del construction
    run = sharded(model, optimizer, stage=3, offload="disk")
    assert gone() is None
    run.close()


def interrupted_while_waiting() -> tuple[bool, int]:
    """Ctrl-C in the middle of a fetch: what was being read is neither lent again nor lost, and training goes on."""
    place = {"params": "disk", "grads": "host", "optimizer": "host"}
    run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=3, offload=sw.Offload(**place, step_bytes=STEP_BYTES))
    waits = 0

    def interrupt(edge: str) -> None:
        nonlocal waits
        if edge == "gather.wait":
            waits += 1
            if waits == 3:
                raise KeyboardInterrupt

    with delays(interrupt), contextlib.suppress(KeyboardInterrupt):
        CASES["gpt"].loss(model, 0)
    report = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=2)
    run.close()
    return report.is_bitwise, waits


def test_an_interrupted_gather_is_neither_lost_nor_used_twice(pool: RankPool) -> None:
    for function in (interrupted_while_waiting, functools.partial(as_two_memories, interrupted_while_waiting)):
        for is_bitwise, waits in pool.run(function):
            assert is_bitwise and waits == 3


def test_one_ranks_missing_directory_is_an_error_on_all(pool: RankPool) -> None:
    for rank, text in enumerate(pool.run(missing_on_rank_1)):
        assert "does not exist" in text and ("rank 1" in text) == (rank == 0)


def missing_on_rank_1() -> str:
    model, optimizer = small()
    path = "/nowhere/at/all" if dist.get_rank() == 1 else None
    try:
        sharded(model, optimizer, stage=3, offload=sw.Offload(**EVERYTHING, path=path))
    except DiskError as error:
        return str(error)
    return "no error"


def test_a_file_truncated_underneath_fails_the_step_with_its_place(tmp_path: Path) -> None:
    model, optimizer = small()
    run = sharded(model, optimizer, stage=3, offload=sw.Offload(**EVERYTHING, path=tmp_path))
    disk = run._runtime.offload.disk
    assert disk is not None
    os.truncate(f"/proc/self/fd/{disk.file.descriptor}", 4096)
    with pytest.raises(DiskError, match="truncated") as caught:
        model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
    assert str(tmp_path) in str(caught.value) and "offset" in str(caught.value)


def test_a_budget_that_suffices_is_kept(tmp_path: Path) -> None:
    model, optimizer = small()
    budget = 64 << 20
    offload = sw.Offload(**EVERYTHING, path=tmp_path, host_bytes=budget, step_bytes=STEP_BYTES)
    run = sharded(model, optimizer, stage=3, offload=offload, exchange_bytes=1 << 20)
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    for _ in range(2):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < run.ledger.peak(Tier.HOST) <= budget
    report = run.report()
    assert "offload: params disk, grads disk, optimizer disk" in report and "disk: " in report
    run.close()


VICTIM = """
import sys, torch, shardwise as sw
from shardwise.testing.models import GPT, GPTConfig
torch.manual_seed(0)
model = GPT(GPTConfig(vocabulary=500, context=16, layers=4, heads=2, hidden=64))
optimizer = torch.optim.AdamW(model.parameters())
run = sw.shard(model, optimizer, stage=3, offload=sw.Offload(params="disk", grads="disk", optimizer="disk", path=sys.argv[1]))
tokens = torch.arange(10).view(1, 10)
for step in range(int(sys.argv[2])):
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
"""


def start(directory: Path, steps: int) -> Forked:
    """Start VICTIM with its states in `directory`, its program and what it prints beside it."""
    number = len(list(directory.parent.glob("*.out")))
    script, out = directory.parent / "victim.py", directory.parent / f"{number}.out"
    if not script.exists():  # a process that is about to read it must not find it empty
        script.write_text(VICTIM)
    out.touch()
    return Forked([str(script), str(directory), str(steps)], out=out, env=without_launcher())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_killed_leaves_nothing_and_disturbs_nobody(tmp_path: Path, how: signal.Signals) -> None:
    place = tmp_path / "place"
    place.mkdir()
    alone = start(place, 3)
    assert alone.finish() == 0, alone.out.read_text()
    expected = alone.out.read_text()
    assert expected.count("\n") == 3
    victim, neighbour = start(place, 100_000), start(place, 3)
    try:
        victim.wait_for_output("0 ")
        time.sleep(0.05)  # in the middle of some step
        victim.send_signal(how)
        assert victim.finish(60) == -how
        assert neighbour.finish() == 0
        assert neighbour.out.read_text() == expected, "the live neighbour trained as if alone"
        assert os.listdir(place) == []
        after = start(place, 3)
        assert after.finish() == 0
        assert after.out.read_text() == expected, "a new run on the same path is unaffected"
    finally:
        for process in (victim, neighbour):
            process.finish(0)


def test_without_the_native_library_everything_works_and_gives_the_same_numbers(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with_it = start(place, 3)
    env = {**without_launcher(), "SHARDWISE_NATIVE": "0"}
    without = run_program([sys.executable, str(tmp_path / "victim.py"), str(place), "3"], env=env)
    assert with_it.finish() == 0 and without.returncode == 0, without.stderr
    assert with_it.out.read_text() == without.stdout and without.stdout.count("\n") == 3


# -- ranks that use different Units -------------------------------------------------------------------------------


def diverging(case: str, options: dict[str, Any]) -> tuple[Any, bool, str]:
    run, model, opt, plain, plain_opt = build(case, "adamw", stage=3, **options)
    report = compare_with_plain(run, model, opt, plain, plain_opt, CASES[case].loss, steps=6)
    allowed, text = run.transport.allows_different_units, run.report()
    state = run.full_state_dict(rank0_only=False)
    same = all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    run.close()
    return report, allowed and same, text


@pytest.mark.parametrize("offload", [sw.Offload(params="disk"), "disk"], ids=["parameters", "everything"])
def test_ranks_may_use_different_units_from_disk_on_one_host(pool: RankPool, offload: Any) -> None:
    for report, allowed, text in pool.run(diverging, "branchy-by-rank", {"offload": offload}):
        assert report.is_bitwise and allowed, str(report)
        assert "each reads all shards itself" in text


def test_ranks_that_agree_read_their_own_shards_only(pool: RankPool) -> None:
    for report, allowed, text in pool.run(diverging, "branchy", {"offload": "disk"}):
        assert report.is_bitwise and allowed, str(report)
        assert "each reads all shards itself" not in text


def one_evaluates_alone() -> bool:
    """Rank 0 runs forward passes that nobody else runs, while rank 1 goes on to the next step."""
    run, model, opt, _, _ = build("gpt", "adamw", stage=3, offload="disk")
    CASES["gpt"].loss(model, 0).backward()
    opt.step()
    opt.zero_grad()
    same = True
    if dist.get_rank() == 0:
        with torch.no_grad():
            values = [CASES["gpt"].loss(model, 7) for _ in range(3)]
        same = all(torch.equal(values[0], value) for value in values)
    loss = CASES["gpt"].loss(model, 1)
    loss.backward()
    opt.step()
    run.close()
    return same and bool(torch.isfinite(loss))


def test_one_rank_may_evaluate_alone_from_disk(pool: RankPool) -> None:
    assert pool.run(one_evaluates_alone) == [True, True]


@pytest.mark.parametrize("transport", ["pairwise"])
def test_the_report_says_whether_ranks_may_use_different_units(pool: RankPool, transport: str) -> None:
    for _, allowed, text in pool.run(diverging, "branchy", {"transport": transport}):
        assert not allowed and "all ranks must use the same Units in forward" in text
