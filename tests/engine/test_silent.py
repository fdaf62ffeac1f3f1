"""Results that were silently wrong once, each with the code that showed it. Most others are cells of the table of habits."""

from __future__ import annotations

import contextlib
import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from cases import CASES, ByHost, as_hosts, build, rank, sharded
from shardwise.observe import delays
from shardwise.testing import RankPool, compare_with_plain
from shardwise.testing.models import ConvNet

STAGES = [0, 1, 2, 3]


# -- writes by hand while others read -----------------------------------------------------------------------------


def written_after_steps(stage: int, transport: str, steps: int, longest_s: float, seed: int) -> bool:
    """Every rank changes all parameters right after each step, at a pace of its own."""
    rng = random.Random(seed + rank())
    with as_hosts(2) if transport == "combined" else contextlib.nullcontext():
        run, model, opt, plain, plain_opt = build("paged", "sgd", stage=stage, transport=transport)
    add_up = ByHost(2) if transport == "combined" else None
    reference = sw.testing.PlainTrainer(plain, plain_opt, run.config.precision, add_up)

    def delay(edge: str) -> None:
        if rng.random() < 0.2:
            time.sleep(rng.random() * longest_s)

    same = True
    with delays(delay):
        for number in range(steps):
            loss, expected = CASES["paged"].loss(model, number), CASES["paged"].loss(plain, number)
            same &= torch.equal(loss, expected)
            loss.backward()
            reference.backward(expected)
            opt.step()
            opt.zero_grad()
            reference.step(None)
            with torch.no_grad():
                for module in (model, plain):
                    for p in module.parameters():
                        p.mul_(0.75)
    for name, value in run.iter_masters():
        same &= torch.equal(value, reference.masters[name])
    run.close()
    return same


@pytest.mark.parametrize("stage", STAGES)
def test_writes_right_after_a_step_do_not_reach_slower_ranks_early(pool: RankPool, stage: int) -> None:
    assert pool.run(written_after_steps, stage, "auto", 6, 0.01, 3) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "pairwise", "combined"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_long_race_hunt(pool: RankPool, pool4: RankPool, stage: int, transport: str) -> None:
    ranks = pool4 if transport == "combined" else pool
    found = ranks.run(written_after_steps, stage, transport, 2000, 0.001, 17, timeout_s=3000)
    assert found == [True] * ranks.world_size


# -- writes inside forward ----------------------------------------------------------------------------------------


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6, max_norm=0.5)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def renormed(stage: int, differs: bool) -> str:
    torch.manual_seed(0)
    model = Renormed()
    plain = copy.deepcopy(model)
    opts = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    run = sharded(model, opts[0], stage=stage)
    loss = lambda m, k: m(torch.tensor([1, 4, k + (rank() * 3 if differs else 0)]))  # noqa: E731
    try:
        report = compare_with_plain(run, model, opts[0], plain, opts[1], loss, steps=3)
        answer = str(report)
        if differs:
            run.full_state_dict()
    except sw.errors.RanksDifferError as error:
        answer = str(error)
    run.close()
    return answer


@pytest.mark.parametrize("stage", STAGES)
def test_an_embedding_that_renorms_itself(pool: RankPool, stage: int) -> None:
    for answer in pool.run(renormed, stage, False):
        assert "equal to the last bit" in answer, answer


def test_ranks_that_renorm_other_rows_are_told(pool: RankPool) -> None:
    for answer in pool.run(renormed, 3, True):
        assert "not alike on every rank" in answer, answer


# -- the way to backward ------------------------------------------------------------------------------------------


