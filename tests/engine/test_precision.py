"""Dtypes of storage, compute, reduction and masters; dynamic loss scaling."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from cases import CASES, build, sharded
from shardwise.config import LossScale
from shardwise.engine import emulates_16_bit, precision, resolve_dtypes
from shardwise.optim import GradScaler
from shardwise.testing import RankPool

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU = torch.device("cpu")


def test_dtypes_are_resolved_apart() -> None:
    preset = sw.config.Precision.of("bf16")
    emulated = resolve_dtypes(FP32, preset, emulates=True)
    assert (emulated.stored, emulated.compute, emulated.reduce, emulated.master) == (BF16, FP32, FP32, FP32)
    native = resolve_dtypes(FP32, preset, emulates=False)
    assert (native.stored, native.compute) == (BF16, BF16)
    chosen = resolve_dtypes(FP32, sw.Precision(param=BF16, compute=BF16, reduce=BF16, master=FP64), emulates=True)
    assert (chosen.compute, chosen.reduce, chosen.master) == (BF16, BF16, FP64)
    own = resolve_dtypes(BF16, sw.Precision(), emulates=True)
    assert (own.stored, own.compute, own.master) == (BF16, BF16, FP32)
    double = resolve_dtypes(FP64, sw.Precision(), emulates=False)
    assert (double.stored, double.compute, double.reduce, double.master) == (FP64, FP64, FP64, FP64)
    assert not emulates_16_bit("cpu", FP32)


@pytest.mark.parametrize(
    ("flags", "emulated"),
    [
        ({"avx2", "fma"}, {BF16, FP16}),
        ({"avx512f", "avx512_bf16"}, {FP16}),
        ({"amx_bf16", "avx512_fp16"}, set()),
        ({"asimd", "bf16"}, {FP16}),
        ({"asimd", "asimdhp"}, {BF16}),
    ],
)
def test_which_dtypes_are_emulated_is_read_off_the_cpu(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], emulated: set[torch.dtype]
) -> None:
    monkeypatch.setattr(precision, "_cpu_flags", lambda: frozenset(flags))
    found = {dtype for dtype in (BF16, FP16) if precision.emulates_16_bit.__wrapped__("cpu", dtype)}
    assert found == emulated


def test_a_cpu_that_does_not_say_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_cpu_flags", frozenset)
    monkeypatch.setattr(precision, "_product_s", lambda dtype: {FP32: 1.0, BF16: 1.4, FP16: 1.6}[dtype])
    assert [precision.emulates_16_bit.__wrapped__("cpu", dtype) for dtype in (BF16, FP16)] == [False, True]


class _Gradients:
    """Stands in for a run's gradients."""

    is_finite = True
    skipped = 0

    def scaled(self) -> None:
        pass

    def unscale(self, factor: float) -> bool:
        return self.is_finite

    def skip_step(self) -> None:
        self.skipped += 1


