"""Tensor parallelism: DTensor parameters are sharded over the data-parallel dimension, with the bits of the unsharded model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import shardwise as sw
from cases import OPTIMIZERS, sharded
from decoders import built, decoder, grid, loss_of, tokens
from shardwise.errors import ConfigError, FreedParameterError, ModelError, RanksDifferError
from shardwise.testing import ParityReport, RankPool, compare_with_plain

DISK = sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)
CELLS = [
    ("columns", {"stage": 0}),
    ("columns", {"stage": 1}),
    ("columns", {"stage": 2, "transport": "pairwise"}),
    ("columns", {"stage": 3}),
    ("columns", {"stage": 3, "transport": "copied"}),
    ("columns", {"stage": 3, "transport": "pairwise", "joins": "all"}),
    ("columns", {"stage": 3, "offload": DISK}),
    ("columns", {"stage": 1, "offload": sw.Offload(grads="disk", optimizer="disk")}),
    ("columns", {"stage": 3, "activations": "units"}),
    ("columns", {"stage": 3, "precision": sw.Precision(param=torch.bfloat16, compute=torch.float32)}),
    ("sequence", {"stage": 1}),
    ("sequence", {"stage": 3, "joins": "all"}),
    ("sequence", {"stage": 3, "transport": "pairwise", "activations": "units"}),
    ("classes", {"stage": 2}),
    ("classes", {"stage": 3, "transport": "pairwise", "offload": DISK}),
]


def trained(kind: str, tied: bool, options: dict[str, Any]) -> ParityReport:
    run, *both = built(grid(), kind, tied=tied, **options)
    with loss_parallel() if kind == "classes" else contextlib.nullcontext():
        report = compare_with_plain(run, *both, loss_of, steps=3, accumulate=2, max_norm=0.3)
    run.close()
    return report


@pytest.mark.parametrize(("kind", "options"), CELLS)
def test_the_bits_of_the_divided_model(pool4: RankPool, kind: str, options: dict[str, Any]) -> None:
    for tied in (False, True):
        for report in pool4.run(trained, kind, tied, options):
            assert report.is_bitwise, f"{kind}, tied {tied}, {options}: {report}"


def against_others(stage: int) -> None:
    """Tensor 2 x shard 2 against tensor 2 with the batches of both, and against one plain model."""
    mesh = grid()
    run, model, optimizer, alone, alone_optimizer = built(mesh, "sequence", "sgd", stage=stage)
    whole = decoder(None)
    whole_optimizer = OPTIMIZERS["sgd"](whole.parameters())
    for number in range(3):
        losses = [loss_of(model, number)]
        losses[0].backward()
        optimizer.step()
        both = torch.cat([tokens(number, 0), tokens(number, 1)])
        for other, its_optimizer in ((alone, alone_optimizer), (whole, whole_optimizer)):
            losses.append(F.cross_entropy(other(both[:, :-1]).flatten(0, 1), both[:, 1:].flatten()))
            losses[-1].backward()
            for param in other.parameters():
                if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
                    param.grad = param.grad.redistribute(placements=param.placements)
            its_optimizer.step()
        for each in (optimizer, alone_optimizer, whole_optimizer):
            each.zero_grad()
        mean = losses[0].detach().clone()
        dist.all_reduce(mean, group=mesh["shard"].get_group())
        for other_loss in losses[1:]:
            assert torch.allclose(mean / 2, other_loss.detach(), rtol=1e-5), (number, mean / 2, other_loss)
    found = run.full_state_dict(rank0_only=False)
    for (name, one), (_, two) in zip(alone.named_parameters(), whole.named_parameters(), strict=True):
        value = one.full_tensor() if isinstance(one, DTensor) else one
        for expected in (value, two):
            assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-6), (name, (found[name] - expected).abs().max())
    run.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_divisions_differ_by_rounding_only(pool4: RankPool, stage: int) -> None:
    pool4.run(against_others, stage)


# -- parameters --------------------------------------------------------------------------------------------------------


def seen(options: dict[str, Any]) -> None:
    run, model, optimizer, plain, _ = built(grid(), "sequence", **options)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(plain, 0)
    params = dict(model.named_parameters())
    for name, expected in plain.named_parameters():
        param = params[name]
        assert isinstance(param, nn.Parameter) and param.shape == expected.shape and param.dtype == expected.dtype, name
        if isinstance(expected, DTensor):
            assert isinstance(param, DTensor) and param.placements == expected.placements, name
            assert param.device_mesh == expected.device_mesh and param.stride() == expected.stride(), name
    state = run.full_state_dict(rank0_only=False)
    with run.gathered():
        for name, param in params.items():
            if isinstance(param, DTensor):
                assert torch.equal(param.full_tensor(), state[name]), name
                assert torch.equal(
                    distribute_tensor(state[name], param.device_mesh, param.placements).to_local(), param.to_local()
                )
            else:
                assert torch.equal(param, state[name]), name
    with run.gathered(), torch.no_grad():
        for param in params.values():
            param.mul_(0.5)
    for name, value in run.full_state_dict(rank0_only=False).items():
        assert torch.equal(value, 0.5 * state[name]), name
    assert run.selfcheck(loss_of, steps=2).is_bitwise
    assert "ShardedDTensor" in type(params["head.weight"]).__name__ or "Freed" in type(params["head.weight"]).__name__
    run.close()


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "transport": "pairwise"}])
def test_parameters_are_dtensors(pool4: RankPool, options: dict[str, Any]) -> None:
    pool4.run(seen, options)


def touched() -> None:
    run, model, optimizer, plain, _ = built(grid(), stage=3, transport="pairwise")
    weight, expected = model.head.weight, plain.head.weight
    assert torch.equal(weight.full_tensor(), expected.full_tensor())  # outside a pass: gather, run, free
    assert torch.equal((weight * 2.0).full_tensor(), (expected * 2.0).full_tensor())
    assert torch.equal(weight.to_local().clone(), expected.to_local())
    assert weight.redistribute(placements=[Replicate()]).placements == (Replicate(),)
    assert torch.zeros_like(weight).placements == weight.placements
    with torch.no_grad():
        weight.fill_(0.25)
    assert torch.equal(run.master("head.weight"), torch.full(weight.shape, 0.25))
    view = weight.detach()
    with pytest.raises(FreedParameterError, match=r"run\.gathered"):
        view + 1.0
    with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):  # as for every DTensor
        weight.numpy()
    assert "placements" in repr(weight)
    grads: list[torch.Tensor] = []
    weight.register_hook(lambda grad: grads.append(grad))  # type: ignore[arg-type, return-value]
    loss_of(model, 0).backward()
    assert len(grads) == 1 and isinstance(grads[0], DTensor)
    full = run.grad("head.weight")
    assert full is not None and full.shape == weight.shape
    with pytest.raises(FreedParameterError, match=r"run\.grad"):
        _ = weight.grad
    optimizer.step()
    run.close()


def test_touches_of_freed_dtensors(pool4: RankPool) -> None:
    pool4.run(touched)


def local_gradients() -> None:
    run, model, *_ = built(grid(4, 1), stage=0)
    loss_of(model, 0).backward()
    grad = model.head.weight.grad
    assert isinstance(grad, DTensor) and torch.equal(grad.full_tensor(), run.grad("head.weight"))  # type: ignore[arg-type]
    run.close()


def test_gradients_of_stage_0_are_dtensors(pool4: RankPool) -> None:
    pool4.run(local_gradients)


def overflowing(part: int) -> None:
    """A gradient that is infinite in one part of one model."""
    run, model, optimizer, *_ = built(grid(), stage=2, precision="fp16")
    before = run.full_state_dict(rank0_only=False)
    loss = loss_of(model, 0)
    if dist.get_rank() == part:
        model.head.weight.register_hook(lambda grad: grad * float("inf"))
    run.scaler.scale(loss).backward()
    run.scaler.step(optimizer)
    run.scaler.update()
    assert run.num_skipped_steps == 1
    after = run.full_state_dict(rank0_only=False)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    run.close()


def test_an_overflow_in_one_part_is_one_everywhere(pool4: RankPool) -> None:
    pool4.run(overflowing, 3)


def traffic(stage: int) -> tuple[dict[str, int], int, int]:
    run, model, optimizer, *_ = built(grid(), stage=stage, transport="pairwise")
    for number in range(2):
        run.transport.counters.reset()
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = dict(run.transport.counters.elements)
    own = sum(unit.layout.numel for unit in run._runtime.units)
    whole = sum(p.numel() for p in decoder(None).parameters())
    run.close()
    return sent, own, whole


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_sends_its_part_of_the_model(pool4: RankPool, stage: int) -> None:
    for sent, own, whole in pool4.run(traffic, stage):
        assert set(sent) == {"gather", "reduce"} and sum(sent.values()) == {1: 2, 2: 2, 3: 3}[stage] * own // 2
        assert own < 0.55 * whole, "norms and biases of row-wise layers are on both ranks, the rest is divided"


# -- checkpoints -------------------------------------------------------------------------------------------------------

GRIDS = {"2x2": (2, 2), "1x4": (1, 4), "4x1": (4, 1)}


def _run_on(where: str, seed: int, **options: Any) -> tuple[Any, Any, Any]:
    mesh = grid(*GRIDS[where]) if where in GRIDS else None
    model = decoder(mesh, "sequence", seed=seed)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return sharded(model, optimizer, mesh=mesh, **options), model, optimizer


def _whole_loss(model: nn.Module, number: int) -> torch.Tensor:
    """The same data on every rank, so that the division does not matter."""
    found = tokens(number, 0)
    return F.cross_entropy(model(found[:, :-1]).flatten(0, 1), found[:, 1:].flatten())


def _steps(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        loss = _whole_loss(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(path: str, where: str, options: dict[str, Any]) -> tuple[list[float], Any]:
    run, model, optimizer = _run_on(where, 0, **options)
    _steps(model, optimizer, 0, 2)
    run.save(path)
    states = run.full_optimizer_state_dict(), run.full_state_dict()
    losses = _steps(model, optimizer, 2, 7)
    run.close()
    return losses, states


def loaded(path: str, where: str, options: dict[str, Any]) -> tuple[list[float], Any]:
    run, model, optimizer = _run_on(where, 1, **options)
    _steps(model, optimizer, 9, 10)
    run.load(path)
    states = run.full_optimizer_state_dict(), run.full_state_dict()
    losses = _steps(model, optimizer, 2, 7)
    run.close()
    return losses, states


def assert_equal(one: Any, two: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_equal(a, b)
    else:
        assert one == two


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("2x2", "2x2"),
        ("2x2", "plain 4"),
        ("plain 4", "2x2"),
        ("2x2", "1x4"),
        ("1x4", "2x2"),
        ("plain 4", "1x4"),
        ("1x4", "plain 4"),
    ],
)
def test_checkpoints_do_not_depend_on_the_division(pool4: RankPool, tmp_path: Path, before: str, after: str) -> None:
    path = str(tmp_path / "saved")
    first = pool4.run(saved, path, before, {"stage": 3, "offload": DISK} if after == "1x4" else {"stage": 1})
    second = pool4.run(loaded, path, after, {"stage": 3})
    assert_equal(second[0][1], first[0][1])  # values and states are those that were saved, to the last bit
    for (mine, _), (theirs, _) in zip(first, second, strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), rtol=1e-3), "products are summed in another order"
        if before == after:
            assert mine == theirs


def exported(directory: str) -> None:
    run, model, optimizer = _run_on("2x2", 0, stage=3)
    _steps(model, optimizer, 0, 1)
    run.export(f"{directory}/exported")
    run.save(f"{directory}/saved")
    state = run.full_state_dict(rank0_only=False)
    run.close()
    for place in ("exported", "saved"):
        plain = decoder(None, seed=5)
        assert sw.load_pretrained(plain, f"{directory}/{place}") == ()
        for name, value in plain.state_dict().items():
            assert torch.equal(value, state[name]), (place, name)
        again, divided, _ = _run_on("1x4", 7, stage=3)
        sw.load_pretrained(divided, f"{directory}/{place}")
        for name, value in again.full_state_dict(rank0_only=False).items():
            assert torch.equal(value, state[name]), (place, name)
        again.close()


def test_weights_for_and_from_others(pool4: RankPool, tmp_path: Path) -> None:
    from shardwise.checkpoint import diff, export_checkpoint, verify

    pool4.run(exported, str(tmp_path))
    assert verify(tmp_path / "saved") == []
    export_checkpoint(tmp_path / "saved", tmp_path / "offline")
    one, two = (decoder(None, seed=seed) for seed in (8, 9))
    sw.load_pretrained(one, tmp_path / "exported")
    sw.load_pretrained(two, tmp_path / "offline")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not diff(tmp_path / "saved", tmp_path / "saved")


def moved_in() -> None:
    """An optimizer that has stepped on DTensors, whose states are DTensors."""
    mesh = grid()
    model, plain = decoder(mesh), decoder(mesh)
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain)]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        _steps(m, optimizer, 0, 2)
    run = sharded(model, optimizers[0], mesh=mesh, stage=3)
    assert _steps(model, optimizers[0], 2, 4) == _steps(plain, optimizers[1], 2, 4)
    run.close()


def test_an_optimizer_that_has_stepped_moves_in(pool4: RankPool) -> None:
    pool4.run(moved_in)


# -- activations -------------------------------------------------------------------------------------------------------


def parts_of_activations(offload: str, directory: str) -> tuple[ParityReport, int]:
    path = directory if offload == "disk" else None
    activations = sw.Activations(checkpoint="units", partition=True, offload=offload, path=path)
    run, *both = built(grid(), stage=3, activations=activations)
    report = compare_with_plain(run, *both, loss_of, steps=2)
    kept = run._keeping.sizes.stretches
    run.close()
    return report, sum(size.kept_bytes for size in kept)


@pytest.mark.parametrize("offload", ["device", "host", "disk"])
def test_checkpoints_are_parted_over_the_tensor_dimension(pool4: RankPool, tmp_path: Path, offload: str) -> None:
    for report, _ in pool4.run(parts_of_activations, offload, str(tmp_path)):
        assert report.is_bitwise, report


# -- bad input ---------------------------------------------------------------------------------------------------------


def refused() -> None:
    mesh = grid()
    with pytest.raises(ModelError, match="must be divided over the 'tensor' dimension"):
        sw.shard(decoder(mesh), stage=3, mesh=mesh["shard"])
    with pytest.raises(ModelError, match="must be divided over the 'tensor' dimension"):
        sw.shard(decoder(mesh), stage=3)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))
    with pytest.raises(ModelError, match="must be divided over the 'tensor' dimension"):
        sw.shard(decoder(mesh), stage=3, mesh=other)
    partial = nn.Linear(4, 4, bias=False)
    partial.weight = nn.Parameter(DTensor.from_local(partial.weight.detach(), mesh["tensor"], [Partial()]))
    with pytest.raises(ModelError, match="only Shard and Replicate"):
        sw.shard(partial, stage=3, mesh=mesh)
    with pytest.raises(ModelError, match="divided by tensor parallelism, which tiles cannot be made of"):
        sw.shard(decoder(mesh), stage=3, mesh=mesh, tiling=4096)
    with pytest.raises(ConfigError, match=r"partition=True.*'tensor'"):
        sw.shard(nn.Linear(4, 4), stage=3, activations=sw.Activations(partition=True))
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RanksDifferError, match="differ in the values"):
        sw.shard(nn.Linear(4, 4), stage=3, mesh=mesh)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    if dist.get_rank() % 2:
        parallelize_module(model, mesh["tensor"], {})
        model[0].weight = nn.Parameter(DTensor.from_local(model[0].weight.detach(), mesh["tensor"], [Shard(0)], run_check=False))
        with pytest.raises(RanksDifferError, match="differ in the"):
            sw.shard(model, stage=3, mesh=mesh)
    else:
        with pytest.raises(RanksDifferError, match="differ in the"):
            sw.shard(model, stage=3, mesh=mesh)
    uneven = nn.Linear(7, 5)
    parallelize_module(uneven, mesh["tensor"], ColwiseParallel())
    run = sw.shard(uneven, torch.optim.SGD(uneven.parameters(), lr=0.1), stage=3, mesh=mesh)
    assert run.full_state_dict(rank0_only=False)["weight"].shape == (5, 7)
    run.close()


def test_what_cannot_be_sharded_is_refused(pool4: RankPool) -> None:
    pool4.run(refused)
