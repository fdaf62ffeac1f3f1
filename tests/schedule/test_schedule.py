"""The schedule: a pure plan, a runner that treats it as a hint, a depth that learns, and prefetch in a live run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cases import CASES, build
from shardwise.schedule import Depth, Move, Runner, make_plan
from shardwise.testing import RankPool, compare_with_plain


def test_a_plan_keeps_depth_budget_and_order() -> None:
    rng = random.Random(0)
    for _ in range(500):
        moves = [Move(unit, "shards", "full", rng.randrange(1, 100)) for unit in range(rng.randrange(1, 12))]
        order = [rng.choice(moves) for _ in range(rng.randrange(0, 40))]
        budget, depth = rng.randrange(0, 200), rng.randrange(1, 6)
        plan = make_plan(order, len(order) // 2, budget, depth)
        assert len(plan.reach) == len(order) + 1
        for position, stop in enumerate(plan.reach):
            ahead = [move.num_bytes for move in order[position:stop]]
            assert len(ahead) <= depth
            assert sum(ahead) <= budget
            fits_one_more = stop < len(order) and len(ahead) < depth and sum(ahead) + order[stop].num_bytes <= budget
            assert not fits_one_more, "it could have started one more"
        assert all(a <= b for a, b in zip(plan.reach, plan.reach[1:], strict=False))


class Machine:
    """Units as sets of numbers: gathering, gathered; checks every rule the runtime relies on."""

    def __init__(self, sizes: dict[int, int], budget: int) -> None:
        self.sizes, self.budget = sizes, budget
        self.started: list[int] = []
        self.gathered: set[int] = set()
        self.log: list[tuple[str, int]] = []
        self.runner = Runner(len(sizes), budget, self.start, self.drop)

    def start(self, move: Move) -> bool:
        unit = move.what
        assert move == self.move(unit)
        if unit in self.gathered or unit in self.started:
            return False
        self.started.append(unit)
        self.log.append(("early", unit))
        assert sum(self.sizes[u] for u in self.started) <= self.budget
        return True

    def drop(self, move: Move) -> None:
        self.started.remove(move.what)
        self.log.append(("drop", move.what))

    def move(self, unit: int) -> Move:
        return Move(unit, "shards", "full", self.sizes[unit])

    def use(self, unit: int) -> None:
        self.runner.use(self.move(unit))
        if unit in self.started:
            self.started.remove(unit)
        self.gathered.add(unit)
        self.runner.pump()
        self.gathered.discard(unit)
        self.runner.pump()

    def forward(self, units: list[int], is_training: bool = True) -> None:
        self.runner.begin_forward(is_new=True)
        for unit in units:
            self.use(unit)
        if not is_training:
            self.runner.stop()

    def backward(self, units: list[int]) -> None:
        self.runner.begin_backward()
        for unit in units:
            self.use(unit)
        self.runner.end_backward()
        assert not self.started, "nothing may be held after a backward"


def test_the_second_step_starts_everything_early_but_the_first() -> None:
    machine = Machine(dict.fromkeys(range(6), 10), budget=10)
    for _ in range(2):
        machine.log.clear()
        machine.forward([0, 1, 2, 3, 4, 5])
        machine.backward([5, 4, 3, 2, 1, 0])
    assert [unit for what, unit in machine.log if what == "early"] == [1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    assert not any(what == "drop" for what, _ in machine.log)


@pytest.mark.parametrize(
    "steps",
    [
        [([0, 1, 2, 3], None)],  # evaluation
        [([0, 1, 2, 3], []), ([0, 1, 2, 3], [3, 2, 1, 0])],  # a second forward, one backward at a time
        [([0, 3], [3, 0]), ([0, 1, 2, 3], [3, 2, 1, 0])],  # skipped blocks, then all again
        [([0], [0])],  # early exit
        [([3, 2, 1, 0], [0, 1, 2, 3])],  # another order
        [([0, 1, 1, 2, 3], [3, 2, 2, 1, 0])],  # a module called twice, recomputation
        [([], [])],
    ],
)
def test_a_pass_that_goes_another_way_is_served_and_learnt(steps: list[Any]) -> None:
    machine = Machine({0: 10, 1: 10, 2: 30, 3: 10}, budget=20)
    for _ in range(2):
        machine.forward([0, 1, 2, 3])
        machine.backward([3, 2, 1, 0])
    for forward, backward in steps:
        machine.forward(forward, is_training=backward is not None)
        if backward:
            machine.backward(backward)
    for _ in range(2):
        machine.log.clear()
        machine.forward([0, 1, 2, 3])
        machine.backward([3, 2, 1, 0])
    assert [unit for what, unit in machine.log if what == "early"] == [1, 3, 3, 1, 0], "Unit 2 exceeds the budget"


def test_random_programs_never_break_the_rules() -> None:
    rng = random.Random(1)
    for _ in range(300):
        sizes = {unit: rng.randrange(1, 50) for unit in range(8)}
        machine = Machine(sizes, rng.randrange(0, 120))
        machine.runner.depth.now = rng.randrange(1, 5)
        for _ in range(12):
            units = [rng.randrange(8) for _ in range(rng.randrange(0, 12))]
            is_training = rng.random() < 0.7
            machine.forward(units, is_training)
            if is_training and rng.random() < 0.8:
                machine.backward(units[::-1] if rng.random() < 0.7 else [rng.randrange(8) for _ in range(5)])
            machine.runner.observe(rng.randrange(0, 30))
            if rng.random() < 0.3:
                machine.runner.stop()
                assert not machine.started


def test_the_depth_grows_while_that_helps() -> None:
    depth = Depth(most=8)
    stall = {1: 30, 2: 15, 3: 14, 4: 14}
    for _ in range(40):
        depth.observe(stall[depth.now])
    assert depth.now == 2, "the third Unit ahead did not help"
    calm = Depth(most=8)
    for _ in range(40):
        assert not calm.observe(1)
    assert calm.now == 1


def prefetched(prefetch_bytes: int | None) -> tuple[bool, int, int, list[tuple[str, str]], str]:
    run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=3, transport="pairwise", prefetch_bytes=prefetch_bytes)
    report = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=4)
    with torch.no_grad():
        CASES["gpt"].loss(model, 50)
    CASES["gpt"].loss(model, 51)  # a forward whose backward never comes
    again = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=2)
    run.events.clear()
    CASES["gpt"].loss(model, 60).backward()
    runner = run._runtime.gathering.runner
    found = (
        report.is_bitwise and again.is_bitwise,
        0 if runner is None else runner.num_early,
        0 if runner is None else runner.num_on_demand,
        run.events.listing("gather", "gathered", "free"),
        run.report(),
    )
    run.close()
    return found


def test_prefetch_starts_gathers_before_their_use_and_changes_nothing(pool: RankPool) -> None:
    for is_bitwise, num_early, _, events, text in pool.run(prefetched, None):
        assert is_bitwise
        assert num_early > 20
        assert "prefetch:" in text and "started early" in text
        starts = [number for number, (kind, _) in enumerate(events) if kind == "gather"]
        early = [n for n in starts if events[n + 1] != ("gathered", events[n][1])]
        assert early, f"no gather was started before the Unit before it was freed: {events}"
    for is_bitwise, num_early, num_on_demand, _, text in pool.run(prefetched, 0):
        assert is_bitwise
        assert (num_early, num_on_demand) == (0, 0)
        assert "prefetch:" not in text
