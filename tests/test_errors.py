"""Bad input gets a clear error that says what was found and what to do, and nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from cases import CASES, build, generator
from shardwise.errors import (
    ConfigError,
    ModelError,
    NonFiniteGradientError,
    OptimizerError,
    RanksDifferError,
)
from shardwise.testing import RankPool


def model() -> nn.Module:
    torch.manual_seed(0)
    return CASES["mlp"].build()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": 4}, r"stage=4 is not a ZeRO stage"),
        ({"stage": -1}, r"stage=-1"),
        ({"stage": "3"}, r"stage='3'"),
        ({"stage": True}, r"stage=True"),
        ({}, r"needs stage"),
        ({"stge": 3}, r"no option 'stge' \(did you mean 'stage'\?\)"),
        ({"stage": 3, "precison": "bf16"}, r"did you mean 'precision'\?"),
        ({"stage": 3, "precision": "bf61"}, r"did you mean 'bf16'\?"),
        ({"stage": 3, "precision": sw.Precision}, r"is not known"),
        ({"stage": 3, "transport": "shred"}, r"did you mean 'shared'\?"),
        ({"stage": 3, "units": "Block"}, r"units='Block' must be"),
        ({"stage": 3, "units": ()}, r"units=\(\) must be"),
        ({"stage": 3, "units": nn.LSTM}, r"matches no module"),
        ({"stage": 3, "max_unit_bytes": 0}, r"max_unit_bytes=0"),
        ({"stage": 3, "min_unit_bytes": -1}, r"min_unit_bytes=-1"),
        ({"stage": 3, "exchange_bytes": 1.5}, r"exchange_bytes=1.5"),
        ({"stage": 3, "timeout_s": 0}, r"timeout_s=0"),
        ({"stage": 3, "methods": "encode"}, r"no method 'encode'"),
    ],
)
def test_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        sw.shard(model(), **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sw.Precision(param=torch.int8), "param=torch.int8"),
        (lambda: sw.Precision(master=torch.bfloat16), "masters are kept"),
        (lambda: sw.LossScale(growth=0.5), "growth must exceed 1"),
        (lambda: sw.LossScale(interval=0), "interval=0"),
        (lambda: sw.LossScale(initial=-1.0), "must be positive"),
    ],
)
def test_precision_options(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


class Lamb(torch.optim.Optimizer):
    """Scales by the norm of the whole parameter: not element-wise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])


class TrustRatio(Lamb):
    """The same under a name that gives no hint."""


@pytest.mark.parametrize(
    ("build_optimizer", "text"),
    [
        (lambda m: torch.optim.AdamW(model().parameters()), "built on other parameters: group 0, parameter 0"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS cannot be sharded: it keeps a history"),
        (lambda m: torch.optim.Adafactor(m.parameters()), "row and column statistics"),
        (lambda m: Lamb(m.parameters()), "norm of each whole parameter"),
        (lambda m: TrustRatio(m.parameters()), "differed from one that updates all"),
        (lambda m: "adam", "is a str"),
    ],
)
def test_optimizers_that_do_not_fit(build_optimizer: Callable[[nn.Module], Any], text: str) -> None:
    m = model()
    before = [p.clone() for p in m.parameters()]
    with pytest.raises(OptimizerError, match=text):
        sw.shard(m, build_optimizer(m), stage=2)
    assert all(type(p) is nn.Parameter for p in m.parameters()), "a refused model must stay as it was"
    assert all(torch.equal(a, b) for a, b in zip(before, m.parameters(), strict=True))


def test_a_model_sharded_twice() -> None:
    m = model()
    sw.shard(m, stage=3)
    with pytest.raises(ModelError, match="sharded already"):
        sw.shard(m, stage=3)
    with pytest.raises(ModelError, match="belongs to a model that is sharded already"):
        sw.shard(nn.Sequential(m), stage=3)


def test_models_that_cannot_be_sharded() -> None:
    with torch.device("meta"):
        on_meta = CASES["mlp"].build()
    with pytest.raises(ModelError, match=r"on the meta device.*sharded_init"):
        sw.shard(on_meta, stage=3)
    whole = model()
    whole.counts = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ModelError, match=r"'counts' has dtype torch.int64"):
        sw.shard(whole, stage=3)
    with pytest.raises(ModelError, match="no parameters"):
        sw.shard(nn.ReLU(), stage=3)
    with pytest.raises(ModelError, match=r"a torch.nn.Module is needed"):
        sw.shard("model", stage=3)  # type: ignore[arg-type]


