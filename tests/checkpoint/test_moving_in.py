"""Jobs move in from plain torch and out again: model and optimizer files of a plain job, sharded training, plain files again."""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from cases import CASES, OPTIMIZERS, generator, sharded
from marks import needs_native
from shardwise.errors import OptimizerError, RanksDifferError
from shardwise.testing import RankPool, compare_with_plain
from shardwise.testing.parity import in_rank_order

Options = dict[str, Any]


class Traveller(nn.Module):
    """Tied, frozen and transposed parameters. All sizes are multiples of 16: torch's fused kernel rounds the rest otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.still = nn.Linear(16, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(32, 16).t() * 0.2)
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.still(self.embed(tokens[:, :-1]))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = (x @ self.mix).view(*x.shape[:-1], 2, 16).sum(-2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(torch.randint(0, 48, (2, 9), generator=generator(number)))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.5),
}
DISK = sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)
PLACES: dict[str, Options] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "transport": "pairwise"},
    "stage 3": {"stage": 3},
    "disk": {"stage": 3, "offload": DISK},
}


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer with two groups whose order is not the model's."""
    torch.default_generator.manual_seed(seed)
    model = Traveller()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return model, KINDS[kind]([{"params": vectors, "lr": 3e-3}, {"params": list(reversed(matrices)), "weight_decay": 0.02}])


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Plain steps with gradients averaged over ranks; like autograd's own they have the strides of their parameter."""
    for number in range(first, last):
        loss_of(model, number).backward()
        for param in (p for p in model.parameters() if p.grad is not None):
            parts = [torch.empty(param.shape) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, param.grad.contiguous())
            param.grad.copy_(in_rank_order(parts) / len(parts))
        optimizer.step()
        optimizer.zero_grad()


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two nested values differ, in types, dtypes, strides or bits."""
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and found.shape == expected.shape
        return [] if same and found.stride() == expected.stride() and torch.equal(found, expected) else [where]
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{where}: {sorted(map(str, expected))}"]
        return [text for key in expected for text in differences(found[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, (list, tuple)):
        if type(found) is not type(expected) or len(found) != len(expected):
            return [where]
        return [text for n, pair in enumerate(zip(found, expected, strict=True)) for text in differences(*pair, f"{where}.{n}")]
    return [] if type(found) is type(expected) and found == expected else [where]


def largest(found: Any, expected: Any) -> float:
    """The largest difference of any element of nested values."""
    if isinstance(expected, torch.Tensor):
        return float((found - expected).abs().max()) if expected.is_floating_point() and expected.numel() else 0.0
    pairs = expected.items() if isinstance(expected, dict) else enumerate(expected) if isinstance(expected, list) else ()
    return max((largest(found[key], value) for key, value in pairs), default=0.0)


def write(directory: str, name: str, model: Any, optimizer: Any) -> None:
    if dist.get_rank() == 0:
        torch.save(model, f"{directory}/{name}-model.pt")
        torch.save(optimizer, f"{directory}/{name}-optimizer.pt")
    dist.barrier()


def read(directory: str, name: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and optimizer with what the files contain."""
    model, optimizer = make(kind, seed)
    model.load_state_dict(torch.load(f"{directory}/{name}-model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(f"{directory}/{name}-optimizer.pt", weights_only=True))
    return model, optimizer


def journey(directory: str, kind: str, options: Options) -> tuple[list[str], float]:
    """Three steps plainly, three sharded, three plainly: what differs from nine plain steps, and by how much."""
    model, optimizer = make(kind, seed=0)
    plainly(model, optimizer, 0, 3)
    write(directory, "before", model.state_dict(), optimizer.state_dict())
    plain, plain_optimizer = read(directory, "before", kind, seed=2)
    before = optimizer.state_dict()

    moved, moved_optimizer = read(directory, "before", kind, seed=1)
    run = sharded(moved, moved_optimizer, **options)
    wrong = differences(run.full_optimizer_state_dict(), before if dist.get_rank() == 0 else {}, "when moved in")
    for number in range(3, 6):
        loss_of(moved, number).backward()
        moved_optimizer.step()
        moved_optimizer.zero_grad()
    write(directory, "after", run.full_state_dict(), run.full_optimizer_state_dict())
    run.close()

    back, back_optimizer = read(directory, "after", kind, seed=3)
    plainly(back, back_optimizer, 6, 9)
    plainly(plain, plain_optimizer, 3, 9)
    found = {"model": dict(back.state_dict()), "optimizer": back_optimizer.state_dict()}
    expected = {"model": dict(plain.state_dict()), "optimizer": plain_optimizer.state_dict()}
    return wrong + differences(found, expected), largest(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_moves_in_and_out_to_the_last_bit(pool: RankPool, tmp_path: Path, kind: str) -> None:
    for name, options in PLACES.items():
        (tmp_path / name).mkdir()
        for wrong, off_by in pool.run(journey, str(tmp_path / name), kind, options):
            if kind == "fused" and name == "disk":  # the native Adam: its square root is not torch's (docs/numerics.md)
                assert off_by <= 1e-5 and not [where for where in wrong if "when moved in" in where], wrong
            else:
                assert not wrong, f"{name}: {wrong}"


# -- every placement, precision and kind of parameter ------------------------------------------------------------------


def stepped(case: str, optimizer: str, seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model and optimizer that have made steps, without gradients; the same on every rank."""
    torch.default_generator.manual_seed(seed)
    model = CASES[case].build()
    opt = OPTIMIZERS[optimizer](model.parameters())
    for number in range(steps):
        CASES[case].loss(model, number).backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
        opt.step()
        opt.zero_grad()
    return model, opt


def without_empty(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict without the states of parameters that have no elements: those have no place in a shard."""
    numbers = {number for number, param in enumerate(model.parameters()) if not param.numel()}
    return {**state, "state": {number: value for number, value in state["state"].items() if number not in numbers}}


def arrival(case: str, optimizer: str, options: Options) -> tuple[list[str], str, bool]:
    """What is not as it was right after moving in; how later steps compare with plain ones; whether whole states are gone."""
    model, opt = stepped(case, optimizer, seed=0)
    plain, plain_opt = stepped(case, optimizer, seed=0)
    expected = without_empty(copy.deepcopy(opt.state_dict()), plain)
    whole = [
        weakref.ref(value)
        for state in opt.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    assert whole
    if isinstance(options.get("precision"), str):
        options["precision"] = dataclasses.replace(sw.Precision.of(options["precision"]), compute=torch.float32)
    run = sharded(model, opt, **options)
    is_released = not any(ref() is not None for ref in whole)
    found = run.full_optimizer_state_dict()
    wrong = differences(found, expected if dist.get_rank() == 0 else {})
    report = compare_with_plain(run, model, opt, plain, plain_opt, lambda m, k: CASES[case].loss(m, k + 2), steps=2)
    run.close()
    return wrong, "" if report.is_bitwise else str(report), is_released


HOST = sw.Offload(optimizer="host")
SMALL = sw.Offload(optimizer="disk", grads="disk", step_bytes=1 << 16)
ARRIVALS: dict[str, tuple[str, str, Options]] = {
    "stage 0": ("frozen", "adamw", {"stage": 0}),
    "scalar and empty parameters": ("mlp", "adamw", {"stage": 3}),
    "a scalar that streams": ("mlp", "sgd", {"stage": 3, "offload": SMALL}),
    "channels last": ("conv", "sgd", {"stage": 3, "transport": "pairwise"}),
    "channels last on disk": ("conv", "adagrad", {"stage": 2, "offload": SMALL}),
    "some were never used": ("branchy", "adam", {"stage": 3, "joins": "all"}),
    "host": ("gpt", "adamw", {"stage": 2, "offload": HOST}),
    "bf16": ("gpt", "adamw", {"stage": 3, "precision": "bf16"}),
    "bf16 on disk": ("gpt", "sgd", {"stage": 1, "precision": "bf16", "offload": SMALL}),
    "adagrad": ("mlp", "adagrad", {"stage": 1}),
    "a frozen base": ("frozen", "adagrad", {"stage": 3, "offload": DISK}),
    "three states": ("lstm", "rmsprop", {"stage": 3}),
    "a custom optimizer": ("mlp", "lion", {"stage": 2, "offload": HOST}),
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_states_arrive_wherever_they_are_kept(pool: RankPool, name: str) -> None:
    case, optimizer, options = ARRIVALS[name]
    for wrong, report, is_released in pool.run(arrival, case, optimizer, options):
        assert not wrong and not report, (wrong, report)
        assert is_released, "whole states are still alive"


def arrival_of_native(options: Options) -> tuple[list[str], bool]:
    model, opt = stepped("gpt", "fused", seed=0)
    expected = copy.deepcopy(opt.state_dict())
    run = sharded(model, opt, **options)
    wrong = differences(run.full_optimizer_state_dict(), expected if dist.get_rank() == 0 else {})
    CASES["gpt"].loss(model, 5).backward()
    opt.step()
    found = run.full_optimizer_state_dict()
    counts = {float(state["step"]) for state in found["state"].values()} if found else {3.0}
    assert run._runtime.offload.step is not None and run._runtime.offload.step.is_native
    run.close()
    return wrong, counts == {3.0}


@needs_native
@pytest.mark.parametrize("offload", [HOST, DISK])
def test_states_arrive_at_the_native_adam(pool: RankPool, offload: sw.Offload) -> None:
    for wrong, counts_on in pool.run(arrival_of_native, {"stage": 3, "offload": offload}):
        assert not wrong and counts_on


def built_sharded(directory: str) -> list[str]:
    model, opt = make("adamw", seed=0)
    plainly(model, opt, 0, 3)
    write(directory, "plain", model.state_dict(), opt.state_dict())
    with sw.sharded_init():
        moved = Traveller()
    matrices = [p for p in moved.parameters() if p.dim() > 1]
    vectors = [p for p in moved.parameters() if p.dim() == 1]
    moved_opt = KINDS["adamw"]([{"params": vectors}, {"params": list(reversed(matrices))}])
    moved_opt.load_state_dict(torch.load(f"{directory}/plain-optimizer.pt", weights_only=True))
    run = sharded(moved, moved_opt, stage=3)
    moved.load_state_dict(torch.load(f"{directory}/plain-model.pt", weights_only=True))
    expected = opt.state_dict()
    wrong = differences(run.full_optimizer_state_dict(), expected if dist.get_rank() == 0 else {})
    loss_of(moved, 3).backward()
    moved_opt.step()
    plainly(model, opt, 3, 4)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    wrong += differences(run.full_state_dict(), state if dist.get_rank() == 0 else {})
    run.close()
    return wrong


def test_a_state_dict_is_loaded_into_the_optimizer_of_a_model_that_was_built_sharded(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(built_sharded, str(tmp_path)) == [[], []]


def narrow(options: Options) -> tuple[list[str], set[torch.dtype]]:
    """A plain job whose parameters are 16-bit has 16-bit states; a sharded one updates masters."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    opt = torch.optim.AdamW(model.parameters())
    inputs = torch.ones(2, 16, dtype=torch.bfloat16)
    model(inputs).sum().backward()
    opt.step()
    opt.zero_grad()
    expected = copy.deepcopy(opt.state_dict())
    run = sharded(model, opt, **options)
    wrong = differences(run.full_optimizer_state_dict(), expected if dist.get_rank() == 0 else {})
    kept = {values.dtype for _, kind, _, values in run._survivors.ranges() if kind == "exp_avg"}
    model(inputs).sum().backward()
    opt.step()
    run.close()
    return wrong, kept


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 1, "offload": HOST}])
def test_states_of_16_bit_parameters_become_those_of_masters(pool: RankPool, options: Options) -> None:
    assert pool.run(narrow, options) == [([], {torch.float32})] * 2


# -- frozen parameters keep their states -------------------------------------------------------------------------------


def frozen_and_back(directory: str, stage: int, kind: str) -> list[str]:
    """Train, freeze a block, shard, save and load, train, unfreeze, train: like plain training."""
    model, opt = make(kind, seed=0)
    plain, plain_opt = make(kind, seed=0)
    for m, o in ((model, opt), (plain, plain_opt)):
        plainly(m, o, 0, 2)
        m.blocks[0].requires_grad_(False)
    run = sharded(model, opt, stage=stage)
    run.save(f"{directory}/{stage}-{kind}")
    loss_of(model, 40).backward()
    opt.step()
    opt.zero_grad()
    run.load(f"{directory}/{stage}-{kind}")
    for number in range(2, 4):
        loss_of(model, number).backward()
        opt.step()
        opt.zero_grad()
    plainly(plain, plain_opt, 2, 4)
    is_first = dist.get_rank() == 0
    wrong = differences(run.full_optimizer_state_dict(), plain_opt.state_dict() if is_first else {}, "frozen")
    model.blocks[0].requires_grad_(True)
    plain.blocks[0].requires_grad_(True)
    for number in range(4, 6):
        loss_of(model, number).backward()
        opt.step()
        opt.zero_grad()
    plainly(plain, plain_opt, 4, 6)
    wrong += differences(run.full_optimizer_state_dict(), plain_opt.state_dict() if is_first else {}, "unfrozen")
    run.close()
    return wrong


@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_a_frozen_parameter_keeps_its_states_until_it_is_unfrozen(pool: RankPool, tmp_path: Path, kind: str) -> None:
    for stage in (0, 2, 3):
        assert pool.run(frozen_and_back, str(tmp_path), stage, kind) == [[], []], stage


class Eager(torch.optim.SGD):
    """Makes its states when it is built, as some optimizers do: one long one, all elements alike, and a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"step": torch.tensor(0.0), "total": torch.full_like(param, 0.5)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                self.state[param]["step"] += 1
                self.state[param]["total"] += param.grad
                param.sub_(self.state[param]["total"], alpha=group["lr"])


def eager(options: Options) -> list[str]:
    """Some parameters are frozen, some never used: their states are as they were made."""
    both = []
    for _ in range(2):
        torch.default_generator.manual_seed(0)
        model = CASES["branchy"].build()
        model.first.requires_grad_(False)
        both.append((model, Eager(model.parameters())))
    (model, opt), (plain, plain_opt) = both
    inputs = torch.ones(2, 11)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(inputs, 1).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = sharded(model, opt, **options)
    wrong = differences(run.full_optimizer_state_dict(), plain_opt.state_dict() if dist.get_rank() == 0 else {}, "moved in")
    step(model, opt)
    step(plain, plain_opt)
    wrong += differences(run.full_optimizer_state_dict(), plain_opt.state_dict() if dist.get_rank() == 0 else {}, "after a step")
    run.close()
    return wrong


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 3}, {"stage": 3, "offload": DISK}])
def test_states_that_an_optimizer_was_built_with_come_out_too(pool: RankPool, options: Options) -> None:
    assert pool.run(eager, options) == [[], []]


# -- what is refused ---------------------------------------------------------------------------------------------------


class Rows(torch.optim.Optimizer):
    """Element-wise, but it counts rows: a state that is neither as long as its parameter nor one number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["rows"] = torch.zeros(max(param.dim(), 1) + 1)
                    param.sub_(param.grad, alpha=group["lr"])


def refused(what: str) -> tuple[str, str, bool]:
    rank = dist.get_rank()
    model, opt = make("sgd" if what == "settings" else "adamw", seed=0)
    if what == "rows":
        opt = Rows(model.parameters())
    if not (what == "one has stepped" and rank == 1):
        plainly_alone(model, opt)
    if what == "one has stepped" and rank == 0:
        opt2 = make("adamw", seed=0)
        opt2[1].load_state_dict(opt.state_dict())
        model, opt = opt2
    if what == "values" and rank == 1:
        opt.state[model.mix]["exp_avg"][0, 0] += 1
    if what == "one rank's shape" and rank == 1:
        opt.state[model.mix]["exp_avg"] = torch.zeros(3)
    if what == "no optimizer" and rank == 1:
        opt = None
    options: Options = {"stage": 2}
    if what == "settings":
        for group in opt.param_groups:
            group["momentum"] = 0.0
        options["offload"] = HOST
    before = [param.detach().clone() for param in model.parameters()]
    states = None if opt is None else copy.deepcopy(opt.state_dict())
    if what == "a stranger":
        opt.state[nn.Parameter(torch.zeros(2))] = {"step": 1}
    try:
        sharded(model, opt, **options).close()
        return "nothing", "", False
    except (OptimizerError, RanksDifferError) as error:
        unchanged = all(type(param) is nn.Parameter for param in model.parameters())
        unchanged &= all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        if what != "a stranger":
            unchanged &= opt is None or not differences(opt.state_dict(), states)
        return type(error).__name__, str(error), unchanged


def plainly_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step without other ranks, the same on all of them."""
    model(torch.arange(18).view(2, 9)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        (
            "rows",
            "OptimizerError",
            r"state 'rows' of parameter '.*' that cannot be divided .* of shape \[\d\]",
        ),
        ("one has stepped", "RanksDifferError", "differ in the states of parameter '.*': exp_avg, exp_avg_sq, step against none"),
        ("values", "RanksDifferError", "differ in the values of the states of parameter 'mix'"),
        (
            "one rank's shape",
            "OptimizerError",
            r"state 'exp_avg' of parameter 'mix' .* shape \[3\], the parameter has shape \[16, 32\]",
        ),
        ("a stranger", "OptimizerError", r"a state of a tensor of shape \[2\], which is no parameter of the model"),
        ("no optimizer", "RanksDifferError", "rank 1 gave sw.shard.. no optimizer, rank 0 did"),
        (
            "settings",
            "OptimizerError",
            "a state 'momentum_buffer' of parameter '.*', but with its present settings it would not make",
        ),
    ],
)
def test_states_that_cannot_move_in_are_refused_on_all_ranks(pool: RankPool, what: str, kind: str, message: str) -> None:
    for found, text, unchanged in pool.run(refused, what):
        assert found == kind and re.search(message, text) and unchanged, (found, text, unchanged)
