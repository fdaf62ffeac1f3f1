"""Compiled blocks and compiled models train as the same compiled plain model does, without recompiling again and again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn

from cases import CASES, sharded
from shardwise.testing import RankPool
from shardwise.testing.parity import PlainTrainer

WAYS = ("block.compile()", "torch.compile(block)", "model.compile()", "torch.compile(model)")


def _compiled(model: nn.Module, way: str, backend: str) -> nn.Module:
    blocks: Any = model.blocks
    if way == "block.compile()":
        for block in blocks:
            block.compile(backend=backend)
    elif way == "torch.compile(block)":
        for number in range(len(blocks)):
            blocks[number] = torch.compile(blocks[number], backend=backend)
    elif way == "model.compile()":
        model.compile(backend=backend)
    else:
        return torch.compile(model, backend=backend)  # type: ignore[return-value]
    return model


def compiled_training(stage: int, way: str, is_before: bool, backend: str, transport: str) -> dict[str, Any]:
    dynamo.reset()
    dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = CASES["gpt"].build()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (model, plain)]
    called: Any = _compiled(model, way, backend) if is_before else model
    run = sharded(model, optimizers[0], stage=stage, transport=transport)
    called = called if is_before else _compiled(model, way, backend)
    compiled_plain = _compiled(plain, way, backend)
    reference = PlainTrainer(plain, optimizers[1], run.config.precision)
    found: dict[str, Any] = {"losses": True, "values": True}
    for number in range(4):
        loss, expected = CASES["gpt"].loss(called, number), CASES["gpt"].loss(compiled_plain, number)
        found["losses"] &= torch.equal(loss, expected)
        loss.backward()
        reference.backward(expected)
        optimizers[0].step()
        optimizers[0].zero_grad()
        reference.step(None)
    masters = {name.replace("_orig_mod.", ""): value for name, value in reference.masters.items()}
    for name, value in run.iter_masters():
        found["values"] &= torch.equal(value, masters[name.replace("_orig_mod.", "")])
    found["graphs"] = dynamo.utils.counters["stats"]["unique_graphs"]
    found["breaks"] = sum(dynamo.utils.counters["graph_break"].values())
    run.close()
    dynamo.reset()
    return found


@pytest.mark.parametrize(("way", "is_before"), [(way, number % 2 == 1) for number, way in enumerate(WAYS)])
def test_compiled_training_is_that_of_the_compiled_plain_model(pool: RankPool, way: str, is_before: bool) -> None:
    for stage in (1, 3):
        for found in pool.run(compiled_training, stage, way, is_before, "aot_eager", "auto"):
            assert found["losses"] and found["values"], f"stage {stage}: {found}"
            assert found["graphs"] <= 2, f"stage {stage}: one graph for the plain model and one for ours, {found}"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "pairwise"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_compiled(pool: RankPool, stage: int, way: str, is_before: bool, transport: str) -> None:
    for found in pool.run(compiled_training, stage, way, is_before, "aot_eager", transport):
        assert found["losses"] and found["values"] and found["graphs"] <= 2, found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 3])
def test_inductor(pool: RankPool, stage: int, way: str) -> None:
    """The same kernels for both, so the same bits."""
    for found in pool.run(compiled_training, stage, way, False, "inductor", "auto", timeout_s=300):
        assert found["losses"] and found["values"] and found["graphs"] <= 2, found
