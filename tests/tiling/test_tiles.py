"""Parameters that are cut into tiles train as whole ones do.

The reference is plain training whose operations are cut in the same places (`Cut`), so that every sum has the same order: equal
to the last bit. Against whole operations, where sums are cut, it is within tolerance (`docs/numerics.md`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from cases import generator, rank, sharded
from shardwise.partition.layout import cut_rows
from shardwise.testing import ParityReport, RankPool, compare_with_plain
from shardwise.tiers import Kind, Tier

WIDTH, VOCABULARY, MAX_BYTES = 32, 80, 4096


class Cut(TorchFunctionMode):
    """Plain training with operations on large parameters cut as tiles are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "linear" and is_large(args[1]):
            weight, bias = args[1], args[2] if len(args) > 2 else kwargs.get("bias")
            biases = bias.split(lengths(weight)) if bias is not None else [None] * len(lengths(weight))
            return torch.cat([F.linear(args[0], w, b) for w, b in zip(weight.split(lengths(weight)), biases, strict=True)], -1)
        if name == "addmm" and is_large(args[2]):
            total, weight = args[0], args[2]
            for x, w in zip(args[1].split(lengths(weight), -1), weight.split(lengths(weight)), strict=True):
                total = torch.addmm(total, x, w)
            return total
        if name in ("matmul", "__matmul__") and is_large(args[1]) and args[1].dim() == 2:
            flat, weight = args[0].reshape(-1, args[0].shape[-1]), args[1]
            parts = list(zip(flat.split(lengths(weight), -1), weight.split(lengths(weight)), strict=True))
            total = torch.mm(*parts[0])
            for x, w in parts[1:]:
                total = torch.addmm(total, x, w)
            return total.reshape(*args[0].shape[:-1], weight.shape[1])
        if name in ("matmul", "__matmul__") and is_large(args[0]):
            return torch.cat([w @ args[1] for w in args[0].split(lengths(args[0]))])
        if name == "bmm" and is_large(args[1]):
            pairs = zip(args[0].split(lengths(args[1])), args[1].split(lengths(args[1])), strict=True)
            return torch.cat([torch.bmm(x, w) for x, w in pairs])
        return func(*args, **kwargs)


def is_large(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.dim() > 1 and value.numel() * value.element_size() > MAX_BYTES


def lengths(weight: torch.Tensor) -> list[int]:
    row_bytes = weight.numel() * weight.element_size() // weight.shape[0]
    return [high - low for low, high in cut_rows(weight.shape[0], row_bytes, MAX_BYTES)]


class Conv1D(nn.Module):
    """A linear layer as transformers' GPT-2 has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 6), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Experts(nn.Module):
    """Stacked weights, read one by one and all at once."""

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, WIDTH, WIDTH) / 6)
        self.down = nn.Parameter(torch.randn(num, WIDTH, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        chosen = [0, 3, -2]  # one expert is used by no rank, and must get zeros
        every = torch.stack([F.linear(flat, self.up[number]) for number in chosen])
        stacked = torch.bmm(every[[0, 1, 2, 0]], self.down)
        return stacked.sum(0).view_as(x)


class Products(nn.Module):
    """The weight on the right, transposed, and on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 6)
        self.left = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = (self.left @ x.reshape(-1, WIDTH).t()).t().reshape(*x.shape[:-1], 2 * WIDTH)
        return torch.tanh(high) @ self.right


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(3 * WIDTH, WIDTH)),
    "conv1d": lambda: nn.Sequential(Conv1D(3 * WIDTH, WIDTH), nn.GELU(), Conv1D(WIDTH, 3 * WIDTH)),
    "products": Products,
    "experts": Experts,
}


