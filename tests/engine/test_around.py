"""Further ways to a silently wrong result, each found by reading and shown by a script: memory that outlives a pass, tensors that
only look like parameters, the optimizer's own groups, buffers and gradients that ranks or graphs share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from cases import rank, sharded
from loops import HugeTied
from shardwise.testing import RankPool, compare_with_plain

Options = dict[str, Any]
BF = {"precision": sw.Precision(param=torch.bfloat16, compute=torch.float32)}
EVERYWHERE: list[tuple[int, Options]] = [
    (1, {}),
    (3, {"transport": "shared"}),
    (3, {"transport": "copied"}),
    (3, {"transport": "pairwise"}),
    (3, BF),
]


def small(size: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 2))


def both(stage: int, options: Options, build: Callable[[], nn.Module] = small) -> tuple[Any, nn.Module, Any, nn.Module, Any]:
    model = build()
    plain = copy.deepcopy(model)
    opts = [torch.optim.SGD(m.parameters(), lr=0.25) for m in (model, plain)]
    run = sharded(model, opts[0], stage=stage, units=nn.Linear, timeout_s=20.0, **options)
    return run, model, opts[0], plain, opts[1]


def refused(function: Callable[[], Any]) -> str:
    """What a ShardwiseError says; other errors and silence are told apart."""
    try:
        function()
    except sw.ShardwiseError as error:
        return str(error)
    except Exception as error:
        return f"other: {error!r}"
    return "nothing"


# -- memory that outlives a pass ----------------------------------------------------------------------------------


class Shown(nn.Module):
    """Returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, count: int) -> torch.Tensor:
        return self.weight[:count]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.ModuleList([Shown(), Shown()])
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.positions[0](3), self.positions[1](3)
        return (torch.tanh(self.lin(x + first)) * second).sum()


def returned_views(stage: int, options: Options) -> Any:
    model = Positions()
    plain = copy.deepcopy(model)
    opts = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    run = sharded(model, opts[0], stage=stage, units=(Shown, nn.Linear), **options)
    loss = lambda m, k: m(torch.full((3, 6), 0.1 * k + rank()))  # noqa: E731
    report = compare_with_plain(run, model, opts[0], plain, opts[1], loss, steps=4)
    run.close()
    return report


@pytest.mark.parametrize(("stage", "options"), EVERYWHERE)
def test_a_module_may_return_a_view_of_its_parameter(pool: RankPool, stage: int, options: Options) -> None:
    for report in pool.run(returned_views, stage, options):
        assert report.is_bitwise, str(report)


def kept_aliases(stage: int, options: Options, take: str, only_rank: int | None = None) -> tuple[bool, bool]:
    """A forward hook, on all ranks or one, keeps what it sees of a weight; it is read after every step, and training goes on."""
    run, model, opt, plain, plain_opt = both(stage, options)
    kept: dict[int, torch.Tensor] = {}
    reference = sw.testing.PlainTrainer(plain, plain_opt, run.config.precision)
    for module in (model, plain) if only_rank in (None, rank()) else ():
        module[2].register_forward_pre_hook(
            lambda mod, _: kept.__setitem__(id(mod), mod.weight.data if take == "data" else mod.weight.detach())
        )
    same = True
    for number in range(4):
        losses = [m(torch.full((3, 6), 0.1 * number + rank())).square().sum() for m in (model, plain)]
        losses[0].backward()
        reference.backward(losses[1])
        opt.step()
        opt.zero_grad()
        reference.step(None)
        same &= not kept or torch.equal(kept[id(model[2])], kept[id(plain[2])])
    values = all(torch.equal(value, reference.masters[name]) for name, value in run.iter_masters())
    run.close()
    return same, values


@pytest.mark.parametrize("take", ["data", "detach"])
@pytest.mark.parametrize(("stage", "options"), EVERYWHERE)
def test_what_a_hook_keeps_of_a_weight_follows_it(pool: RankPool, stage: int, options: Options, take: str) -> None:
    assert pool.run(kept_aliases, stage, options, take) == [(True, True)] * 2


