"""Sharded training against plain replicated training, element by element, every step."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

import shardwise as sw
from cases import CASES, OPTIMIZERS, build, parity
from shardwise.observe import delays
from shardwise.testing import ParityReport, RankPool, compare_with_plain

NAMES = ["gpt", "mlp", "conv", "lstm", "frozen", "branchy", "branchy-by-rank"]
STAGES = [0, 1, 2, 3]


def assert_bitwise(reports: list[ParityReport], what: str = "") -> None:
    assert reports, "no rank reported"
    for rank, report in enumerate(reports):
        assert report.is_bitwise, f"{what} rank {rank}: {report}"


def many(names: list[str], stages: list[int], **kwargs: Any) -> dict[str, ParityReport]:
    """Runs on a rank: several parity runs in one round trip."""
    found = {}
    for name in names:
        for stage in stages:
            for accumulate in (1, 4):
                for max_norm in (None, 0.05):
                    key = f"{name} stage {stage} accumulate {accumulate} clip {max_norm}"
                    joins = "none" if accumulate == 1 else "all" if max_norm is None else "some"
                    found[key] = parity(name, stage=stage, accumulate=accumulate, max_norm=max_norm, joins=joins, **kwargs)
    return found


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=pytest.mark.slow if stage == 2 and name != "gpt" else [])
        for name in NAMES
        for stage in STAGES
    ],
)
def test_two_ranks_equal_plain_training_to_the_last_bit(pool: RankPool, name: str, stage: int) -> None:
    for rank, reports in enumerate(pool.run(many, [name], [stage], steps=10)):
        assert len(reports) == 4
        for what, report in reports.items():
            assert report.is_bitwise, f"{what} rank {rank}: {report}"


@pytest.mark.parametrize("stage", STAGES)
def test_other_transports_give_the_same_bits(pool: RankPool, stage: int) -> None:
    for transport in ("pairwise", "reference"):
        for name in ("gpt", "mlp", "frozen"):
            reports = pool.run(parity, name, stage=stage, steps=4, accumulate=2, transport=transport)
            assert_bitwise(reports, f"{name} {transport}")


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "fused"] + ["groups"])
def test_every_elementwise_optimizer(pool: RankPool, optimizer: str) -> None:
    for stage in (1, 3):
        assert_bitwise(pool.run(parity, "gpt", optimizer=optimizer, stage=stage, steps=6, max_norm=0.1), optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_fused_optimizer_stays_within_its_bound(pool: RankPool, stage: int) -> None:
    """docs/numerics.md: torch's fused kernel rounds its vector tail differently."""
    for report in pool.run(parity, "gpt", optimizer="fused", stage=stage, steps=10):
        assert report.compared_elements > 0
        assert report.largest <= 1e-5, str(report)


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_more_ranks_and_rank_order_sums(request: pytest.FixtureRequest, world: int) -> None:
    """Sums are formed in rank order, so even three and four ranks agree with the reference to the last bit."""
    ranks: RankPool = request.getfixturevalue(f"pool{world}")
    for stage in STAGES if world == 3 else (1, 3):  # on two cores four ranks take their time
        for transport in ("auto", "pairwise"):
            for name in ("gpt", "mlp", "branchy-by-rank" if transport == "auto" else "branchy"):
                reports = ranks.run(parity, name, stage=stage, steps=3, accumulate=2, transport=transport)
                assert_bitwise(reports, f"{world} ranks {name} stage {stage} {transport}")


def test_world_of_one_takes_the_same_path() -> None:
    for stage in STAGES:
        for name in ("gpt", "conv", "branchy"):
            assert_bitwise([parity(name, stage=stage, steps=4, accumulate=2, max_norm=0.05)], f"{name} {stage}")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_sixteen_bit_storage_rounds_where_the_reference_rounds(pool: RankPool, stage: int, precision: str) -> None:
    for name in ("gpt", "mlp", "frozen"):
        reports = pool.run(parity, name, stage=stage, steps=6, accumulate=2, precision=precision)
        assert_bitwise(reports, f"{name} {precision} stage {stage}")


def test_sixteen_bit_wire(pool: RankPool) -> None:
    precision = sw.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
    for transport in ("auto", "pairwise"):
        assert_bitwise(pool.run(parity, "gpt", stage=3, steps=4, precision=precision, transport=transport))


class _RandomDelay:
    """Sleeps a random while at asynchronous edges, differently on every rank and thread."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self.edges: set[str] = set()

    def __call__(self, edge: str) -> None:
        with self._lock:
            self.edges.add(edge)
            wait_s = self._random.random() * self._longest_s if self._random.random() < 0.5 else 0.0
        time.sleep(wait_s)


def delayed(name: str, steps: int, longest_s: float, **options: Any) -> tuple[ParityReport, set[str]]:
    delay = _RandomDelay(torch.distributed.get_rank(), longest_s)
    with delays(delay):
        report = parity(name, steps=steps, **options)
    return report, delay.edges


EDGES = {"gather.start", "gather.expose", "reduce.start", "reduce.post", "reduce.land", "combine"}


@pytest.mark.parametrize(
    ("transport", "name", "edges"),
    [("auto", "gpt", EDGES | {"fence"}), ("auto", "paged", EDGES | {"fence"}), ("pairwise", "gpt", EDGES | {"gather.wait"})],
)
def test_delays_at_every_asynchronous_edge_change_nothing(pool: RankPool, transport: str, name: str, edges: set[str]) -> None:
    seen: set[str] = set()
    for stage in STAGES if name == "gpt" else (3,):
        for report, found in pool.run(delayed, name, 4, 0.003, stage=stage, accumulate=2, transport=transport):
            assert report.is_bitwise, str(report)
            seen |= found
    assert edges <= seen


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "name"), [("auto", "gpt"), ("auto", "paged"), ("pairwise", "gpt")])
def test_two_hundred_steps_with_random_delays(pool: RankPool, transport: str, name: str) -> None:
    for report, _ in pool.run(delayed, name, 200, 0.002, stage=3, transport=transport, timeout_s=600):
        assert report.is_bitwise, str(report)


def check_detects() -> tuple[bool, str]:
    """A comparison that cannot fail proves nothing: one changed master must show."""
    run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=3)
    with run.gathered(model.blocks[1]), torch.no_grad():
        model.blocks[1].up.weight[0, 0] += 1e-6
    report = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=1)
    run.close()
    return report.is_bitwise, str(report)


def test_the_comparison_notices_one_changed_element(pool: RankPool) -> None:
    for is_bitwise, text in pool.run(check_detects):
        assert not is_bitwise
        assert "blocks.1.up.weight" in text


def selfcheck(stage: int) -> tuple[bool, str, float]:
    run, model, opt, _, _ = build("gpt", "groups", stage=stage)
    for number in range(2):
        CASES["gpt"].loss(model, number).backward()
        opt.step()
        opt.zero_grad()
    before = run.master("blocks.0.up.weight")
    report = run.selfcheck(CASES["gpt"].loss, steps=3)
    moved = float((run.master("blocks.0.up.weight") - before).abs().max())
    CASES["gpt"].loss(model, 9).backward()
    opt.step()
    run.close()
    return report.is_bitwise, str(report), moved


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_selfcheck_compares_the_users_model_and_leaves_it_alone(pool: RankPool, stage: int) -> None:
    for is_bitwise, text, moved in pool.run(selfcheck, stage):
        assert is_bitwise, text
        assert "equal to the last bit" in text
        assert moved == 0.0
