"""Tensor x pipeline x sharding on eight ranks: the values of one model in one place, and checkpoints that others load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module

import shardwise as sw
from cases import OPTIMIZERS, sharded
from decoders import plan, tokens
from pipelines import LAYERS, MICRO, Whole, micro_loss, stage_of, whole_model
from shardwise.testing import RankPool


@pytest.fixture(scope="module")
def pool8() -> Iterator[RankPool]:
    with RankPool(8, timeout_s=240.0) as ranks:
        yield ranks


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipe", "shard", "tensor"))


def trained(stage: int, kind: str, directory: str, options: dict[str, Any]) -> None:
    mesh = grid()
    place, data_rank = mesh["pipe"].get_local_rank(), mesh["shard"].get_local_rank()
    module = stage_of(whole_model(), place, 2)
    names = {name for name, _ in module.named_modules()}
    parallelize_module(module, mesh["tensor"], {name: how for name, how in plan(kind, LAYERS).items() if name in names})
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    run = sharded(module, optimizer, stage=stage, mesh=mesh, **options)
    pipe = PipelineStage(module, place, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
    schedule = Schedule1F1B(pipe, MICRO, loss_fn=micro_loss)
    whole = Whole()
    whole.optimizer = OPTIMIZERS["sgd"](whole.model.parameters())
    for number in range(2):
        data = tokens(number, data_rank, batch=2 * MICRO)
        with run.accumulating():
            schedule.step(*([data[:, :-1]] if place == 0 else []), **({"target": data[:, 1:]} if place == 1 else {}))
        run.reduce()
        norm = run.clip_grad_norm_(0.3)
        _, expected = whole.step(number, 2)
        assert norm.item() == pytest.approx(expected, rel=1e-5), "every parameter is counted once"
        optimizer.step()
        optimizer.zero_grad()
    values = whole.model.state_dict()
    found = run.full_state_dict(rank0_only=False)
    assert found and found.keys() <= values.keys()
    for name, value in found.items():
        assert torch.allclose(value, values[name], rtol=1e-4, atol=1e-6), (name, (value - values[name]).abs().max())
    run.save(f"{directory}/saved")
    run.export(f"{directory}/exported")
    run.load(f"{directory}/saved")
    for name, value in run.full_state_dict(rank0_only=False).items():
        assert torch.equal(value, found[name]), name
    run.close()
    for where in ("saved", "exported"):  # on every rank, without a run
        plain = whole_model(5)
        assert sw.load_pretrained(plain, f"{directory}/{where}") == ()
        for name, value in found.items():
            assert torch.equal(plain.state_dict()[name], value), (where, name)
    assert dist.get_world_size() == 8


@pytest.mark.parametrize(
    ("stage", "kind", "options"),
    [
        (1, "columns", {}),
        pytest.param(3, "columns", {"transport": "pairwise"}, marks=pytest.mark.slow),
        pytest.param(2, "columns", {"offload": sw.Offload(grads="disk", optimizer="disk")}, marks=pytest.mark.slow),
    ],
)
def test_eight_ranks(pool8: RankPool, tmp_path: Path, stage: int, kind: str, options: dict[str, Any]) -> None:
    pool8.run(trained, stage, kind, str(tmp_path), options)