@pytest.mark.parametrize(("stage", "options"), EVERYWHERE)
def test_one_rank_may_keep_an_alias_alone(pool: RankPool, stage: int, options: Options) -> None:
    assert pool.run(kept_aliases, stage, options, "detach", 1) == [(True, True)] * 2


def scribbled(options: Options) -> str:
    """A kept alias is written after the step: the next forward would overwrite it."""
    run, model, opt, _, _ = both(3, options)
    kept: list[torch.Tensor] = []
    model[2].register_forward_hook(lambda mod, _, __: kept.append(mod.weight.data))
    model(torch.ones(1, 6)).sum().backward()
    opt.step()
    kept[0].mul_(0.5)
    found = refused(lambda: model(torch.ones(1, 6)))
    run.close()
    return found


@pytest.mark.parametrize("options", [{"transport": "copied"}, {"transport": "pairwise"}, BF])
def test_writes_through_an_alias_after_the_step_are_refused(pool: RankPool, options: Options) -> None:
    for text in pool.run(scribbled, options):
        assert "Write through the parameter itself" in text, text


def written_through_kept(stage: int, options: Options, size: int, is_after_step: bool = False) -> bool:
    """A kept alias is written between backward and step, or after the step."""
    run, model, opt, plain, plain_opt = both(stage, options, lambda: small(size))
    reference = sw.testing.PlainTrainer(plain, plain_opt, run.config.precision)
    kept: dict[int, torch.Tensor] = {}
    for module in (model, plain):
        module[2].register_forward_hook(lambda mod, _, __: kept.__setitem__(id(mod), mod.weight.data))
    for number in range(3):
        losses = [m(torch.full((3, size), 0.1 * number + rank())).square().sum() for m in (model, plain)]
        losses[0].backward()
        reference.backward(losses[1])
        for m in (model, plain):
            if not is_after_step:
                kept[id(m[2])].mul_(0.5)
        opt.step()
        opt.zero_grad()
        reference.step(None)
        for m in (model, plain):
            if is_after_step and number < 2:
                kept[id(m[2])].mul_(0.5)
    same = all(torch.equal(value, reference.masters[name]) for name, value in run.iter_masters())
    run.close()
    return same


@pytest.mark.parametrize("size", [6, 192])
def test_writes_through_an_alias_of_an_overlay_reach_the_parameter_after_the_step_too(pool: RankPool, size: int) -> None:
    assert pool.run(written_through_kept, 3, {"transport": "shared"}, size, True) == [True, True]


@pytest.mark.parametrize("size", [6, 192])
@pytest.mark.parametrize(("stage", "options"), EVERYWHERE[:4])
def test_writes_through_a_kept_alias_reach_the_parameter(pool: RankPool, stage: int, options: Options, size: int) -> None:
    assert pool.run(written_through_kept, stage, options, size) == [True, True]


def written_in_closure(stage: int, options: Options, size: int) -> bool:
    """The optimizer's closure writes through an alias that its forward has kept."""
    run, model, opt, plain, plain_opt = both(stage, options, lambda: small(size))
    reference = sw.testing.PlainTrainer(plain, plain_opt, run.config.precision)
    kept: dict[int, torch.Tensor] = {}
    for module in (model, plain):
        module[2].register_forward_hook(lambda mod, _, __: kept.__setitem__(id(mod), mod.weight.data))
    for number in range(3):
        batch = torch.full((3, size), 0.1 * number + rank())

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            opt.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            kept[id(model[2])].mul_(0.5)
            return loss

        opt.step(closure)
        reference.backward(plain(batch).square().sum())
        kept[id(plain[2])].mul_(0.5)
        reference.step(None)
    same = all(torch.equal(value, reference.masters[name]) for name, value in run.iter_masters())
    run.close()
    return same