def differing(kind: str) -> str:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    m = CASES["mlp"].build()
    stage = 3
    if kind == "values" and rank == 1:
        with torch.no_grad():
            m.layers[2].weight[1, 1] += 1e-6
    if kind == "shape" and rank == 1:
        m.layers[1] = nn.Linear(37, 6)
    if kind == "name" and rank == 1:
        m.extra = nn.Parameter(torch.zeros(1))
    if kind == "requires_grad" and rank == 1:
        m.gain.requires_grad_(False)
    if kind == "stage" and rank == 1:
        stage = 2
    buffers = "local" if kind == "buffers" and rank == 1 else "broadcast"
    try:
        sw.shard(m, stage=stage, buffers=buffers)
    except RanksDifferError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("values", ("rank 1", "values", "'layers.2.weight'", "seed")),
        ("shape", ("rank 1", "shape", "'layers.1.weight'")),
        ("name", ("rank 1", "extra")),
        ("requires_grad", ("requires_grad", "'gain'")),
        ("stage", ("rank 1", "rank 0")),
        ("buffers", ("rank 1", "'local'", "'broadcast'")),
    ],
)
def test_ranks_whose_models_differ(pool: RankPool, kind: str, texts: tuple[str, ...]) -> None:
    for answer in pool.run(differing, kind):
        for text in texts:
            assert text in answer, answer


def refused_transport() -> str:
    try:
        sw.shard(model(), stage=3, transport="nccl")
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_transport_that_cannot_work_is_refused(pool: RankPool) -> None:
    for answer in pool.run(refused_transport):
        assert "needs an NCCL process group; this one is gloo" in answer


def nan_gradients(stage: int) -> tuple[str, bool, bool]:
    run, m, opt, _, _ = build("gpt", "adamw", stage=stage)
    CASES["gpt"].loss(m, 0).backward()
    opt.step()
    opt.zero_grad()
    before = {name: run.master(name) for name in ("wte.weight", "blocks.0.up.weight")}
    loss = CASES["gpt"].loss(m, 1)
    (loss * float("nan") if torch.distributed.get_rank() == 1 else loss).backward()
    grad = run.grad("blocks.0.up.weight")
    try:
        run.clip_grad_norm_(1.0)
        text = "clipped"
    except NonFiniteGradientError as error:
        text = str(error)
    kept = run.grad("blocks.0.up.weight")
    assert grad is not None and kept is not None
    same_grad = torch.equal(grad.isnan(), kept.isnan())
    opt.zero_grad()
    same = all(torch.equal(run.master(name), value) for name, value in before.items())
    CASES["gpt"].loss(m, 2).backward()
    run.clip_grad_norm_(1.0)
    opt.step()
    run.close()
    return text, same, same_grad


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_nan_gradients_with_clipping_raise_and_lose_nothing(pool: RankPool, stage: int) -> None:
    for text, same, same_grad in pool.run(nan_gradients, stage):
        assert "the gradient norm is nan at step 1" in text and "wte.weight" in text and "zero_grad" in text
        assert same and same_grad


def stale_graph(stage: int, transport: str) -> str:
    run, m, opt, _, _ = build("gpt", "adamw", stage=stage, transport=transport)
    old = CASES["gpt"].loss(m, 0)
    CASES["gpt"].loss(m, 1).backward()
    opt.step()
    opt.zero_grad()
    try:
        old.backward()
        text = "accepted"
    except RuntimeError as error:  # where parameters can be read in backward autograd itself notices
        text = f"{type(error).__name__}: {error}"
    opt.zero_grad()
    CASES["gpt"].loss(m, 2).backward()
    opt.step()
    run.close()
    return text


