"""`run.accumulating()`: gradients summed locally, reduced once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from cases import CASES, OPTIMIZERS, build, sharded
from shardwise.errors import OptimizerError, ShardwiseError
from shardwise.testing import RankPool, compare_with_plain
from shardwise.tiers import Kind, Tier


def parity(case: str, stage: int, **options: Any) -> str:
    run, model, opt, plain, plain_opt = build(case, "adamw", stage=stage, **options)
    report = compare_with_plain(
        run, model, opt, plain, plain_opt, CASES[case].loss, steps=3, accumulate=4, sums_locally=True, max_norm=0.1
    )
    return str(report)


@pytest.mark.parametrize(("stage", "transport"), list(itertools.product((0, 1, 2, 3), ("shared", "pairwise"))))
def test_equal_to_plain_training_that_sums_micro_batches_locally(pool: RankPool, stage: int, transport: str) -> None:
    for text in pool.run(parity, "gpt", stage, transport=transport):
        assert text.endswith("equal to the last bit"), text


@pytest.mark.parametrize("case", ["branchy-by-rank", "frozen", "conv", "lstm"])
def test_ranks_that_use_different_parameters(pool: RankPool, case: str) -> None:
    for text in pool.run(parity, case, 3):
        assert text.endswith("equal to the last bit"), text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_storage(pool: RankPool, precision: str) -> None:
    for text in pool.run(parity, "gpt", 2, precision=precision):
        assert text.endswith("equal to the last bit"), text


def test_gradients_on_disk(pool: RankPool) -> None:
    for text in pool.run(parity, "gpt", 3, offload="disk"):
        assert text.endswith("equal to the last bit"), text


def traffic(stage: int, micro: int, accumulates: bool) -> tuple[int, int]:
    run, model, opt, _, _ = build("gpt", "adamw", stage=stage, transport="pairwise")
    for number in range(micro):
        if accumulates and number < micro - 1:
            with run.accumulating():
                CASES["gpt"].loss(model, number).backward()
        else:
            CASES["gpt"].loss(model, number).backward()
    sent = run.transport.counters.elements["reduce"]
    opt.step()
    opt.zero_grad()
    numel = sum(unit.layout.numel for unit in run._runtime.units)
    run.close()
    return sent, numel


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_eighth_of_the_gradients_is_sent(pool: RankPool, stage: int) -> None:
    for often, once in zip(pool.run(traffic, stage, 8, False), pool.run(traffic, stage, 8, True), strict=True):
        assert often[0] == 8 * once[0]
        assert once[0] == once[1] // 2, "half of the padded model, to the other rank"


def misused() -> list[str]:
    run, model, opt, _, _ = build("gpt", "adamw", stage=2)
    found = []
    with run.accumulating():
        CASES["gpt"].loss(model, 0).backward()
        with pytest.raises(ShardwiseError, match="entered twice"), run.accumulating():
            pass
    name = next(iter(dict(model.named_parameters())))
    for action in (opt.step, lambda: run.clip_grad_norm_(1.0), lambda: run.grad(name)):
        with pytest.raises(OptimizerError, match="are not reduced over ranks yet") as caught:
            action()
        found.append(str(caught.value))
    before = run.master(name).clone()
    opt.zero_grad()
    assert run.ledger.now(Tier.HOST, Kind.GRAD) == 0, "zero_grad() gives local gradients back"
    opt.step()
    assert torch.equal(run.master(name), before), "nothing had a gradient"
    CASES["gpt"].loss(model, 1).backward()
    opt.step()
    assert not torch.equal(run.master(name), before)
    return found


def test_a_step_without_reduction_is_refused(pool: RankPool) -> None:
    for found in pool.run(misused):
        assert len(found) == 3 and all("outside that context" in text for text in found)


def reduced_later(stage: int, precision: str | None) -> bool:
    """`run.reduce()` after backwards that only add gives what a last backward outside the context does."""
    runs = [build("gpt", "adamw", stage=stage, precision=precision) for _ in range(2)]
    for step in range(2):
        for way, (run, model, opt, _, _) in enumerate(runs):
            with run.accumulating():
                for number in range(2 if way else 3):
                    run.scaler.scale(CASES["gpt"].loss(model, 3 * step + number)).backward()
                param = next(model.parameters())
                assert param.grad is not None and param.grad.shape == param.shape, "this rank's sum, as under DDP's no_sync()"
            if way:
                run.scaler.scale(CASES["gpt"].loss(model, 3 * step + 2)).backward()
            else:
                run.reduce()
            run.scaler.unscale_(opt)
            run.clip_grad_norm_(0.5)
            run.scaler.step(opt)
            run.scaler.update()
            opt.zero_grad()
    (one, *_), (other, *_) = runs
    same = all(torch.equal(a, b) for (_, a), (_, b) in zip(one.iter_masters(), other.iter_masters(), strict=True))
    one.close()
    other.close()
    return same


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (1, None), (2, "fp16"), (3, None)])
def test_sums_may_be_reduced_without_another_backward(pool: RankPool, stage: int, precision: str | None) -> None:
    assert all(pool.run(reduced_later, stage, precision))


def changed_sums() -> None:
    """Sums may be changed, as the gradients that DDP's no_sync() leaves."""
    run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=1)
    params, others = list(model.parameters()), list(plain.parameters())
    with run.accumulating():
        CASES["gpt"].loss(model, 0).backward()
        for param in params:
            param.grad.mul_(0.5)
        params[0].grad = torch.zeros_like(params[0].grad)
        params[1].grad = None
        params[2].grad += 1.0
    run.reduce()
    CASES["gpt"].loss(plain, 0).backward()
    for param in others:
        dist.all_reduce(param.grad)
        param.grad.mul_(0.25)
    others[0].grad.zero_()
    others[1].grad = None
    others[2].grad += 1.0
    names = [name for name, _ in plain.named_parameters()]
    for name, param in zip(names, others, strict=True):
        found = run.grad(name)
        assert (found is None) == (param.grad is None), name
        assert found is None or torch.allclose(found, param.grad, rtol=1e-6, atol=1e-7), name
    opt.step()
    plain_opt.step()
    run.close()


