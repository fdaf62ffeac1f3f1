"""Everything a training loop may do between forward and step, against plain training, and in the expected order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from cases import CASES, build, generator, parity, rank
from shardwise.errors import StaleGraphError
from shardwise.testing import ParityReport, RankPool, compare_with_plain
from shardwise.testing.models import GPT, GPTConfig

STAGES = [0, 1, 2, 3]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 9)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


class TiedAcrossCheckpoints(Checkpointed):
    """A nested backward contributes to a parameter that the outer one contributes to as well."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(use_reentrant)
        self.blocks[2][0].weight = self.blocks[0][0].weight


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[0]):
            x = torch.tanh(block(x))
        return x.square().mean()


class Elsewhere(nn.Module):
    """Parameters used outside their owner's forward, in containers the model returns, and stashed on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.full((8,), 0.7))
        self.side: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        x = F.embedding(tokens, self.table.weight)
        x = F.linear(x, self.blocks[0].weight) * self.scale
        self.side = self.blocks[1](x).square().mean()
        return {"nested": [(x @ self.table.weight.t()).logsumexp(-1).mean()]}

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens) * self.scale

    def calls_forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens)["nested"][0] * self.scale.sum() + self(tokens)["nested"][0]


class HugeTied(nn.Module):
    """A tied table in its own Unit, also touched directly."""

    def __init__(self, touches: bool) -> None:
        super().__init__()
        self.touches = touches
        self.table = nn.Embedding(6000, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.head = nn.Linear(48, 6000, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = self.head(x).logsumexp(-1).mean()
        return loss + (self.table.weight * self.table.weight).mean() if self.touches else loss


def _x(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(number))


def _tokens(number: int, high: int = 30) -> torch.Tensor:
    return torch.randint(0, high, (2, 5), generator=generator(number))


def _elsewhere_loss(model: nn.Module, number: int) -> torch.Tensor:
    out = model(_tokens(number))["nested"][0]
    return out + model.side if number % 2 else out


def _second_order(model: nn.Module, number: int) -> torch.Tensor:
    x = _x(number, 3, 8).requires_grad_()
    loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def _two_forwards(model: nn.Module, number: int) -> torch.Tensor:
    return model(_x(number, 3, 8)) + 2 * model(_x(number + 100, 3, 8))


def _after_evaluation(model: nn.Module, number: int) -> torch.Tensor:
    with torch.no_grad():
        model(_x(number + 50, 2, 8))
    model.eval()
    with torch.inference_mode():
        model(_x(number + 51, 2, 8))
    model.train()
    return model(_x(number, 3, 8))


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "checkpoint, non-reentrant": (lambda: Checkpointed(False), lambda m, k: m(_x(k, 4, 7))),
    "checkpoint, reentrant": (lambda: Checkpointed(True), lambda m, k: m(_x(k, 4, 7).requires_grad_())),
    "modules called twice": (CalledTwice, lambda m, k: m(_x(k, 3, 8))),
    "several forwards before a backward": (CalledTwice, _two_forwards),
    "evaluation in between": (CalledTwice, _after_evaluation),
    "second order": (CalledTwice, _second_order),
    "parameters used elsewhere": (Elsewhere, _elsewhere_loss),
    "a tied table of its own": (lambda: HugeTied(False), lambda m, k: m(_tokens(k, 6000))),
    "a tied table touched directly": (lambda: HugeTied(True), lambda m, k: m(_tokens(k, 6000))),
    "the whole model checkpointed": (
        CalledTwice,
        lambda m, k: checkpoint(m, _x(k, 3, 8).requires_grad_(), use_reentrant=bool(k % 2)),
    ),
}


def loop(name: str, stage: int, **kwargs: Any) -> ParityReport:
    make, loss = LOOPS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sw.shard(model, optimizers[0], stage=stage)
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=4, **kwargs)
    run.close()
    return report


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_loops_that_users_write(pool: RankPool, name: str, stage: int) -> None:
    for accumulate in (1, 2):
        for report in pool.run(loop, name, stage, accumulate=accumulate):
            assert report.is_bitwise, f"{name} stage {stage} accumulate {accumulate}: {report}"


def tied_across_checkpoints(stage: int) -> ParityReport:
    torch.manual_seed(0)
    model = TiedAcrossCheckpoints(True)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sw.shard(model, optimizers[0], stage=stage)
    loss = lambda m, k: m(_x(k, 4, 7).requires_grad_())  # noqa: E731
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=3)
    run.close()
    return report


@pytest.mark.parametrize("stage", STAGES)
def test_nested_backwards_that_share_a_parameter(pool: RankPool, stage: int) -> None:
    """Reentrant checkpoints run a backward of their own each; a Unit reduced early is reduced again (docs/numerics.md)."""
    for report in pool.run(tied_across_checkpoints, stage):
        assert report.largest < 1e-6, str(report)
        assert report.compared_elements > 0


def _side_alone(model: nn.Module, number: int) -> torch.Tensor:
    """A loss made of a tensor that a forward left on the side, past every output."""
    model(_tokens(number))
    assert model.side is not None
    return model.side


def _frozen_side() -> nn.Module:
    """The same through Units that are frozen."""
    model = Elsewhere()
    model.blocks.requires_grad_(False)
    return model


SIDES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "a loss that bypasses every output": (Elsewhere, _side_alone),
    "a loss that bypasses every output, through frozen Units": (_frozen_side, _side_alone),
}
LOOPS.update(SIDES)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", sorted(SIDES))
def test_a_loss_that_bypasses_every_output(pool: RankPool, name: str, stage: int) -> None:
    for report in pool.run(loop, name, stage):
        assert report.is_bitwise, f"{name} stage {stage}: {report}"


def methods() -> bool:
    torch.manual_seed(0)
    model = Elsewhere()
    plain = copy.deepcopy(model)
    run = sw.shard(model, stage=3, methods=("encode", "calls_forward"))
    with torch.no_grad():  # a method that calls the model itself, as generate() does
        if not torch.equal(model.calls_forward(_tokens(0)), plain.calls_forward(_tokens(0))):
            return False
    same = torch.equal(model.encode(_tokens(0)), plain.encode(_tokens(0)))
    same &= torch.equal(model.blocks[1](_x(1, 2, 8)), plain.blocks[1](_x(1, 2, 8)))  # a block called on its own
    run.close()
    return same


def test_methods_other_than_forward(pool: RankPool) -> None:
    assert pool.run(methods) == [True, True]


def exception_in_the_middle(stage: int, where: str) -> ParityReport:
    torch.manual_seed(0)
    model = CASES["gpt"].build()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sw.shard(model, optimizers[0], stage=stage)

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    if where == "forward":
        handle = model.blocks[1].down.register_forward_hook(stop)
    loss = None
    with pytest.raises(Stop):
        loss = CASES["gpt"].loss(model, 0)
        if where == "backward":
            handle = model.blocks[1].up.register_full_backward_hook(stop)
            loss = CASES["gpt"].loss(model, 0)
        loss.backward()
    handle.remove()
    del loss
    optimizers[0].zero_grad()
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], CASES["gpt"].loss, steps=3, accumulate=2)
    run.close()
    return report


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_the_middle_then_a_fresh_step(pool: RankPool, stage: int, where: str) -> None:
    for report in pool.run(exception_in_the_middle, stage, where):
        assert report.is_bitwise, f"{where} stage {stage}: {report}"


def unused_keeps_moments(stage: int) -> tuple[bool, int]:
    """Whether an unused branch was left alone, and how many of its pieces this rank could check."""
    run, model, opt, _, _ = build("branchy", "adamw", stage=stage)
    x = torch.randn(4, 11, generator=generator(0))
    model(x, 0).backward()
    opt.step()
    opt.zero_grad()
    mine = [
        update.master
        for unit in run._runtime.units
        for update in unit.pieces
        if unit.layout.slots[update.piece.slot_index].name.startswith("branches.0.")
    ]
    value = run.master("branches.0.weight")
    before = [(opt.state[p]["exp_avg"].clone(), float(opt.state[p]["step"])) for p in mine]
    model(x, None).backward()
    same = run.grad("branches.0.weight") is None and run.grad("branches.2.bias") is None
    opt.step()
    opt.zero_grad()
    same &= torch.equal(run.master("branches.0.weight"), value)
    for p, (moment, step) in zip(mine, before, strict=True):
        same &= torch.equal(opt.state[p]["exp_avg"], moment)
        same &= float(opt.state[p]["step"]) == step == 1.0
    run.close()
    return same, len(mine)


@pytest.mark.parametrize("stage", STAGES)
def test_what_no_rank_used_is_left_alone(pool: RankPool, stage: int) -> None:
    answers = pool.run(unused_keeps_moments, stage)
    assert all(left_alone for left_alone, _ in answers)
    assert sum(checked for _, checked in answers) >= 2, "no rank had a piece to check"


def schedulers() -> list[float]:
    run, model, opt, plain, plain_opt = build("mlp", "sgd", stage=3)
    rates = []
    pairs = [(m, o, torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1.0 / (1 + k))) for m, o in ((model, opt), (plain, plain_opt))]
    for number in range(3):
        for m, o, scheduler in pairs:
            CASES["mlp"].loss(m, number).backward()
            o.step()
            scheduler.step()
            o.zero_grad()
        rates.append(opt.param_groups[0]["lr"])
        assert rates[-1] == plain_opt.param_groups[0]["lr"]
    run.close()
    return rates


def test_learning_rate_schedulers_rule(pool: RankPool) -> None:
    for rates in pool.run(schedulers):
        assert rates == sorted(rates, reverse=True) and len(set(rates)) == 3


def gathered_and_state(stage: int, precision: str) -> dict[str, bool]:
    run, model, opt, plain, _ = build("gpt", "adamw", stage=stage, precision=precision)
    checks = {}
    state = run.full_state_dict(rank0_only=False)
    expected = plain.state_dict()
    checks["keys and order"] = list(state) == list(expected)
    checks["values"] = all(torch.equal(state[k], expected[k]) for k in expected)
    checks["tied"] = state["wte.weight"].data_ptr() == state["head.weight"].data_ptr()
    checks["rank 0 only"] = bool(run.full_state_dict()) == (rank() == 0)
    with run.gathered(model.blocks[0]):  # reading must not round the masters
        model.blocks[0].up.weight.sum()
    checks["reading keeps masters"] = torch.equal(run.master("blocks.0.up.weight"), expected["blocks.0.up.weight"])
    with run.gathered(model.blocks[0]), torch.no_grad():
        model.blocks[0].up.bias.fill_(0.25)
    checks["writes are kept"] = bool((run.master("blocks.0.up.bias") == 0.25).all())
    checks["others untouched"] = torch.equal(run.master("blocks.0.up.weight"), expected["blocks.0.up.weight"])
    torch.manual_seed(5)
    other = CASES["gpt"].build().state_dict()
    model.load_state_dict(other)
    checks["load_state_dict"] = all(
        torch.equal(v if precision == "fp32" else v.bfloat16(), o if precision == "fp32" else o.bfloat16())
        for v, o in zip(run.full_state_dict(rank0_only=False).values(), other.values(), strict=True)
    )
    CASES["gpt"].loss(model, 0).backward()
    opt.step()
    with run.gathered():
        copied = copy.deepcopy(model)
    checks["a copy is plain"] = all(type(p) is nn.Parameter for p in copied.parameters())
    with torch.no_grad():
        checks["a copy computes"] = torch.equal(CASES["gpt"].loss(copied, 3), CASES["gpt"].loss(model, 3))
    run.close()
    return checks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gathered_state_dict_loading_and_copying(pool: RankPool, stage: int, precision: str) -> None:
    for checks in pool.run(gathered_and_state, stage, precision):
        assert all(checks.values()), checks


def events(stage: int, transport: str = "auto") -> list[tuple[str, str]]:
    run, model, opt, _, _ = build("gpt", "adamw", stage=stage, transport=transport)
    for number in range(2):
        run.events.clear()
        CASES["gpt"].loss(model, number).backward()
        opt.step()
        opt.zero_grad()
    found = run.events.listing("gather", "gathered", "free", "backward", "reduce", "backward end", "step")
    run.close()
    return found


@pytest.mark.parametrize("transport", ["copied", "shared"])
def test_the_order_of_a_stage_3_step(pool: RankPool, transport: str) -> None:
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    gathers_twice = transport == "copied"  # overlays can be read in backward without being gathered again
    expected = [("gather", "root"), ("gathered", "root")]
    for block in blocks:
        expected += [("gather", block), ("gathered", block), ("free", block)]
    expected += [("free", "root"), ("backward", "")]
    if gathers_twice:
        expected += [("gather", "root"), ("gathered", "root")]
        for block in reversed(blocks):
            expected += [("gather", block), ("gathered", block), ("free", block)]
    expected += [("reduce", name) for name in [*reversed(blocks), "root"]]  # small Units share one exchange
    expected += [("free", "root")] * gathers_twice + [("backward end", ""), ("step", "")]
    for found in pool.run(events, 3, transport):
        assert found == expected


def test_stages_1_and_2_do_not_gather_in_the_step(pool: RankPool) -> None:
    for stage in (1, 2):
        for found in pool.run(events, stage):
            assert [kind for kind, _ in found if kind in ("gather", "free")] == []
            assert [name for kind, name in found if kind == "reduce"] == ["blocks.2", "blocks.1", "blocks.0", "root"]


def several_models() -> bool:
    runs = [build(name, "adamw", stage=stage) for name, stage in (("gpt", 3), ("mlp", 2), ("conv", 3))]
    names = ["gpt", "mlp", "conv"]
    for number in range(2):
        losses = [CASES[name].loss(r[1], number) for name, r in zip(names, runs, strict=True)]
        sum(losses).backward()
        for r in runs:
            r[2].step()
            r[2].zero_grad()
    for r in runs:
        r[0].close()
    return True


def test_several_models_in_one_process(pool: RankPool) -> None:
    assert pool.run(several_models) == [True, True]


def test_inference_without_an_optimizer() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=40, context=8, layers=2, heads=2, hidden=16))
    plain = copy.deepcopy(model)
    sw.shard(model, stage=3)
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))


def test_parity_report_of_nothing_is_not_parity() -> None:
    assert not ParityReport(0, [], 0).is_bitwise


def hook_order() -> bool:
    """A user's own forward hooks see usable parameters."""
    run, model, _, _, _ = build("gpt", "adamw", stage=3)
    seen = []
    handle = model.blocks[0].register_forward_pre_hook(lambda m, a: seen.append(float(m.up.weight.detach().sum())))
    CASES["gpt"].loss(model, 0)
    handle.remove()
    run.close()
    return len(seen) == 1