@pytest.mark.parametrize("size", [6, 192])
@pytest.mark.parametrize(("stage", "options"), EVERYWHERE[:4])
def test_writes_of_a_closure_reach_the_parameter(pool: RankPool, stage: int, options: Options, size: int) -> None:
    assert pool.run(written_in_closure, stage, options, size) == [True, True]


def below_python(stage: int, options: Options) -> bool:
    run, model, _, _, _ = both(stage, options)
    with run.gathered():
        model[2].weight.detach().numpy()[:] = 2.0
    same = bool((run.master("2.weight") == 2.0).all())
    run.close()
    return same


@pytest.mark.parametrize(("stage", "options"), [*EVERYWHERE, (1, BF), (3, {"offload": "disk"})])
def test_arrays_may_be_written_inside_gathered(pool: RankPool, stage: int, options: Options) -> None:
    assert pool.run(below_python, stage, options) == [True, True]


def test_an_array_of_a_freed_parameter_is_read_only() -> None:
    run, model, _, _, _ = both(3, {})
    with pytest.raises(ValueError, match="read-only"):
        model[2].weight.detach().numpy()[:] = 2.0
    run.close()


def collectives_on_whole(options: Options) -> bool:
    """`dist.all_reduce(p)` does not count a version."""
    run, model, opt, plain, _ = both(1, options)
    with torch.no_grad():
        for p in (model[2].weight, plain[2].weight):
            p.copy_(p.to(torch.bfloat16).float())
            dist.all_reduce(p)
    model(torch.ones(1, 6)).sum().mul(0.0).backward()
    opt.step()
    same = torch.equal(run.master("2.weight"), plain[2].weight)
    run.close()
    return same


@pytest.mark.parametrize("options", [{}, BF])
def test_collectives_on_whole_parameters_are_kept(pool: RankPool, options: Options) -> None:
    assert pool.run(collectives_on_whole, options) == [True, True]


def forgotten_alias() -> bool:
    run, model, opt, _, _ = both(1, BF)
    kept = model[2].weight.data
    model[2].weight.data.norm()
    model(torch.ones(1, 6)).sum().mul(0.0).backward()
    kept.fill_(2.0)
    opt.step()
    same = bool((run.master("2.weight") == 2.0).all())
    run.close()
    return same


def test_a_second_look_at_data_does_not_hide_the_first(pool: RankPool) -> None:
    assert pool.run(forgotten_alias) == [True, True]


def different_writes(stage: int) -> str:
    run, model, opt, _, _ = both(stage, {})

    def act() -> None:
        with torch.no_grad():
            model[2].weight.fill_(1.0 + rank())
        model(torch.ones(1, 6)).sum().backward()
        opt.step()

    found = refused(act)
    run.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_different_writes_on_different_ranks_are_refused(pool: RankPool, stage: int) -> None:
    for text in pool.run(different_writes, stage):
        assert "not alike on every rank" in text, text


def test_a_buffer_over_a_parameters_memory_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("shown", model.weight.data)
    with pytest.raises(sw.errors.ModelError, match=r"'shown'.*same memory"):
        sharded(model, stage=1)


def test_a_parameter_inside_a_long_buffer_is_found_behind_a_short_one() -> None:
    memory = torch.zeros(100)
    model = nn.Module()
    model.register_buffer("long", memory)
    model.register_buffer("short", memory[10:20])
    model.weight = nn.Parameter(memory[50:60])
    with pytest.raises(sw.errors.ModelError, match=r"'long' and 'weight'.*same memory"):
        sharded(model, stage=1)


# -- tensors that only look like parameters -----------------------------------------------------------------------