class OwnView(nn.Module):
    """Uses its own parameter directly and returns a view, which the caller changes in place."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight)[:, :]


class Answer:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class InAnObject(OwnView):
    def forward(self, x: torch.Tensor) -> Any:
        return Answer(torch.tanh(x @ self.weight))


class Chain(nn.Module):
    def __init__(self, kind: type[OwnView], freezes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(6) for _ in range(3))
        self.inp = nn.Linear(6, 6)
        self.blocks.requires_grad_(not freezes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            out = block(x)
            x = out.value if isinstance(out, Answer) else out.add_(1.0)
        return x.square().mean()


def unannounced(kind: type[OwnView], freezes: bool, stage: int) -> Any:
    torch.manual_seed(0)
    model = Chain(kind, freezes)
    plain = copy.deepcopy(model)
    opts = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    run = sharded(model, opts[0], stage=stage)
    loss = lambda m, k: m(torch.full((2, 6), 0.1 * k + rank()))  # noqa: E731
    report = compare_with_plain(run, model, opts[0], plain, opts[1], loss, steps=3)
    run.close()
    return report


@pytest.mark.parametrize("freezes", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", [OwnView, InAnObject])
def test_backward_reaches_units_that_no_output_announces(pool: RankPool, kind: type[OwnView], freezes: bool) -> None:
    for stage in (1, 3):
        for report in pool.run(unannounced, kind, freezes, stage):
            assert report.is_bitwise, f"stage {stage}: {report}"


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x, self.logit_scale


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_may_return_a_parameter(stage: int) -> None:
    torch.manual_seed(0)
    model = ReturnsParameter()
    plain = copy.deepcopy(model)
    opts = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    run = sharded(model, opts[0], stage=stage)

    def loss(m: nn.Module, number: int) -> torch.Tensor:
        out, scale = m(torch.full((2, 6), 0.1 * number))
        return (out * scale.exp()).square().mean() + scale * 0.5

    report = compare_with_plain(run, model, opts[0], plain, opts[1], loss, steps=4)
    assert report.is_bitwise, str(report)


def test_graphs_through_units_that_a_step_left_alone() -> None:
    for stage in STAGES:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
        plain = copy.deepcopy(model)
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        run = sharded(model, opts[0], stage=stage, units=nn.Linear)
        for m, opt in ((model, opts[0]), (plain, opts[1])):
            kept = m["other"](torch.ones(2, 4)).square().sum()
            m["used"](torch.ones(2, 4)).sum().backward()
            opt.step()
            opt.zero_grad()
            kept.backward()
        assert torch.equal(run.grad("other.weight"), plain["other"].weight.grad), f"stage {stage}"


# -- buffers ------------------------------------------------------------------------------------------------------


def statistics(stage: int, buffers: str, transport: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ConvNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, opt, stage=stage, buffers=buffers, transport=transport)
    for number in range(3):
        g = torch.Generator().manual_seed(10 * number + rank())
        loss = model(torch.randn(3, 3, 6, 6, generator=g), torch.randint(0, 5, (3,), generator=g))
        if number == 1:
            model(torch.randn(3, 3, 6, 6, generator=g), torch.zeros(3, dtype=torch.int64))  # a forward without backward
        loss.backward()
        opt.step()
        opt.zero_grad()
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    run.close()
    return found


def ddp_statistics() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(ConvNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        g = torch.Generator().manual_seed(10 * number + rank())
        loss = model(torch.randn(3, 3, 6, 6, generator=g), torch.randint(0, 5, (3,), generator=g))
        if number == 1:
            with model.no_sync():
                model(torch.randn(3, 3, 6, 6, generator=g), torch.zeros(3, dtype=torch.int64))
        loss.backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        model.require_forward_param_sync = True
        model._sync_buffers()
    return {name: buffer.clone() for name, buffer in model.module.named_buffers()}


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
@pytest.mark.parametrize("stage", [0, 3])
def test_statistics_are_those_of_rank_0_on_every_rank(pool: RankPool, stage: int, transport: str) -> None:
    first, second = pool.run(statistics, stage, "broadcast", transport)
    for name in first:
        assert torch.equal(first[name], second[name]), name
    expected = pool.run(ddp_statistics)[0]
    for name in first:
        assert torch.allclose(first[name].double(), expected[name].double(), rtol=1e-5), name


def test_local_buffers_stay_local(pool: RankPool) -> None:
    first, second = pool.run(statistics, 3, "local", "auto")
    assert not torch.equal(first["stages.0.1.running_mean"], second["stages.0.1.running_mean"])


def test_synchronised_normalisation_works_on_a_rank_alone() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, opt, stage=3)
    model.eval()
    model(torch.randn(2, 3, 6, 6), torch.tensor([0, 1])).backward()
    opt.step()
    assert len(run.full_state_dict()) == len(model.state_dict())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_expanded_buffer_is_kept(pool: RankPool, stage: int) -> None:
    assert pool.run(expanded, stage) == [True, True]


def expanded(stage: int) -> bool:
    model = nn.Linear(4, 4)
    model.register_buffer("shown", torch.full((1, 3), float(rank())).expand(5, 3))
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model(torch.ones(1, 4)).sum().backward()
    same = bool((model.shown == 0).all()) and tuple(model.shown.shape) == (5, 3)
    run.close()
    return same


class OddBuffers(nn.Module):
    """Buffers whose bytes do not line up when they travel together."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("narrow", torch.zeros(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.flags[rank()] = True
        self.count += 1 + rank()
        self.narrow += 1 + rank()
        return self.lin(x).sum()