def test_user_hooks_see_gathered_parameters(pool: RankPool) -> None:
    assert pool.run(hook_order) == [True, True]


def test_parity_of_a_clipped_world_of_one_uses_infinity_norm_too() -> None:
    run, model, opt, plain, _ = build("mlp", "sgd", stage=3)
    CASES["mlp"].loss(model, 0).backward()
    CASES["mlp"].loss(plain, 0).backward()
    used = [param for param in plain.parameters() if param.numel()]
    expected = torch.nn.utils.clip_grad_norm_(used, 0.01, norm_type=float("inf"))
    assert torch.allclose(run.clip_grad_norm_(0.01, float("inf")), expected)
    for name, param in plain.named_parameters():
        if param.numel():
            assert torch.allclose(run.grad(name), param.grad, rtol=1e-6, atol=0)
    opt.step()


def test_parity_function_itself_runs() -> None:
    assert parity("mlp", stage=3, steps=1).is_bitwise


class ParameterBranch(nn.Module):
    """Besides its input, a block multiplies its own parameters: that branch must see them too in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_OwnBranch() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class _OwnBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.p, self.q = (nn.Parameter(torch.randn(6, 6) * 0.4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        detached = F.linear(x, self.w.detach()) + (self.w * self.w).sum()
        return x @ self.w.t() + self.q @ self.p.t() + detached


class CheckpointedBranch(ParameterBranch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=True))
        return x.square().mean()


class SixAndABranch(nn.Module):
    """One rank alone takes a branch in front of many others: nobody may wait for it in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.branch = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, takes_branch: bool) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if takes_branch:
            x = x + self.branch[0](x)
        return x.square().mean()