def collective_on_freed(kind: str, operation: str, transport: str) -> bool:
    run, model, opt, plain, plain_opt = both(3, {"transport": transport})
    for m in (model, plain):
        weight = m[2].weight
        tensor = {"parameter": lambda w=weight: w, "data": lambda w=weight: w.data, "detach": lambda w=weight: w.detach()}[kind]()
        with torch.no_grad():
            dist.broadcast(tensor, 0) if operation == "broadcast" else dist.all_reduce(tensor)
    reference = sw.testing.PlainTrainer(plain, plain_opt, run.config.precision)
    model(torch.ones(1, 6)).sum().backward()
    reference.backward(plain(torch.ones(1, 6)).sum())
    opt.step()
    reference.step(None)
    same = all(torch.equal(value, reference.masters[name]) for name, value in run.iter_masters())
    run.close()
    return same


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
@pytest.mark.parametrize("operation", ["broadcast", "all_reduce"])
@pytest.mark.parametrize("kind", ["parameter", "data", "detach"])
def test_collectives_on_a_freed_parameter_are_kept(pool: RankPool, kind: str, operation: str, transport: str) -> None:
    assert pool.run(collective_on_freed, kind, operation, transport) == [True, True]


def test_views_of_freed_parameters_are_not_trained() -> None:
    run, model, _, _, _ = both(3, {})
    weight = model[0].weight
    other = nn.Linear(6, 6)

    ways: dict[str, Callable[[], Any]] = {
        "nn.Parameter(p.data)": lambda: nn.Parameter(weight.data),
        "p.detach().requires_grad_()": lambda: weight.detach().requires_grad_(),
        "load_state_dict(assign=True)": lambda: other.load_state_dict(model[0].state_dict(), assign=True),
    }
    for name, way in ways.items():
        text = refused(way)
        assert "clone" in text or "gathered" in text, f"{name}: {text}"
    other.weight.data = weight.data  # torch asks nobody; but there is no memory behind it
    with pytest.raises(RuntimeError, match="not allocated"):
        other(torch.ones(1, 6))
    run.close()


