"""Pipeline parallelism: every stage is sharded over its own data-parallel ranks, with the bits of the whole model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from cases import OPTIMIZERS, sharded
from decoders import tokens
from pipelines import MICRO, Pipeline, Whole, grid, micro_loss, stage_of, whole_model
from shardwise.errors import CheckpointError, ModelError, NonFiniteGradientError, RanksDifferError
from shardwise.testing import RankPool


def trained(kind: str, options: dict[str, Any], accumulates: bool) -> dict[str, int]:
    """Three steps; returns the elements that this rank has sent in the last one."""
    pipeline, whole = Pipeline(kind, scales=accumulates, **options), Whole()
    for number in range(3):
        pipeline.run.transport.counters.reset()
        losses, norm = pipeline.step(number, accumulates=accumulates)
        expected, expected_norm = whole.step(number, 2)
        assert not losses or not accumulates or losses == expected[pipeline.mesh["shard"].get_local_rank()]
        assert norm == pytest.approx(expected_norm, rel=1e-6)
    sent = dict(pipeline.run.transport.counters.elements)
    own = sum(unit.layout.numel for unit in pipeline.run._runtime.units)
    found = pipeline.run.full_state_dict(rank0_only=False)
    values = whole.model.state_dict()
    assert found and found.keys() <= values.keys()
    for name, value in found.items():
        if accumulates:
            assert torch.equal(value, values[name]), (name, (value - values[name]).abs().max())
        else:  # micro-batches are averaged over ranks one by one: another order of sums
            assert torch.allclose(value, values[name], rtol=1e-3, atol=1e-4), name
    pipeline.run.close()
    return {**sent, "own": own}


DISK = sw.Offload(grads="disk", optimizer="disk", step_bytes=1 << 16)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GPipe", {"stage": 1}),
        ("1F1B", {"stage": 1}),
        ("interleaved", {"stage": 1}),
        ("1F1B", {"stage": 1, "offload": DISK, "transport": "pairwise"}),
        ("1F1B", {"stage": 0}),
        ("1F1B", {"stage": 2}),
        ("1F1B", {"stage": 3}),
        ("interleaved", {"stage": 3, "transport": "pairwise"}),
        ("GPipe", {"stage": 3, "transport": "pairwise", "offload": "disk", "activations": "units"}),
    ],
)
def test_the_bits_of_the_whole_model(pool4: RankPool, kind: str, options: dict[str, Any]) -> None:
    for sent in pool4.run(trained, kind, options, True):
        if options["stage"] in (1, 2):
            assert sent == {"gather": sent["own"] // 2, "reduce": sent["own"] // 2, "own": sent["own"]}, "once per step"


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_may_be_reduced_after_every_micro_batch(pool4: RankPool, stage: int) -> None:
    for sent in pool4.run(trained, "1F1B", {"stage": stage, "transport": "pairwise"}, False):
        assert sent["reduce"] == MICRO * sent["own"] // 2


def infinite() -> None:
    pipeline = Pipeline("1F1B", stage=1)
    if pipeline.is_first:
        pipeline.modules[0].table.weight.register_hook(lambda grad: grad * float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteGradientError, match=r"table\.weight"):
        pipeline.step(0)
    pipeline.run.close()


def test_a_bad_gradient_of_one_stage_is_named_on_all(pool4: RankPool) -> None:
    pool4.run(infinite)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(path: str, kind: str, exported: str) -> tuple[list[float], list[float]]:
    pipeline = Pipeline(kind, stage=1)
    for number in range(2):
        pipeline.step(number)
    pipeline.run.save(path, extra={"at": 2})
    pipeline.run.export(exported)
    found = [pipeline.step(number) for number in range(2, 7)]
    pipeline.run.close()
    return [loss for losses, _ in found for loss in losses], [norm for _, norm in found]


def loaded(path: str, kind: str) -> tuple[list[float], list[float]]:
    pipeline = Pipeline(kind, stage=1, seed=1)
    pipeline.step(9)
    assert pipeline.run.load(path).extra == {"at": 2}
    found = [pipeline.step(number) for number in range(2, 7)]
    pipeline.run.close()
    return [loss for losses, _ in found for loss in losses], [norm for _, norm in found]


def loaded_whole(path: str, exported: str, back: str) -> list[float]:
    """In a world of one pipeline rank: all four ranks divide the whole model; then back to a pipeline."""
    model = whole_model(2)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    run = sharded(model, optimizer, stage=3)
    run.load(path)
    state = run.full_state_dict(rank0_only=False)
    plain = whole_model(3)
    sw.load_pretrained(plain, exported)
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    run.save(back, extra={"at": 2})
    losses = []
    for number in range(2, 7):
        data = tokens(number, dist.get_rank() % 2, batch=2 * MICRO)  # two ranks have the data of one
        loss = micro_loss(model(data[:, :-1]), data[:, 1:])
        loss.backward()
        run.clip_grad_norm_(0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.close()
    return losses


@pytest.mark.parametrize("kind", ["1F1B", "interleaved"])
def test_checkpoints_have_the_names_of_the_whole_model(pool4: RankPool, tmp_path: Path, kind: str) -> None:
    path, exported, back = (str(tmp_path / name) for name in ("saved", "exported", "back"))
    first = pool4.run(saved, path, kind, exported)
    other = "interleaved" if kind == "1F1B" else "1F1B"
    for way, place in ((kind, path), (other, path), (kind, back)):
        if place == back:
            losses = pool4.run(loaded_whole, path, exported, back)
            for rank in range(2):
                means = torch.tensor(first[2 + rank][0]).view(5, MICRO).mean(1)  # the last stage's ranks
                assert torch.allclose(torch.tensor(losses[rank]), means, rtol=1e-5), "sums have another order"
        second = pool4.run(loaded, place, way)
        for (mine, norms), (theirs, their_norms) in zip(first, second, strict=True):
            assert mine == theirs and norms == their_norms, (way, place)


# -- bad input ---------------------------------------------------------------------------------------------------------


def refused() -> None:
    mesh = grid()
    place = mesh["pipe"].get_local_rank()
    tied = whole_model()
    tied.head.weight = tied.table.weight  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"'table\.weight'.*'head\.weight'.*as if they were tied"):
        sw.shard(stage_of(tied, place, 2), stage=1, mesh=mesh)
    with pytest.raises(ModelError, match="both have a parameter"):
        sw.shard(whole_model(), stage=1, mesh=mesh)
    with pytest.raises(RanksDifferError if place == 0 else ModelError, match="no parameters"):
        sw.shard(stage_of(whole_model(), 0, 2) if place == 0 else nn.Identity(), stage=1, mesh=mesh)
    stages = [stage_of(whole_model(), number, 4) for number in (place, 2 + place)]
    with pytest.raises(RanksDifferError, match="was given 1 stages of the pipeline, rank 0 2"):
        sw.shard(stages if place == 0 else stages[1], stage=1, mesh=mesh)
    with pytest.raises(ModelError, match="two stages have"):
        sw.shard([stages[0], copy.deepcopy(stages[0])], stage=1, mesh=mesh)
    with pytest.raises(ModelError, match="the same stage twice"):
        sw.shard([stages[0], stages[0]], stage=1, mesh=mesh)
    pipeline = Pipeline("GPipe", stage=1)
    with (
        pytest.raises(sw.ShardwiseError, match=r"run\.reduce\(\) was called inside run\.accumulating"),
        pipeline.run.accumulating(),
    ):
        pipeline.run.reduce()
    with pytest.raises(CheckpointError):
        pipeline.run.load("/nonexistent/place")
    pipeline.run.close()


def test_what_cannot_be_sharded_is_refused(pool4: RankPool) -> None:
    pool4.run(refused)