def odd_buffers() -> tuple[list[bool], int, list[float]]:
    model = OddBuffers()
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    model(torch.ones(1, 4)).backward()
    run.close()
    return model.flags.tolist(), int(model.count), model.narrow.tolist()


def test_buffers_of_all_sizes_travel_together(pool: RankPool) -> None:
    assert pool.run(odd_buffers) == [([True, False, False], 1, [1.0] * 5)] * 2


# -- what is saved ------------------------------------------------------------------------------------------------


class Stated(nn.Module):
    """A buffer under two names, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("one", torch.ones(3))
        self.register_buffer("two", self.one)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.count = 5

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).sum()


@pytest.mark.parametrize("stage", STAGES)
def test_a_full_state_dict_loads_strictly(stage: int) -> None:
    model = Stated()
    run = sharded(model, stage=stage)
    model.count = 7
    state = run.full_state_dict()
    fresh = Stated()
    fresh.load_state_dict(state, strict=True)
    assert list(state) == list(fresh.state_dict()) and fresh.count == 7
    assert torch.equal(fresh.lin.weight, run.master("lin.weight"))


def patchwork(stage: int) -> str:
    torch.manual_seed(0)
    model = CASES["frozen"].build()
    run = sharded(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), stage=stage)
    model.layers[1].base.weight.data.fill_(float(rank()))
    try:
        run.full_state_dict()
        answer = "saved"
    except sw.errors.RanksDifferError as error:
        answer = str(error)
    run.close()
    return answer


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_parameters_that_differ_between_ranks_are_not_saved(pool: RankPool, stage: int) -> None:
    for answer in pool.run(patchwork, stage):
        assert "not alike on every rank" in answer or "different values on different ranks" in answer, answer


def test_a_wait_without_end_is_refused() -> None:
    for bad in (float("inf"), float("nan"), 0.0, 1e9):
        with pytest.raises(sw.errors.ConfigError, match="timeout_s"):
            sharded(nn.Linear(2, 2), stage=1, timeout_s=bad)
    with pytest.raises(sw.errors.ConfigError, match="did you mean 'local'"):
        sharded(nn.Linear(2, 2), stage=1, buffers="lokal")


def test_a_functional_use_of_a_leaf_module_outside_forward() -> None:
    """A leaf below a Unit has no hook of its own: the touch of its parameters is noticed."""
    torch.manual_seed(0)
    model = CASES["gpt"].build()
    plain = copy.deepcopy(model)
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    for m in (model, plain):
        out = F.gelu(m.blocks[1].up(torch.ones(2, 24)))
        m.blocks[1].down(out).square().sum().backward()
    assert torch.equal(run.grad("blocks.1.up.weight"), plain.blocks[1].up.weight.grad)