def test_per_sample_gradients_of_detached_parameters_are_refused_or_right() -> None:
    run, model, _, plain, _ = both(3, {})

    def gradients(m: nn.Module) -> dict[str, torch.Tensor]:
        params = {name: p.detach() for name, p in m.named_parameters()}

        def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(m, params, (x.unsqueeze(0),)).square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(params, torch.ones(3, 6))

    assert "run.gathered" in refused(lambda: gradients(model))
    with torch.no_grad(), run.gathered():
        found, expected = gradients(model), gradients(plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    run.close()


# -- the optimizer's own groups -----------------------------------------------------------------------------------


def through_groups(stage: int, what: str) -> str:
    run, model, opt, _, _ = both(stage, {})
    model(torch.ones(1, 6)).sum().backward()
    pieces = [p for group in opt.param_groups for p in group["params"]]
    ways: dict[str, Callable[[], Any]] = {
        "clip": lambda: nn.utils.clip_grad_norm_(pieces, 1.0),
        "grad": lambda: [p.grad for p in pieces],
        "write": lambda: [p.detach().fill_(0.5) for p in pieces],
        "norm": lambda: [float(p.norm()) for p in pieces],
    }
    with torch.no_grad():
        found = refused(ways[what])
    opt.step()
    for p in pieces:
        p.grad = None
    model(torch.ones(1, 6)).sum().backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    state = opt.state_dict()
    opt.load_state_dict(state)
    run.close()
    return found


@pytest.mark.parametrize("what", ["clip", "grad", "write", "norm"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_optimizers_pieces_are_not_taken_for_parameters(pool: RankPool, stage: int, what: str) -> None:
    for text in pool.run(through_groups, stage, what):
        assert "this rank's pieces" in text, text


def test_the_states_of_whole_parameters_are_not_made_up() -> None:
    run, model, opt, _, _ = both(1, {})
    assert opt.state[model[0].weight] == {}  # a defaultdict: asking makes an entry
    assert set(opt.state_dict()["state"]) == set()
    run.close()


# -- buffers and gradients ----------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Which buffer changes depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", torch.zeros(5))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        (self.a if which == 0 else self.b).add_(1.0)
        return self.lin(x).sum()


def data_dependent_buffers(transport: str) -> list[list[float]]:
    model = Counting()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, opt, stage=3, transport=transport)
    for number in range(3):
        first = model(torch.ones(1, 4), rank())
        (first + model(torch.ones(1, 4), rank())).backward()
        opt.step()
        opt.zero_grad()
        if number == 1 and rank() == 0:
            model.b.fill_(7.0)  # rank 0 refreshes a buffer
    found = [model.a.tolist(), model.b.tolist()]
    run.close()
    return found


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
def test_buffers_that_change_on_one_rank_only(pool: RankPool, transport: str) -> None:
    assert pool.run(data_dependent_buffers, transport) == [[[6.0] * 3, [7.0] * 5]] * 2


class InPlaceGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.zero_()


class SharesGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(6, 6)
        self.pos = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (InPlaceGrad.apply(self.lin(x)) + self.pos).square().sum()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_that_is_changed_afterwards(pool: RankPool, stage: int) -> None:
    for answer in pool.run(shared_grad, stage):
        assert answer == "equal" or "changed in place" in answer, answer


def shared_grad(stage: int) -> str:
    model = SharesGrad()
    plain = copy.deepcopy(model)
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    found = refused(lambda: model(torch.ones(3, 6)).backward())
    if found == "nothing":
        plain(torch.ones(3, 6)).backward()
        found = "equal" if torch.equal(run.grad("pos"), plain.pos.grad) else "other: different"
    run.close()
    return found


def test_stage_0_gradients_that_were_kept_stay() -> None:
    run, model, opt, _, _ = both(0, {})
    model(torch.ones(1, 6)).sum().backward()
    first = [p.grad for p in model.parameters()]
    norms = [float(g.norm()) for g in first]
    opt.zero_grad()
    (model(torch.ones(1, 6)).sum() * 5).backward()
    assert [float(g.norm()) for g in first] == norms
    run.close()


def test_a_scaled_loss_without_gradients_leaves_nothing_scaled() -> None:
    model = small()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = sw.Precision(param=torch.float16, compute=torch.float32, loss_scale=sw.LossScale())
    run = sharded(model, opt, stage=2, precision=precision)
    x = torch.ones(1, 6, requires_grad=True)
    torch.autograd.grad(run.scaler.scale(model(x).sum()), x)
    opt.step()
    run.close()


def test_an_optimizer_that_clips_only_large_norms_is_refused() -> None:
    class Clipping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 100.0)
            super().step()

    model = small()
    with pytest.raises(sw.errors.OptimizerError, match="cannot be sharded"):
        sharded(model, Clipping(model.parameters(), lr=0.1), stage=1)


def differing_in_gathered() -> tuple[str, bool]:
    run, model, opt, _, _ = both(3, {})
    before = run.master("2.weight")

    def act() -> None:
        with run.gathered(), torch.no_grad():
            model[2].weight.fill_(1.0 + rank())

    found = refused(act)
    same = torch.equal(run.master("2.weight"), before)
    model(torch.ones(1, 6)).sum().backward()  # and training goes on
    opt.step()
    run.close()
    return found, same


def test_a_refused_change_in_gathered_is_dropped_and_training_goes_on(pool: RankPool) -> None:
    for text, same in pool.run(differing_in_gathered):
        assert "not alike on every rank" in text and same, text


class TwoNodes(nn.Module):
    """Its weight is given other memory between two uses, so autograd has two nodes for it in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        with torch.no_grad():
            self.weight.set_(self.weight.detach().clone())
        return (y @ self.weight).sum()


def test_a_parameter_with_two_nodes_keeps_both_gradients() -> None:
    torch.manual_seed(0)
    plain = TwoNodes()
    torch.manual_seed(0)
    model = TwoNodes()
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=2)
    plain(torch.ones(2, 8)).backward()
    model(torch.ones(2, 8)).backward()
    assert torch.equal(run.grad("weight"), plain.weight.grad)
    run.close()


def test_clipping_sees_gradients_that_were_changed_in_the_optimizer() -> None:
    """On a rank alone the pieces are whole parameters, and user code may change their gradients."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    run = sharded(model, opt, stage=0)
    model(torch.randn(4, 8)).square().sum().backward()
    params = [p for group in opt.param_groups for p in group["params"]]
    for p in params:
        p.grad = p.grad * 100
    before = torch.cat([p.grad.reshape(-1) for p in params]).norm()
    assert torch.allclose(run.clip_grad_norm_(1.0), before)
    assert torch.allclose(torch.cat([p.grad.reshape(-1) for p in params]).norm(), torch.tensor(1.0), atol=1e-4)
    run.close()


# -- graphs and gradients -----------------------------------------------------------------------------------------


def set_table(transport: str) -> bool:
    """`set_` gives a parameter a new node in autograd's graph."""
    torch.manual_seed(0)
    model = HugeTied(False)
    plain = copy.deepcopy(model)
    opts = [torch.optim.SGD(m.parameters(), lr=0.25) for m in (model, plain)]
    run = sharded(model, opts[0], stage=3, transport=transport)
    new = torch.rand(6000, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        with run.gathered():
            model.table.weight.set_(new.clone())
        plain.table.weight.copy_(new)
    reference = sw.testing.PlainTrainer(plain, opts[1], run.config.precision)
    for number in range(3):
        tokens = torch.randint(0, 6000, (2, 5), generator=torch.Generator().manual_seed(2 * number + rank()))
        model(tokens).backward()
        reference.backward(plain(tokens))
        opts[0].step()
        opts[0].zero_grad()
        reference.step(None)
    same = all(torch.equal(value, reference.masters[name]) for name, value in run.iter_masters())
    run.close()
    return same


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
def test_a_tied_table_that_was_set(pool: RankPool, transport: str) -> None:
    assert pool.run(set_table, transport) == [True, True]


class TwoBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self) -> torch.Tensor:
        return ((self.one + InPlaceGrad.apply(self.other.clone())) * torch.arange(4.0)).sum()


def shared_while_accumulating() -> str:
    model = TwoBiases()
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=2)

    def act() -> None:
        with run.accumulating():
            model().backward()
        model().backward()
        raise AssertionError(f"{run.grad('one')[0]} {run.grad('other')[0]}")

    found = refused(act)
    run.close()
    return found