@pytest.mark.parametrize(
    ("stage", "transport"), [(0, "auto"), (1, "auto"), (2, "auto"), (3, "shared"), (3, "copied"), (3, "pairwise")]
)
def test_backward_after_the_parameters_changed(pool: RankPool, stage: int, transport: str) -> None:
    for text in pool.run(stale_graph, stage, transport):
        if stage == 3 and transport != "shared":
            assert "StaleGraphError" in text and "have changed since" in text and "Run the forward pass again" in text
        else:
            assert "modified by an inplace operation" in text


def test_names_that_do_not_exist() -> None:
    run = sw.shard(model(), stage=3)
    with pytest.raises(ModelError, match=r"did you mean 'layers.2.weight'"):
        run.master("layers.2.weigth")
    with pytest.raises(ModelError, match="does not manage"), run.gathered(nn.Linear(2, 2)):
        pass


def test_a_step_inside_gathered_is_refused() -> None:
    m = model()
    optimizer = torch.optim.AdamW(m.parameters())
    run = sw.shard(m, optimizer, stage=3)
    m(torch.randn(2, 13, generator=generator(0))).backward()
    with pytest.raises(sw.ShardwiseError, match=r"inside run\.gathered"), run.gathered():
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_memory_replaced_after_sharding_is_taken_in_or_refused(stage: int) -> None:
    m = model()
    plain = copy.deepcopy(m)
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (m, plain)]
    run = sw.shard(m, optimizers[0], stage=stage)
    for module, optimizer in zip((m, plain), optimizers, strict=True):
        module(torch.randn(2, 13, generator=generator(0))).backward()
        module.layers[0].weight.data = module.layers[0].weight.data * 2
        optimizer.step()
    assert torch.equal(run.master("layers.0.weight"), plain.layers[0].weight)
    optimizers[0].zero_grad()
    m.half()
    with pytest.raises(ModelError, match=r"dtype torch\.float16.*Convert the model before"):
        optimizers[0].step()


def test_share_memory_after_sharding_is_refused() -> None:
    m = model()
    optimizer = torch.optim.AdamW(m.parameters())
    sw.shard(m, optimizer, stage=1)
    m.share_memory()
    m(torch.randn(2, 13, generator=generator(0))).backward()
    with pytest.raises(ModelError, match="share_memory"):
        optimizer.step()


def test_old_values_held_through_data_are_not_overwritten() -> None:
    m = model()
    optimizer = torch.optim.AdamW(m.parameters())
    sw.shard(m, optimizer, stage=1)
    backup = m.layers[0].weight.data
    before = backup.clone()
    m.layers[0].weight.data = torch.zeros_like(backup)
    m(torch.randn(2, 13, generator=generator(0))).backward()
    with pytest.raises(ModelError, match=r"still held through a `\.data`"):
        optimizer.step()
    assert torch.equal(backup, before)
    m.layers[0].weight.data = backup  # put back: as if nothing had happened
    optimizer.step()


def test_sparse_embeddings_and_bad_norms() -> None:
    with pytest.raises(ModelError, match="sparse=True"):
        sw.shard(nn.Sequential(nn.Embedding(3, 3, sparse=True)), stage=3)
    m = model()
    run = sw.shard(m, torch.optim.SGD(m.parameters(), lr=0.1), stage=3)
    m(torch.randn(2, 13, generator=generator(0))).backward()
    for bad in ((0.0, 2.0), (1.0, 0.0), (float("nan"), 2.0)):
        with pytest.raises(ConfigError, match="must be positive"):
            run.clip_grad_norm_(*bad)


def test_a_refused_method_leaves_everything_as_it_was() -> None:
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="no method 'encode'"):
        sw.shard(m, optimizer, stage=3, methods="encode")
    assert all(type(p) is nn.Parameter for p in m.parameters())
    assert optimizer.param_groups[0]["params"][0] is next(iter(m.parameters()))


def test_a_tiny_learning_rate_hides_nothing() -> None:
    m = model()
    optimizer = TrustRatio(m.parameters())
    optimizer.param_groups[0]["lr"] = 1e-9
    with pytest.raises(OptimizerError, match="differed"):
        sw.shard(m, optimizer, stage=2)
