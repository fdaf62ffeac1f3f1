"""What scripts do to tiled parameters and to what is computed from them: as in plain training, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from cases import sharded
from shardwise.errors import FreedParameterError, ModelError
from shardwise.partition import TiledParameter
from shardwise.testing import RankPool
from shardwise.tiers import Kind, Tier

WAYS: list[dict[str, Any]] = [{"stage": 1}, {"stage": 3}, {"stage": 3, "transport": "copied"}, {"stage": 3, "offload": "disk"}]


class Net(nn.Module):
    """A table, an ordinary layer, and a head; `before` is called with the model in every forward pass."""

    def __init__(self, before: Callable[[Net], None] | None = None, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, **embedding)
        self.mid = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.before = before

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.before is not None:
            self.before(self)
        x = self.embed(tokens)
        x += 1.0  # in place
        return self.head(torch.tanh(self.mid(x)))


def made(model: nn.Module, *, lr: float = 0.1, tiling: int | None = 4096, **options: Any) -> tuple[sw.Run, Any, Any]:
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return sharded(model, optimizer, tiling=tiling, **options), plain, optimizer


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(0))  # the same on every rank
    loss: torch.Tensor = model(tokens).square().mean()
    return loss


def stored(run: sw.Run, name: str) -> torch.Tensor:
    return run.full_state_dict(rank0_only=False)[name]


def same_gradients(run: sw.Run, plain: nn.Module) -> None:
    for name, param in plain.named_parameters():
        found = run.grad(name)
        assert (found is None) == (param.grad is None), name
        assert found is None or torch.allclose(found, param.grad, rtol=1e-4, atol=1e-6), name


# -- writes ------------------------------------------------------------------------------------------------------------


def _scatter(weight: torch.Tensor) -> None:
    parts = [torch.full(weight.shape, 5.0) for _ in range(dist.get_world_size())]
    dist.scatter(weight.data, parts if dist.get_rank() == 0 else None, src=0)


def _reset(model: Net) -> None:
    model.embed.padding_idx = 5
    torch.manual_seed(3)
    model.embed.reset_parameters()


WRITES: dict[str, Callable[[Any], object]] = {
    "a row": lambda model: model.head.weight[5].fill_(7.0),
    "a row of .data": lambda model: model.head.weight.data[-1].mul_(3.0),
    "a part of a row": lambda model: model.head.weight[5][2:9].fill_(7.0),
    "a transposed view": lambda model: model.head.weight.data.t().mul_(2.0),
    "reset_parameters": _reset,
    "scatter": lambda model: _scatter(model.head.weight),
    "all_reduce": lambda model: dist.all_reduce(model.head.weight.data),
}


def written(**options: Any) -> None:
    for what, write in WRITES.items():
        torch.manual_seed(0)
        model = Net()
        run, plain, optimizer = made(model, lr=0.0, **options)
        with torch.no_grad():
            write(model)
            write(plain)
        loss_of(model).backward()
        optimizer.step()
        for name in ("head.weight", "embed.weight"):
            assert torch.equal(stored(run, name), plain.get_parameter(name)), (what, name)
        assert torch.allclose(loss_of(model), loss_of(plain)), what
        run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_writes_outside_a_pass_are_kept(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(written, **way)


IN_FORWARD: dict[str, tuple[Callable[[Net], object], bool]] = {
    "a row": (lambda model: model.head.weight[5].mul_(0.5), True),
    "rows": (lambda model: model.head.weight[:2].mul_(0.5), False),
    "rows of .data": (lambda model: model.head.weight.data[:2].mul_(0.5), False),
    "a flat view": (lambda model: model.head.weight.view(-1)[:5].fill_(0.0), False),
}


def written_in_forward(**options: Any) -> None:
    for what, (write, is_kept) in IN_FORWARD.items():

        def quietly(model: Net, write: Callable[[Net], object] = write) -> None:
            with torch.no_grad():
                write(model)

        torch.manual_seed(0)
        model = Net(quietly)
        run, plain, optimizer = made(model, lr=0.0, **options)
        if not is_kept:
            with pytest.raises(ModelError, match="would be lost"):
                loss_of(model)
            run.close()
            continue
        loss, expected = loss_of(model), loss_of(plain)
        assert torch.allclose(loss, expected), what
        loss.backward()
        optimizer.step()
        assert torch.equal(stored(run, "head.weight"), plain.head.weight), what
        run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_writes_in_a_forward_pass_are_kept_or_refused(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(written_in_forward, **way)


def arrays(**options: Any) -> None:
    model = Net()
    run, _, _ = made(model, **options)
    for array in (model.head.weight.data.numpy(), model.head.weight.detach().numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 9.0
    with pytest.raises(IndexError):
        model.head.weight.transpose(1, 2)
    for view in (lambda: model.head.weight.data[:2], lambda: model.head.weight.data.view(-1)):
        with pytest.raises(FreedParameterError, match="cut into tiles"):
            view()
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_arrays_are_read_only_and_views_of_all_tiles_are_refused(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(arrays, **way)


def rows_untiled(**options: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    run, plain, optimizer = made(model, lr=0.0, tiling=None, **options)
    for net in (model, plain):
        with torch.no_grad():
            net.head.weight[5].fill_(7.0)
            net.embed.weight[3:5].zero_()
    loss_of(model).backward()
    optimizer.step()
    for name in ("head.weight", "embed.weight"):
        assert torch.equal(stored(run, name), plain.get_parameter(name)), name
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_rows_of_whole_parameters_are_kept_too(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(rows_untiled, **way)


# -- backward ----------------------------------------------------------------------------------------------------------


def named_inputs(**options: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    run, plain, _ = made(model, **options)
    choices: list[Callable[[Net], list[nn.Parameter]]] = [
        lambda net: list(net.parameters()),
        lambda net: [net.embed.weight],
        lambda net: [net.head.weight],
        lambda net: [net.mid.weight],
    ]
    for number, chosen in enumerate(choices):
        loss_of(model).backward(inputs=chosen(model))
        loss_of(plain).backward(inputs=chosen(plain))
        for name, param in plain.named_parameters():
            found = run.grad(name)
            assert (found is None) == (param.grad is None), (number, name)
            assert found is None or torch.allclose(found, param.grad, rtol=1e-4, atol=1e-6), (number, name)
        model.zero_grad()
        plain.zero_grad()
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_backward_with_inputs(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(named_inputs, **way)


def accumulated(**options: Any) -> None:
    """In 16 bits, where rows that were looked up have another dtype than the sum."""
    found = []
    for tiling in (4096, None):
        torch.manual_seed(0)
        model = Net()
        run, _, _ = made(model, tiling=tiling, precision=sw.Precision(compute=torch.bfloat16), **options)
        with run.accumulating():
            loss_of(model).backward()
        loss_of(model).backward()
        found.append({name: run.grad(name) for name, _ in model.named_parameters()})
        run.close()
    for name, grad in found[0].items():
        assert grad is not None and torch.allclose(grad, found[1][name], rtol=0.05, atol=1e-3), name


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_accumulation_in_16_bits(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(accumulated, **way)


# -- flags, contexts, options of modules -------------------------------------------------------------------------------


def frozen_inside_gathered(**options: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    run, plain, _ = made(model, **options)
    for flag in (False, True):
        with run.gathered(model):
            model.head.weight.requires_grad_(flag)
        plain.head.weight.requires_grad_(flag)
        loss_of(model).backward()
        loss_of(plain).backward()
        same_gradients(run, plain)
        model.zero_grad()
        plain.zero_grad()
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_freezing_inside_gathered(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(frozen_inside_gathered, **way)


def replaced_inside_gathered(**options: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    run, plain, optimizer = made(model, **options)
    with pytest.raises(ModelError, match="was replaced by a tensor of shape"), run.gathered(model):
        model.embed.weight.data = torch.zeros(3)
    assert isinstance(model.embed.weight, TiledParameter) and isinstance(model.head.weight, TiledParameter)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss, expected = loss_of(model), loss_of(plain)
        assert torch.allclose(loss, expected, rtol=1e-5)
        loss.backward()
        expected.backward()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    run.close()


@pytest.mark.parametrize("way", WAYS[1:3], ids=str)
def test_a_wrong_assignment_inside_gathered_leaves_the_others_in_tiles(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(replaced_inside_gathered, **way)


def test_a_table_that_changes_its_own_rows_is_refused() -> None:
    model = Net(max_norm=1.0)
    run, _, _ = made(model, stage=3)
    with pytest.raises(ModelError, match=r"max_norm=1\.0"):
        loss_of(model)
    run.close()


class Loop(nn.Module):
    """Experts that are read one by one, as they are and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(8, 32, 32) / 6)
        self.out = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(8):
            chosen = self.experts[number]
            x = torch.tanh(F.linear(x, chosen) if number % 2 else x @ chosen.t())
        return self.out(x)


