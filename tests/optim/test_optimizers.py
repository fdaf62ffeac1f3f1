"""Which optimizers may update pieces, and what may be done to one that does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import shardwise as sw
from cases import CASES, OPTIMIZERS, build, parity, sharded
from shardwise.errors import OptimizerError
from shardwise.optim import check_elementwise
from shardwise.testing import RankPool


class GlobalNormSGD(torch.optim.SGD):
    """Statistics over all parameters of the optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt() if grads else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class NormedGroup(torch.optim.SGD):
    """Element-wise, but for groups that ask for more: as Muon or a trust ratio in a second group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() if group.get("normed") else p.grad, alpha=group["lr"])


class Adaptive(torch.optim.SGD):
    """A step size that all parameters share and that their gradients change, as in D-Adaptation and Prodigy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["d"] = group.get("d", 1.0) + sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        for p in group["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=group["lr"] / group["d"])


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))]


def _normed() -> torch.optim.Optimizer:
    first, second = _params()
    return NormedGroup([{"params": [first]}, {"params": [second], "normed": True}], lr=0.1)


@pytest.mark.parametrize(
    "make",
    [lambda: GlobalNormSGD(_params(), lr=0.1), _normed, lambda: Adaptive(_params(), lr=0.1)],
    ids=["global", "group", "adaptive"],
)
def test_statistics_over_more_than_one_element_are_refused(make: Callable[[], torch.optim.Optimizer]) -> None:
    with pytest.raises(OptimizerError, match="differed from one that updates all"):
        check_elementwise(make())


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_element_wise_ones_are_taken(name: str) -> None:
    check_elementwise(OPTIMIZERS[name](_params()))


def test_groups_that_differ_in_their_numbers_are_taken() -> None:
    first, second = _params()
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "lr": 1e-4, "betas": (0.8, 0.9)}]
    check_elementwise(torch.optim.AdamW(groups, lr=1e-3))
    check_elementwise(torch.optim.SGD([{"params": [first]}, {"params": []}], lr=1e-3, momentum=0.9))


# -- state dicts --------------------------------------------------------------------------------------------------


def exchanged_states(stage: int) -> dict[str, str]:
    run, model, opt, _, _ = build("gpt", "adamw", stage=stage)
    CASES["gpt"].loss(model, 0).backward()
    opt.step()
    mine = opt.state_dict()
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, mine)
    other = everyone[1 - torch.distributed.get_rank()]
    answers = {}
    for what, state in {"mine": mine, "other": other, "plain": {k: v for k, v in mine.items() if k != "shardwise"}}.items():
        try:
            opt.load_state_dict(copy.deepcopy(state))
            answers[what] = "loaded"
        except OptimizerError as error:
            answers[what] = str(error)
    run.close()
    return answers


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dict_says_whose_it_is(pool: RankPool, stage: int) -> None:
    for answers in pool.run(exchanged_states, stage):
        assert answers["mine"] == "loaded"
        assert "the pieces of another rank or run: rank" in answers["other"]
        assert "not made by a sharded optimizer" in answers["plain"]


def test_a_state_dict_of_another_world_or_stage_is_refused() -> None:
    states = {}
    for stage in (2, 3):
        run, model, opt, _, _ = build("gpt", "adamw", stage=stage)
        CASES["gpt"].loss(model, 0).backward()
        opt.step()
        states[stage] = opt.state_dict()
        run.close()
    with pytest.raises(OptimizerError, match=r"stage 2 \(here 3\)"):
        opt.load_state_dict(states[2])
    states[3]["shardwise"]["world_size"] = 4
    with pytest.raises(OptimizerError, match=r"world_size 4 \(here 1\)"):
        opt.load_state_dict(states[3])


def test_the_state_dict_of_a_streamed_optimizer_is_there_until_it_has_states() -> None:
    run, model, opt, _, _ = build("mlp", "adamw", stage=3, offload=sw.Offload(optimizer="disk"))
    assert opt.state_dict()["state"] == {}
    torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    opt.load_state_dict(opt.state_dict())
    CASES["mlp"].loss(model, 0).backward()
    opt.step()
    with pytest.raises(OptimizerError, match="states that stream"):
        opt.state_dict()
    run.close()


# -- what happens around a step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("offload", [None, "disk"])
def test_a_step_that_another_hook_interrupts_is_not_the_last(offload: str | None, when: str, error: type[BaseException]) -> None:
    options = {} if offload is None else {"offload": sw.Offload(optimizer="disk", grads="disk")}
    run, model, opt, plain, plain_opt = build("mlp", "adamw", stage=3, **options)

    def stop(*_: Any) -> None:
        raise error

    for number in range(3):
        for module, optimizer in ((model, opt), (plain, plain_opt)):
            CASES["mlp"].loss(module, number).backward()
            if number == 1:
                register = optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook
                handle = register(stop)
                with pytest.raises(error):
                    optimizer.step()
                handle.remove()
            else:
                optimizer.step()
            optimizer.zero_grad()
    for name, param in plain.named_parameters():
        assert torch.equal(run.master(name), param), name
    run.close()


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_module_added_after_shard_is_refused_by_the_next_step(stage: int) -> None:
    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=stage)
    model.blocks.append(nn.Linear(6, 6))
    optimizer.add_param_group({"params": list(model.blocks[2].parameters())})
    model(torch.randn(2, 6)).backward()
    before = run.master("blocks.0.weight")
    with pytest.raises(OptimizerError, match=r"Add modules to the model before sw\.shard"):
        optimizer.step()
    assert torch.equal(run.master("blocks.0.weight"), before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_join_the_optimizer_later_are_trained(stage: int) -> None:
    torch.manual_seed(0)
    model = Late()
    plain = copy.deepcopy(model)
    runs = []
    for module in (model, plain):
        module.blocks[1].requires_grad_(False)
        optimizer = torch.optim.AdamW(module.blocks[0].parameters(), lr=0.1)
        runs.append((module, optimizer, sharded(module, optimizer, stage=stage) if module is model else None))
    for number in range(3):
        for module, optimizer, _ in runs:
            if number == 1:
                module.blocks[1].requires_grad_(True)
                optimizer.add_param_group({"params": list(module.blocks[1].parameters()), "lr": 0.05})
            module(torch.full((2, 6), 0.1 * number + 0.3)).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = runs[0][2]
    assert run is not None
    for name, param in plain.named_parameters():
        assert torch.equal(run.master(name), param), name


def test_a_wrapper_around_the_optimizer_is_looked_through() -> None:
    torch.manual_seed(0)
    model = Late()
    plain = copy.deepcopy(model)
    wrapped = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    run = sharded(model, wrapped, stage=3)
    for _ in range(2):
        for module, optimizer in ((model, wrapped), (plain, plain_optimizer)):
            module(torch.ones(2, 6)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, param in plain.named_parameters():
        assert torch.equal(run.master(name), param), name


def test_an_optimizer_made_with_states_for_a_scalar_parameter(pool: RankPool) -> None:
    """Adagrad makes its states when it is built; those of a scalar have the shape of its step count."""
    for stage in (1, 3):
        for report in pool.run(parity, "mlp", optimizer="adagrad", stage=stage, steps=4):
            assert report.is_bitwise, str(report)