def test_the_scaler_grows_backs_off_and_stops_at_its_minimum() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    gradients = _Gradients()
    scaler = GradScaler(LossScale(initial=8.0, interval=2, minimum=2.0), gradients, optimizer, "cpu")
    assert isinstance(scaler, torch.amp.GradScaler)

    def steps(*finite: bool) -> float:
        for gradients.is_finite in finite:
            scaler.scale(torch.ones(1, requires_grad=True).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    assert steps(True, True) == 16.0
    assert steps(True, False) == 8.0 and gradients.skipped == 1
    assert steps(*[False] * 9) == 2.0 and gradients.skipped == 10
    kept = scaler.state_dict()
    again = GradScaler(LossScale(), gradients, optimizer, "cpu")
    again.load_state_dict(kept)
    assert again.get_scale() == 2.0


def scaling(stage: int, transport: str) -> dict[str, bool]:
    precision = sw.Precision(param=FP16, loss_scale=LossScale(initial=1024.0, interval=3))
    run, model, opt, _, _ = build("gpt", "adamw", stage=stage, precision=precision, transport=transport)
    scaler = run.scaler
    checks = {"starts": run.loss_scale == 1024.0}
    loss = CASES["gpt"].loss(model, 0)
    scaler.scale(loss).backward()
    checks["the loss itself is not scaled"] = float(loss) < 100
    scaled = run.grad("blocks.0.up.weight")
    scaler.unscale_(opt)
    unscaled = run.grad("blocks.0.up.weight")
    checks["gradients are unscaled"] = scaled is not None and torch.equal(unscaled, scaled / 1024.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    before = {n: run.master(n) for n in ("wte.weight", "blocks.1.down.weight")}
    state = {id(p): float(s["step"]) for p, s in opt.state.items()}
    loss = CASES["gpt"].loss(model, 1)
    scaler.scale(loss * float("inf") if torch.distributed.get_rank() == 0 else loss).backward()
    scaler.unscale_(opt)
    norm = run.clip_grad_norm_(1.0)
    checks["clipping does not raise"] = not bool(torch.isfinite(norm))
    scaler.step(opt)  # skipped on every rank, though only one overflowed
    scaler.update()
    opt.zero_grad()
    checks["skipped"] = run.num_skipped_steps == 1 and run.loss_scale == 512.0
    checks["parameters kept"] = all(torch.equal(run.master(n), v) for n, v in before.items())
    checks["moments kept"] = all(state[id(p)] == float(s["step"]) for p, s in opt.state.items())
    for number in range(3):
        scaler.scale(CASES["gpt"].loss(model, 2 + number)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    checks["grows again"] = run.loss_scale == 1024.0
    checks["moved on"] = not torch.equal(run.master("wte.weight"), before["wte.weight"])
    checks["reported"] = "1 steps skipped" in run.report()
    run.close()
    return checks


def stock_scaler(stage: int, transport: str) -> str:
    run, model, opt, _, _ = build("gpt", "adamw", stage=stage, transport=transport)
    scaler = torch.amp.GradScaler("cpu")
    loss = CASES["gpt"].loss(model, 0)
    scaler.scale(loss * float("inf") if torch.distributed.get_rank() == 0 else loss).backward()
    try:
        scaler.step(opt)
        answer = "stepped"
    except sw.errors.OptimizerError as error:
        answer = str(error)
    run.close()
    return answer


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
def test_torchs_own_scaler_is_refused_at_its_first_step_on_every_rank(pool: RankPool, transport: str) -> None:
    for stage in (0, 2, 3):
        for answer in pool.run(stock_scaler, stage, transport):
            assert "run.scaler" in answer


def test_torchs_own_scaler_works_on_a_rank_alone() -> None:
    torch.manual_seed(0)
    run, model, opt, plain, plain_opt = build("mlp", "adamw", stage=3)
    for module, optimizer in ((model, opt), (plain, plain_opt)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for number, factor in enumerate((1.0, float("inf"), 1.0)):
            scaler.scale(CASES["mlp"].loss(module, number) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for name, param in plain.named_parameters():
        assert torch.equal(run.master(name), param)


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_on_one_rank_skips_the_step_on_all(pool: RankPool, stage: int, transport: str) -> None:
    for checks in pool.run(scaling, stage, transport):
        assert all(checks.values()), checks


def test_masters_come_from_the_original_values() -> None:
    torch.manual_seed(0)
    model = CASES["mlp"].build()
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = sharded(model, torch.optim.AdamW(model.parameters()), stage=3, precision="bf16")
    for name, value in expected.items():
        assert torch.equal(run.master(name), value)
    assert not torch.equal(expected["layers.1.weight"], expected["layers.1.weight"].bfloat16().float())


def test_compute_in_sixteen_bits_when_asked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run = sharded(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        stage=3,
        precision=sw.Precision(param=BF16, compute=BF16),
    )
    out = model(torch.randn(2, 4))
    assert out.dtype == BF16
    out.float().sum().backward()
    grad = run.grad("0.weight")
    assert grad is not None and grad.dtype == FP32
    assert "emulates" not in run.report()


def test_the_report_says_when_sixteen_bits_are_emulated() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run = sharded(model, stage=3, precision="bf16")
    if emulates_16_bit("cpu", BF16):
        assert "this CPU emulates bfloat16 products, so compute runs in float32" in run.report()
    else:
        assert "compute bfloat16" in run.report()


def test_a_sixteen_bit_model_keeps_its_own_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=2)
    model(torch.randn(2, 4).bfloat16()).float().sum().backward()
    optimizer.step()
    assert run.master("0.weight").dtype == FP32
    assert run.full_state_dict()["0.weight"].dtype == BF16


def test_double_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=3)
    model(torch.randn(2, 4).double()).sum().backward()
    optimizer.step()
    assert run.master("0.weight").dtype == FP64


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    parts: list[torch.Tensor]


class Dataclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: torch.Tensor) -> Output:
        x = self.inner(x)
        return Output(x.square().mean(), [x.sum(), x.mean()])


class Hidden:
    """An output that torch cannot see into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


DOORS = ("forward", "forward method", "submodule", "method", "in place", "reentrant", "hidden", "penalty")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("door", DOORS)
def test_gradients_are_right_by_whatever_door_the_loss_comes(door: str, stage: int) -> None:
    torch.manual_seed(0)
    model = Dataclassed()
    x = torch.randn(3, 6)

    def loss() -> torch.Tensor:
        if door == "forward method":
            return model.forward(x).loss
        if door == "submodule":
            return model.blocks[1](model.blocks[0](x).detach()).square().mean()
        if door == "method":
            return model.inner(x).square().mean()
        if door == "in place":
            return model.blocks[1](x).mul_(2.0).sum()
        if door == "reentrant":
            return checkpoint(lambda t: model(t).loss, x.clone().requires_grad_(), use_reentrant=True)
        out = model(x)
        if door == "hidden":
            return Hidden(out.loss).value + out.parts[0]
        if door == "penalty":
            return out.loss + 0.5 * model.blocks[1].weight.square().sum()
        return out.loss + out.parts[0] + 2 * out.parts[1]

    loss().backward()
    expected = model.blocks[1].weight.grad
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = sw.Precision(param=FP32, loss_scale=LossScale(initial=65536.0))
    run = sharded(model, optimizer, stage=stage, precision=precision)
    run.scaler.scale(loss()).backward()
    run.scaler.unscale_(optimizer)
    assert torch.equal(run.grad("blocks.1.weight"), expected)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor, aux: list[torch.Tensor] | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if aux is not None:
            aux.append(x.mean())
        return x


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forgetting_the_scaler_is_refused(stage: int) -> None:
    model = Square()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=stage, precision="fp16")
    with pytest.raises(sw.errors.OptimizerError, match=r"run\.scaler\.scale\(loss\)\.backward"):
        model(torch.randn(2, 6)).sum().backward()
    run.scaler.scale(model(torch.randn(2, 6)).sum()).backward()
    with pytest.raises(sw.errors.OptimizerError, match=r"run\.scaler\.step\(optimizer\)"):
        optimizer.step()
    with pytest.raises(sw.errors.OptimizerError, match=r"run\.scaler\.unscale_\(optimizer\) first"):
        run.clip_grad_norm_(1.0)
    with pytest.raises(sw.errors.OptimizerError, match="would not be checked for overflow"):
        optimizer.step(lambda: model(torch.randn(2, 6)).sum())
    before = run.master("blocks.0.weight")
    run.scaler.step(optimizer)
    run.scaler.update()
    assert not torch.equal(run.master("blocks.0.weight"), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_containers_handed_to_forward_stay_the_callers(precision: str) -> None:
    model = Square()
    sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, precision=precision)
    aux: list[torch.Tensor] = []
    model(torch.randn(3, 6, requires_grad=True), aux)
    assert len(aux) == 1