def looped(**options: Any) -> None:
    torch.manual_seed(0)
    model = Loop()
    run, plain, _ = made(model, **options)
    x = torch.randn(5, 32)
    with torch.no_grad():
        assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)
    run.ledger.reset_peak()
    output = model(x)
    held = run.ledger.now(Tier.HOST, Kind.BUFFER)
    output.square().sum().backward()
    plain(x).square().sum().backward()
    same_gradients(run, plain)
    if options["stage"] == 3 and "offload" not in options:
        peak = run.ledger.peak(Tier.HOST, Kind.BUFFER)
        assert held == 0 and peak <= min(run.predicted_memory().buffer, 3 * 4096), (held, peak)
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_loop_over_experts_has_one_tile_in_memory(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(looped, **way)


# -- the loss ----------------------------------------------------------------------------------------------------------


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 128)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return sw.linear_cross_entropy(hidden, self.head.weight, labels, bias=self.head.bias)


@pytest.mark.parametrize("masked", [slice(32, 33), slice(96, 128), slice(110, 128)], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_masked_classes(stage: int, masked: slice) -> None:
    torch.manual_seed(0)
    model = Fused()
    with torch.no_grad():
        model.head.bias[masked] = float("-inf")
    run, plain, _ = made(model, stage=stage)
    hidden, labels = torch.randn(9, 32), torch.randint(0, 32, (9,))
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    loss = model(inputs[0], labels)
    expected = F.cross_entropy(plain.head(inputs[1]), labels)
    assert torch.allclose(loss, expected, rtol=1e-5)
    loss.backward()
    expected.backward()
    same_gradients(run, plain)
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
    run.close()


def test_a_second_derivative_of_the_loss_raises() -> None:
    torch.manual_seed(0)
    model = Fused()
    run, _, _ = made(model, stage=3)
    hidden = torch.randn(9, 32, requires_grad=True)
    loss = model(hidden, torch.randint(0, 128, (9,)))
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(ModelError, match="differentiated twice"):
        (loss + grad.square().sum()).backward()
    run.close()
