"""Everything a training loop may do between forward and step, against plain training, and in the expected order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from cases import CASES, build, generator, parity, rank, sharded
from loops import CalledTwice, Elsewhere, HugeTied, ParameterBranch, SharedInput, TiedAcrossCheckpoints, batch, tokens
from shardwise.errors import StaleGraphError
from shardwise.testing import ParityReport, RankPool, compare_with_plain
from shardwise.testing.models import GPT, GPTConfig

STAGES = [0, 1, 2, 3]


def tied_across_checkpoints(stage: int) -> ParityReport:
    torch.manual_seed(0)
    model = TiedAcrossCheckpoints(True)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=stage)
    loss = lambda m, k: m(batch(k, 4, 7).requires_grad_())  # noqa: E731
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=3)
    run.close()
    return report


@pytest.mark.parametrize("stage", STAGES)
def test_nested_backwards_that_share_a_parameter(pool: RankPool, stage: int) -> None:
    """Reentrant checkpoints run a backward of their own each; a Unit reduced early is reduced again (docs/numerics.md)."""
    for report in pool.run(tied_across_checkpoints, stage):
        assert report.largest < 1e-6, str(report)
        assert report.compared_elements > 0


def methods() -> bool:
    torch.manual_seed(0)
    model = Elsewhere()
    plain = copy.deepcopy(model)
    run = sharded(model, stage=3, methods=("encode", "calls_forward"))
    with torch.no_grad():  # a method that calls the model itself, as generate() does
        if not torch.equal(model.calls_forward(tokens(0)), plain.calls_forward(tokens(0))):
            return False
    same = torch.equal(model.encode(tokens(0)), plain.encode(tokens(0)))
    same &= torch.equal(model.blocks[1](batch(1, 2, 8)), plain.blocks[1](batch(1, 2, 8)))  # a block called on its own
    run.close()
    return same


def test_methods_other_than_forward(pool: RankPool) -> None:
    assert pool.run(methods) == [True, True]


def exception_in_the_middle(stage: int, where: str) -> ParityReport:
    torch.manual_seed(0)
    model = CASES["gpt"].build()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=stage)

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
        if unit.layout.slots[update.bounds.slot_index].name.startswith("branches.0.")
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


def events(stage: int, transport: str = "auto", *, joins: str = "none") -> list[tuple[str, str]]:
    run, model, opt, _, _ = build("gpt", "adamw", stage=stage, transport=transport, joins=joins)
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
        for joins, units in (("none", ["blocks.2", "blocks.1", "blocks.0", "root"]), ("all", ["root to blocks.2"])):
            for found in pool.run(events, stage, joins=joins):
                assert [kind for kind, _ in found if kind in ("gather", "free")] == []
                assert [name for kind, name in found if kind == "reduce"] == units


def several_models() -> bool:
    """Three models at two stages, trained by the sum of their losses, as their plain replicas are."""
    names = ["gpt", "mlp", "conv"]
    runs = [build(name, "adamw", stage=stage) for name, stage in zip(names, (3, 2, 3), strict=True)]
    references = [sw.testing.PlainTrainer(plain, plain_opt, run.config.precision) for run, _, _, plain, plain_opt in runs]
    for number in range(2):
        sum(CASES[name].loss(model, number) for name, (_, model, _, _, _) in zip(names, runs, strict=True)).backward()
        for name, reference, (_, _, optimizer, plain, _) in zip(names, references, runs, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            reference.backward(CASES[name].loss(plain, number))
            reference.step(None)
    same = [
        torch.equal(value, reference.masters[name])
        for reference, (run, *_) in zip(references, runs, strict=True)
        for name, value in run.iter_masters()
    ]
    for run, *_ in runs:
        run.close()
    return all(same) and len(same) > 10


def test_several_models_in_one_process(pool: RankPool) -> None:
    assert pool.run(several_models) == [True, True]


def test_inference_without_an_optimizer() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=40, context=8, layers=2, heads=2, hidden=16))
    plain = copy.deepcopy(model)
    sharded(model, stage=3)
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))


def test_parity_report_of_nothing_is_not_parity() -> None:
    assert not ParityReport(0, [], 0).is_bitwise


def values_in_hooks(transport: str) -> bool:
    """What a user's own hooks before and after a forward, and before a backward, see of a parameter."""
    run, model, _, plain, _ = build("gpt", "adamw", stage=3, transport=transport)
    block = model.blocks[0]
    seen: list[torch.Tensor] = []

    def look(*_: object) -> None:
        seen.append(block.up.weight.detach().clone())

    handles = [block.register_forward_pre_hook(look), block.register_forward_hook(look)]
    handles.append(block.register_full_backward_pre_hook(look))
    CASES["gpt"].loss(model, 0).backward()
    for handle in handles:
        handle.remove()
    run.close()
    return len(seen) == 3 and all(torch.equal(value, plain.blocks[0].up.weight) for value in seen)


@pytest.mark.parametrize("transport", ["shared", "copied", "pairwise"])
def test_user_hooks_see_the_values_of_parameters(pool: RankPool, transport: str) -> None:
    assert pool.run(values_in_hooks, transport) == [True, True]


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


def test_hooks_do_not_pile_up_on_an_input() -> None:
    model = ParameterBranch()
    sharded(model, stage=3)
    x = torch.randn(6, 6, requires_grad=True)
    for _ in range(5):
        model(x)
    assert not x._backward_hooks


def interrupted() -> ParityReport:
    torch.manual_seed(0)
    model = CalledTwice()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=3)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(batch(0, 3, 8))
    handle.remove()
    loss = lambda m, k: m(batch(k, 3, 8))  # noqa: E731
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
    run = sharded(model, optimizer, stage=3)
    loss = model(torch.randn(3, 8))
    first = gathered_at_once(model, lambda: loss.backward(retain_graph=True), run)
    second = gathered_at_once(model, loss.backward, run)  # the same graph again
    assert (first, second) == (2, 2), "the root and one block"


def test_a_backward_after_one_that_raised_is_not_lost() -> None:
    torch.manual_seed(0)
    model = CalledTwice()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=3)
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
    run = sharded(model, optimizer, stage=3)
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
    run = sharded(model, optimizer, stage=3)
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