class Model(nn.Module):
    def __init__(self, part: str = "linear", *, is_tied: bool = False, checkpoints: str = "", is_frozen: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.is_cut = False
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(PARTS[part]() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embed.weight
        if is_frozen:
            self.blocks.requires_grad_(False)

    def cut(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with Cut() if self.is_cut else contextlib.nullcontext():
            return module(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpoints:
                x = x + checkpoint(self.cut, block, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = x + self.cut(block, x)
        return self.cut(self.head, x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{part: lambda part=part: Model(part) for part in PARTS},
    "tied": lambda: Model(is_tied=True),
    "frozen": lambda: Model(is_frozen=True),
    "reentrant": lambda: Model(checkpoints="reentrant"),
    "checkpointed": lambda: Model("conv1d", checkpoints="other"),
}


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2 + rank(), 7), generator=generator(number))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def pair(name: str, optimizer: Any = adamw, is_cut: bool = True, **options: Any) -> tuple[Any, ...]:
    """(run, tiled model, its optimizer, plain model, its optimizer)."""
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    optimizers = [optimizer([p for p in m.parameters() if p.requires_grad]) for m in (model, plain)]
    run = sharded(model, optimizers[0], tiling=sw.Tiling(max_bytes=MAX_BYTES), **options)
    plain.is_cut = is_cut
    return run, model, optimizers[0], plain, optimizers[1]


def trained(name: str, more: dict[str, Any], **options: Any) -> tuple[ParityReport, dict[Any, int], list[str]]:
    run, model, optimizer, plain, plain_optimizer = pair(name, **options)
    names, kinds = [*model.state_dict()], [*map(type, model.modules())]
    assert names == [*plain.state_dict()] and kinds == [*map(type, plain.modules())]
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in plain.parameters()]
    report = compare_with_plain(run, model, optimizer, plain, plain_optimizer, loss_of, steps=3, **more)
    wholes, units = run._runtime.tiles.gathered_whole, run.units
    run.close()
    return report, wholes, units


WAYS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "transport": "copied"},
    {"stage": 3, "transport": "pairwise"},
    {"stage": 3, "offload": "disk"},
    {"stage": 3, "offload": "disk", "activations": sw.Activations(checkpoint="units", offload="disk")},
    {"stage": 3, "transport": "copied", "activations": sw.Activations(checkpoint=2, offload="host")},
    {"stage": 2, "offload": sw.Offload(grads="disk", optimizer="disk")},
]
MORE: list[dict[str, Any]] = [{}, {"accumulate": 2, "max_norm": 0.5}, {"accumulate": 2, "sums_locally": True}]
CELLS = [
    pytest.param(name, number, marks=[] if name in ("linear", "tied") or number in (4, 6) else pytest.mark.slow)
    for name in MODELS
    for number in range(len(WAYS))
]


@pytest.mark.parametrize(("name", "number"), CELLS)
def test_tiles_train_as_the_whole_does(pool: RankPool, name: str, number: int) -> None:
    more = MORE[(number + len(name)) % 3]
    for report, wholes, units in pool.run(trained, name, more, **WAYS[number]):
        assert sum("[" in unit for unit in units) >= 4, units
        assert not wholes, wholes
        if name == "tied":  # parts of a tied table's gradient are reduced one by one: another order of summation
            assert report.compared_elements and report.largest < 2e-4, f"{name}, {WAYS[number]}, {more}: {report}"
        else:
            assert report.is_bitwise, f"{name}, {WAYS[number]}, {more}: {report}"


def beside_whole(name: str) -> ParityReport:
    run, *both = pair(name, sgd, is_cut=False, stage=3, transport="copied")
    report = compare_with_plain(run, *both, loss_of, steps=3, accumulate=2)
    run.close()
    return report


@pytest.mark.parametrize("name", MODELS)
def test_tiles_agree_with_whole_operations(pool: RankPool, name: str) -> None:
    """docs/numerics.md, row of tiles; SGD, because Adam divides by gradients that may be all rounding."""
    for report in pool.run(beside_whole, name):
        assert report.compared_elements and report.largest < 1e-5, f"{name}: {report}"


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_tiles_on_four_ranks(pool4: RankPool, stage: int) -> None:
    for name in ("linear", "tied"):
        for report, _, _ in pool4.run(trained, name, MORE[1], stage=stage, offload="disk" if stage == 3 else None):
            assert report.compared_elements and report.largest < 2e-4, f"{name}: {report}"