class TiedLookups(nn.Module):
    """A shared table that is only looked up, and a head that the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(6000, 48), nn.Sequential(nn.Embedding(6000, 48))
        self.right[0].weight = self.left.weight
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.left(tokens) + self.right(tokens))).square().mean()


def _persistent_leaf(model: nn.Module, number: int) -> torch.Tensor:
    if not hasattr(model, "_leaf"):
        object.__setattr__(model, "_leaf", _x(0, 6, 6).requires_grad_())
    return model(model._leaf)


MORE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "parameter-only branches": (ParameterBranch, lambda m, k: m(_x(k, 6, 6))),
    "parameter-only branches, leaf input": (ParameterBranch, _persistent_leaf),
    "parameter-only branches, reentrant": (CheckpointedBranch, lambda m, k: m(_x(k, 6, 6).requires_grad_())),
    "a branch that one rank takes": (SixAndABranch, lambda m, k: m(_x(k, 3, 8), rank() == k % 2)),
    "a shared table only looked up": (TiedLookups, lambda m, k: m(_tokens(k, 6000))),
    "first used in inference mode": (
        CalledTwice,
        lambda m, k: (_inference(m, _x(k, 2, 8)) if k == 0 else 0) + m(_x(k, 3, 8)),
    ),
}
LOOPS.update(MORE)


def _inference(model: nn.Module, x: torch.Tensor) -> float:
    with torch.inference_mode():
        model(x)
    return 0.0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", sorted(MORE))
def test_awkward_graphs(pool: RankPool, name: str, stage: int) -> None:
    for report in pool.run(loop, name, stage, accumulate=2):
        assert report.is_bitwise, f"{name} stage {stage}: {report}"


def test_hooks_do_not_pile_up_on_an_input() -> None:
    model = ParameterBranch()
    sw.shard(model, stage=3)
    x = torch.randn(6, 6, requires_grad=True)
    for _ in range(5):
        model(x)
    assert not x._backward_hooks


def interrupted() -> ParityReport:
    torch.manual_seed(0)
    model = CalledTwice()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sw.shard(model, optimizers[0], stage=3)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(_x(0, 3, 8))
    handle.remove()
    loss = lambda m, k: m(_x(k, 3, 8))  # noqa: E731
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=2)
    run.close()
    return report


def test_an_interrupt_in_the_middle_of_a_forward(pool: RankPool) -> None:
    for report in pool.run(interrupted):
        assert report.is_bitwise, str(report)


def loading(stage: int, precision: Any) -> dict[str, bool]:
    run, model, opt, _, _ = build("gpt", "adamw", stage=stage, precision=precision)
    for number in range(2):
        CASES["gpt"].loss(model, number).backward()
        opt.step()
        opt.zero_grad()
    saved = run.full_state_dict(rank0_only=False)
    CASES["gpt"].loss(model, 5).backward()
    opt.step()
    opt.zero_grad()
    model.load_state_dict(saved)
    checks = {"masters restored exactly": all(torch.equal(run.master(n), saved[n]) for n, _ in model.named_parameters())}
    other = {k: torch.full(v.shape, 0.125) for k, v in model.blocks[1].up.named_parameters()}
    model.blocks[1].up.load_state_dict(other)  # a submodule on its own
    checks["submodule"] = bool((run.master("blocks.1.up.weight") == 0.125).all())
    CASES["gpt"].loss(model, 6).backward()
    opt.step()
    checks["kept by the next step"] = float((run.master("blocks.1.up.weight") - 0.125).abs().max()) < 0.1
    run.close()
    return checks


@pytest.mark.parametrize("stage", STAGES)
def test_loading_restores_masters_exactly(pool: RankPool, stage: int) -> None:
    for precision in ("fp32", "bf16", sw.Precision(param=torch.bfloat16, compute=torch.bfloat16)):
        for checks in pool.run(loading, stage, precision):
            assert all(checks.values()), f"{precision}: {checks}"


@pytest.mark.parametrize("way", ["in place", "data", "assigned"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_change_past_the_masters_reaches_them(stage: int, way: str) -> None:
    run, model, opt, _, _ = build("mlp", "sgd", stage=stage, precision="bf16")
    CASES["mlp"].loss(model, 0).backward()
    before = run.master("layers.1.weight")
    weight = model.layers[0].weight
    if way == "in place":
        with torch.no_grad():
            weight.fill_(0.75)
    elif way == "data":
        weight.data.fill_(0.75)
    else:
        weight.data = torch.full_like(weight, 0.75)
    assert bool((run.master("layers.0.weight") == 0.75).all())
    assert torch.equal(run.master("layers.1.weight"), before), "digits that the stored form has lost were lost too"
    opt.step()
    assert 0 < float((run.master("layers.0.weight") - 0.75).abs().max()) < 0.1
    run.close()


class SkipsAll(nn.Module):
    """A frozen trunk and trainable layers that a rank may skip altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        x = self.trunk(x)
        for block in () if skips else self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class SharedInput(nn.Module):
    """Every block also reads one tensor that all of them share, and hands its own input on."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.memory = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_ReadsMemory() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.memory(x)
        for block in self.blocks:
            x, _ = block(x, memory)
        return x.square().mean()


class _ReadsMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.own(x) + self.cross(memory)), x


LAST: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "a rank without any gradient": (SkipsAll, lambda m, k: m(_x(k, 3, 8).requires_grad_(), rank() == k % 3)),
    "an input that all blocks share": (SharedInput, lambda m, k: m(_x(k, 3, 8))),
}
LOOPS.update(LAST)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", sorted(LAST))
def test_more_awkward_graphs(pool: RankPool, name: str, stage: int) -> None:
    for report in pool.run(loop, name, stage, accumulate=2):
        assert report.is_bitwise, f"{name} stage {stage}: {report}"


def gathered_at_once(model: nn.Module, backward: Callable[[], None], run: Any) -> int:
    """The most Units that were gathered at the same time during a backward."""
    run.events.clear()
    backward()
    now = most = 0
    for kind, _ in run.events.listing("gathered", "free"):
        now += 1 if kind == "gathered" else -1
        most = max(most, now)
    return most


def test_backward_holds_one_block_at_a_time() -> None:
    model = SharedInput()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sw.shard(model, optimizer, stage=3)
    loss = model(torch.randn(3, 8))
    first = gathered_at_once(model, lambda: loss.backward(retain_graph=True), run)
    second = gathered_at_once(model, loss.backward, run)  # the same graph again
    assert (first, second) == (2, 2), "the root and one block"


def test_a_backward_after_one_that_raised_is_not_lost() -> None:
    torch.manual_seed(0)
    model = CalledTwice()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sw.shard(model, optimizer, stage=3)
    x = torch.randn(3, 8)

    class Stop(Exception):
        pass

    def stop(grad: torch.Tensor) -> None:
        raise Stop

    inner = torch.randn(3, 8, requires_grad=True)
    broken = inner * 2
    broken.register_hook(stop)
    first, second = model(broken), model(x)  # both graphs are there before either is run
    with pytest.raises(Stop):
        first.backward()
    second.backward()
    plain(x).backward()
    assert torch.equal(run.grad("blocks.0.weight"), plain.blocks[0].weight.grad)


def test_a_load_that_raises_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = CASES["gpt"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = sw.shard(model, optimizer, stage=3)
    state = run.full_state_dict()

    def stop(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.blocks[2].up.register_load_state_dict_pre_hook(stop)
    with pytest.raises(ZeroDivisionError):
        model.load_state_dict(state)
    handle.remove()
    CASES["gpt"].loss(model, 0).backward()
    optimizer.step()
    with torch.no_grad():
        plain = CASES["gpt"].build()
        plain.load_state_dict(run.full_state_dict())
        assert torch.equal(CASES["gpt"].loss(model, 1), CASES["gpt"].loss(plain, 1))
    model.load_state_dict(state)
    assert torch.equal(run.master("blocks.0.up.weight"), state["blocks.0.up.weight"])


def penalties_from_gathered(stage: int) -> dict[str, Any]:
    """A term of the loss made of parameters counts, whether backward runs inside the context or after it."""
    run, model, opt, plain, _ = build("gpt", "sgd", stage=stage)
    found: dict[str, Any] = {}
    for module in (model, plain):
        loss = CASES["gpt"].loss(module, 0)
        with run.gathered(model.blocks[1]):
            penalty = (
                module.blocks[1].up.weight.pow(2).sum() + (module.blocks[1].up.weight.t() @ module.blocks[1].up.weight).sum()
            )
            (loss + penalty).backward()
    (expected,) = [p.grad for name, p in plain.named_parameters() if name == "blocks.1.up.weight"]
    mine = run.grad("blocks.1.up.weight")
    found["inside"] = bool(torch.isfinite(mine).all()) and torch.allclose(mine, _averaged(expected), atol=1e-4)
    opt.zero_grad()
    loss = CASES["gpt"].loss(model, 0)
    with run.gathered(model.blocks[1]):
        penalty = model.blocks[1].up.weight.pow(2).sum()
    (loss + penalty).backward()
    plain.zero_grad()
    (CASES["gpt"].loss(plain, 0) + plain.blocks[1].up.weight.pow(2).sum()).backward()
    found["after"] = torch.allclose(run.grad("blocks.1.up.weight"), _averaged(plain.blocks[1].up.weight.grad), atol=1e-4)
    opt.zero_grad()
    with run.gathered():
        loss = CASES["gpt"].loss(model, 1)  # a forward is watched as ever
    loss.backward()
    opt.step()
    opt.zero_grad()
    with run.gathered(model.blocks[1]):
        weight = model.blocks[1].up.weight
        squares = weight.pow(2).sum()
        with torch.no_grad():
            weight.mul_(1.0)
        try:
            squares.backward()
            found["changed"] = "no error"
        except RuntimeError as error:
            found["changed"] = isinstance(error, StaleGraphError) or "inplace" in str(error)
    run.close()
    return found


def _averaged(grad: torch.Tensor) -> torch.Tensor:
    total = grad.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_graph_built_in_a_gathered_context_is_right(pool: RankPool, stage: int) -> None:
    for found in pool.run(penalties_from_gathered, stage):
        assert found == {"inside": True, "after": True, "changed": True}


def test_gathered_that_fails_on_entry_and_a_forward_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = HugeTied(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sw.shard(model, optimizer, stage=3)
    gather = run.transport.gather
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise sw.errors.TransportError("injected")
        return gather(*args)

    monkeypatch.setattr(run.transport, "gather", failing)
    with pytest.raises(sw.errors.TransportError, match="injected"), run.gathered():
        pass
    monkeypatch.undo()
    tokens = torch.randint(0, 6000, (2, 5))
    model(tokens).backward()
    optimizer.step()
    with run.gathered(), torch.no_grad():
        model(tokens)
        assert torch.isfinite(model.table.weight.sum())
        copied = copy.deepcopy(model)
    assert type(copied.table.weight) is nn.Parameter