def test_sums_may_be_changed_by_hand(pool: RankPool) -> None:
    pool.run(changed_sums)


def cost(accumulates: bool) -> tuple[int, int]:
    torch.manual_seed(0)
    model = CASES["paged-large"].build()
    opt = OPTIMIZERS["adamw"](model.parameters())
    run = sharded(model, opt, stage=3)
    for number in range(3):
        if accumulates and number < 2:
            with run.accumulating():
                CASES["paged-large"].loss(model, number).backward()
        else:
            CASES["paged-large"].loss(model, number).backward()
    found = run.predicted_memory().grad, run.measured_memory()["grad"]
    run.close()
    return found


def test_the_report_says_what_it_costs(pool: RankPool) -> None:
    with_it, without = pool.run(cost, True)[0], pool.run(cost, False)[0]
    assert with_it[0] > without[0] and with_it[1] > without[1]
    assert with_it[1] <= with_it[0]


class Stops(torch.autograd.Function):
    """Raises in backward while asked to."""

    is_on = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Stops.is_on:
            raise ValueError("stopped")
        return grad


def interrupted(stage: int) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, opt, stage=stage, units=torch.nn.Linear)

    def loss(number: int) -> torch.Tensor:
        x = torch.ones(2, 8) * (number + 1)
        return model[2](model[1](Stops.apply(model[0](x)))).square().mean()

    with run.accumulating():
        loss(0).backward()
    Stops.is_on = True
    with pytest.raises(ValueError, match="stopped"):
        loss(1).backward()
    Stops.is_on = False
    with run.accumulating():  # may be entered after a backward that raised
        loss(1).backward()
    loss(1).backward()
    with pytest.raises(OptimizerError, match="they are lost") as caught:
        opt.step()
    opt.zero_grad()
    before = run.master("0.weight").clone()
    with run.accumulating():
        loss(0).backward()
    loss(1).backward()
    opt.step()
    assert not torch.equal(run.master("0.weight"), before)
    run.close()
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_that_raises_does_not_lose_sums_silently(pool: RankPool, stage: int) -> None:
    for text in pool.run(interrupted, stage):
        assert "zero_grad()" in text


def test_sums_are_kept_in_the_master_dtype() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, opt, stage=2, precision=sw.Precision(param=torch.bfloat16, compute=torch.bfloat16))
    for number in range(64):
        loss = (model(torch.ones(1, 4, dtype=torch.bfloat16)) * 1.0).sum()
        if number < 63:
            with run.accumulating():
                loss.backward()
        else:
            loss.backward()
    assert run.grad("weight") is not None and torch.equal(run.grad("weight"), torch.full((4, 4), 64.0))
    for _ in range(300):
        with run.accumulating():
            (model(torch.ones(1, 4, dtype=torch.bfloat16)) * 1.0).sum().backward()
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(run.grad("weight"), torch.full((4, 4), 365.0)), "bf16 would have stopped counting at 256"
    run.close()


def test_zeroed_sums_stay_zeros() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, opt, stage=1)
    with run.accumulating():
        model["a"](torch.ones(1, 2)).sum().backward()
    opt.zero_grad(set_to_none=False)
    model["b"](torch.ones(1, 2)).sum().backward()
    assert torch.equal(run.grad("a.weight"), torch.zeros(2, 2)), "as torch: zeros, not None"
    run.close()