def test_a_tied_table_of_one_rank_has_the_bits_of_plain_training() -> None:
    for options in ({"stage": 3}, {"stage": 3, "offload": "disk"}, {"stage": 1}):
        report, _, _ = trained("tied", {}, **options)
        assert report.is_bitwise, f"{options}: {report}"


def peaks(max_bytes: int | None, **options: Any) -> dict[str, int]:
    """The ledger's peaks in the second step of a model with one large layer, and what was predicted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 8192, bias=False), nn.Tanh(), nn.Linear(8192, 1024, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tiling = None if max_bytes is None else sw.Tiling(max_bytes=max_bytes)
    run = sharded(model, optimizer, stage=3, tiling=tiling, prefetch_bytes=0, exchange_bytes=4 << 20, **options)
    for _ in range(2):
        run.ledger.reset_peak()
        model(torch.randn(3, 1024, requires_grad=True)).square().mean().backward()
        found = {kind.value: run.ledger.peak(Tier.HOST, kind) for kind in (Kind.BUFFER, Kind.GRAD)}
        optimizer.step()
        optimizer.zero_grad()
    plan = run.predicted_memory()
    found |= {"predicted buffer": plan.buffer, "predicted grad": plan.grad}
    assert found["buffer"] + run.transport.exchange_bytes <= plan.buffer
    run.close()
    gc.collect()
    return found


def test_memory_falls_in_proportion_to_the_tiles(pool: RankPool) -> None:
    whole_bytes = 1024 * 8192 * 4
    for options in ({"transport": "copied"}, {"transport": "pairwise"}):
        answers = {factor: pool.run(peaks, None if factor == 1 else whole_bytes // factor, **options) for factor in (1, 4, 16)}
        for rank_number in range(2):
            by_factor = {factor: answer[rank_number] for factor, answer in answers.items()}
            one = by_factor[1]
            for factor in (4, 16):
                found = by_factor[factor]
                assert found["buffer"] <= 1.05 * whole_bytes / factor, (options, by_factor)
                shards = 2 * whole_bytes // 2  # reduced gradients of both layers, of which each rank has a half
                # Two reductions on their way and one tile arriving, beside the reduced shards.
                assert found["grad"] - shards <= 3.1 * whole_bytes / factor, (options, by_factor)
                assert found["grad"] < one["grad"] and found["grad"] <= found["predicted grad"], (options, by_factor)


def budgeted(max_bytes: int, directory: str) -> tuple[int, int]:
    """Train a layer whose weight alone is larger than the budget, from disk. Returns the ledger's peak and the weight's size."""
    torch.manual_seed(0)
    with sw.sharded_init(offload=sw.Offload(params="disk", path=directory)):
        model = nn.Sequential(nn.Linear(512, 16384, bias=False), nn.ReLU(), nn.Linear(16384, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    weight_bytes = 512 * 16384 * 4
    offload = sw.Offload(
        params="disk", grads="disk", optimizer="disk", path=directory, host_bytes=weight_bytes // 2, step_bytes=1 << 16
    )
    run = sharded(
        model,
        optimizer,
        stage=3,
        offload=offload,
        tiling=sw.Tiling(max_bytes=max_bytes),
        exchange_bytes=1 << 18,
        prefetch_bytes=0,
    )
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    peak = run.ledger.peak(Tier.HOST)
    run.close()
    return peak, weight_bytes


def test_a_weight_larger_than_the_budget_trains_from_disk(pool: RankPool, tmp_path: Any) -> None:
    for peak, weight_bytes in pool.run(budgeted, 1 << 18, str(tmp_path)):
        assert peak <= weight_bytes // 2