def test_a_gradient_that_is_changed_after_it_arrived_is_never_taken_silently(pool: RankPool) -> None:
    for text in pool.run(shared_while_accumulating):
        assert "was changed in place after autograd had handed it over" in text, text


def stale_view(options: Options) -> str:
    run, model, opt, _, _ = both(3, options)
    view = model[2].weight.detach()
    x = torch.ones(6, 6, requires_grad=True)
    old = (x * view).sum()
    model(torch.ones(1, 6)).sum().backward()
    opt.step()
    try:
        old.backward()
        text = "accepted"
    except RuntimeError as error:
        text = str(error)
    run.close()
    return text


@pytest.mark.parametrize("options", [{"transport": "shared"}, {"transport": "copied"}])
def test_a_graph_over_a_view_of_a_freed_parameter_goes_stale(pool: RankPool, options: Options) -> None:
    for text in pool.run(stale_view, options):
        assert "modified by an inplace operation" in text or "have changed since" in text, text


def parts_called_directly(transport: str) -> bool:
    """Submodules are called, and one rank's loss reaches no trainable parameter."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].requires_grad_(False)
    run = sharded(
        model, torch.optim.SGD(model.parameters(), lr=1.0), stage=3, units=nn.Linear, transport=transport, timeout_s=20.0
    )
    x = torch.ones(1, 4, requires_grad=True)
    model["a" if rank() == 0 or transport == "pairwise" else "b"](x).sum().backward()
    found = bool((run.grad("a.bias") == (1.0 if transport == "pairwise" else 0.5)).all())
    run.close()
    return found


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
def test_a_rank_without_trainable_parameters_joins_a_backward_through_submodules(pool: RankPool, transport: str) -> None:
    assert pool.run(parts_called_directly, transport) == [True, True]
