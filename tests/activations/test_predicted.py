"""What the formula says of activations that are kept and computed again, against the ledger and the papers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from cases import generator, sharded
from shardwise.activations import StretchSize
from shardwise.planner import checkpoint_bytes, kept_activation_bytes, passing_activation_bytes
from shardwise.testing import RankPool
from shardwise.testing.models import GPT, GPTConfig
from shardwise.tiers import HeldStorages, Kind, Ledger, Tier

SHAPES = [(4, 32, 256, 6), (2, 64, 192, 4), (3, 48, 128, 9)]
POLICIES: dict[str, Any] = {
    "units": "units",
    "two": 2,
    "some": lambda name, module: name in ("blocks.1", "blocks.2"),
    "none": None,
}


@pytest.mark.parametrize(
    ("layers", "hidden", "printed"),
    [(80, 10240, 0.05), (100, 20480, 0.12), (128, 25600, 0.20), (195, 65536, 0.76), (315, 163840, 3.08)],
)
def test_checkpoints_as_printed_in_zero_infinity(layers: int, hidden: int, printed: float) -> None:
    """Figure 2a: TB of 2^40 bytes per node, batch 32, sequence 1024, one checkpoint per block."""
    found = checkpoint_bytes(batch=32, sequence=1024, hidden=hidden, layers=layers) / 2**40
    assert found == pytest.approx(printed, abs=0.0051)


def test_checkpoints_as_printed_in_zero() -> None:
    """100B parameters, batch 32: 'around 60 GB'; Pa with 16 ranks divides by 16, fp32 doubles."""
    shape = dict(batch=32, sequence=1024, hidden=8192, layers=125)
    whole = checkpoint_bytes(**shape)
    assert whole / 2**30 == pytest.approx(60, rel=0.05)
    assert checkpoint_bytes(**shape, degree=16) == whole / 16
    assert checkpoint_bytes(**shape, itemsize=4) == 2 * whole
    assert checkpoint_bytes(**shape, interval=2) == whole / 125 * 63, "the last one of an odd number stands alone"


def test_the_peak_is_at_the_end_of_the_forward_pass_or_where_most_is_computed_again() -> None:
    sizes = [StretchSize(kept_bytes=10, again_bytes=again) for again in (5, 100, 7)]
    assert kept_activation_bytes(()) == 0
    assert kept_activation_bytes((), saved_bytes=9) == 9
    assert kept_activation_bytes(sizes) == 10 + 10 + 100, "the third one's input is gone by then"
    assert kept_activation_bytes(sizes, saved_bytes=1000) == 30 + 1000
    assert kept_activation_bytes(sizes, saved_bytes=91, saved_before_bytes=2) == 10 + 10 + 100 + 2
    away = [StretchSize(away_bytes=10) for _ in range(5)]
    assert kept_activation_bytes(away) == 0
    assert passing_activation_bytes(away, leaving_bytes=20, ahead_bytes=10) == 30
    assert passing_activation_bytes(away, leaving_bytes=200, ahead_bytes=100) == 50


def test_a_storage_is_counted_once_and_outside_the_budget() -> None:
    ledger = Ledger()
    ledger.limit(Tier.HOST, 50)
    weight = torch.zeros(8)
    held = HeldStorages(ledger, Tier.HOST, lambda address: address == weight.data_ptr())
    x = torch.zeros(100)
    assert held.hold(weight) is None and held.hold(torch.zeros(0)) is None
    holds = [held.hold(x), held.hold(x[10:20], is_saved=True), held.hold(x.view(10, 10).t())]
    assert [hold.num_bytes for hold in holds if hold is not None] == [400, 0, 0] and held.saved_bytes == 0
    assert ledger.now(Tier.HOST, Kind.ACTIVATION) == 400 and ledger.room(Tier.HOST) == 50
    ledger.reserve(Tier.HOST, Kind.GRAD, 50)
    with pytest.raises(sw.ShardwiseError, match="from 50 to 51 bytes, above its budget of 50"):
        ledger.reserve(Tier.HOST, Kind.GRAD, 1)
    del holds[0], holds[0]
    assert ledger.now(Tier.HOST, Kind.ACTIVATION) == 400
    holds.clear()
    assert ledger.now(Tier.HOST, Kind.ACTIVATION) == 0 and ledger.room(Tier.HOST) == 0
    kept = held.hold(x, is_saved=True)
    assert kept is not None and held.saved_bytes == held.peak_saved_bytes == 400
    del kept
    assert held.saved_bytes == 0


class Figures(NamedTuple):
    early: dict[str, int]
    predicted: dict[str, int]
    measured: dict[str, int]
    away: int
    peak_away: int
    kept: int
    report: str


def trained(policy: str, offload: str, directory: str, shape: tuple[int, int, int, int], measures: bool) -> Figures:
    """Predicted and measured bytes of a GPT that was trained for three steps."""
    batch, length, width, depth = shape
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=61, context=length, layers=depth, heads=2, hidden=width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = {"path": directory} if offload == "disk" else {}
    activations = sw.Activations(checkpoint=POLICIES[policy], offload=offload, **path)
    run = sharded(model, optimizer, stage=3, activations=activations)
    early = run.predicted_memory().by_kind()
    assert run.predicted_memory(activation_bytes=77).activation == 77
    for step in range(3):
        tokens = torch.randint(0, 61, (batch, length), generator=generator(step))
        if measures and step == 0:
            with run.measuring_activations():
                loss = model(tokens, tokens)
        else:
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        model(tokens, tokens)  # an evaluation keeps nothing, and is not what the formula is about
    assert run._keeping is not None
    sizes = run._keeping.sizes.stretches
    found = Figures(
        early,
        run.predicted_memory().by_kind(),
        run.measured_memory(),
        sum(size.away_bytes for size in sizes),
        run.ledger.peak(Tier.DISK, Kind.ACTIVATION),
        sum(size.kept_bytes for size in sizes),
        run.report(),
    )
    run.close()
    return found


@pytest.mark.parametrize(
    ("offload", "shape"),
    [
        pytest.param(offload, shape, marks=[] if offload == "device" or shape == SHAPES[0] else pytest.mark.slow)
        for offload in ("device", "host", "disk")
        for shape in SHAPES
    ],
)
def test_the_formula_knows_what_is_kept_and_computed_again(
    pool: RankPool, tmp_path: Any, shape: tuple[int, int, int, int], offload: str
) -> None:
    batch, length, width, depth = shape
    for policy, layers, interval in (("units", depth, 1), ("two", depth, 2), ("some", 2, 1)):
        formula = checkpoint_bytes(batch=batch, sequence=length, hidden=width, layers=layers, interval=interval, itemsize=4)
        for measures in (False, True) if policy == "units" else (False,):
            for found in pool.run(trained, policy, offload, str(tmp_path), shape, measures):
                assert found.early["activation"] == 0 and found.early["param"] == found.predicted["param"]
                assert found.measured["activation"] == pytest.approx(found.predicted["activation"], rel=0.02), found.report
                assert found.measured["activation"] > formula * (offload != "disk"), "what is computed again is counted too"
                kept, other = (found.away, found.kept) if offload == "disk" else (found.kept, found.away)
                assert kept == pytest.approx(formula, rel=0.02) and other <= 0.02 * formula
                assert found.peak_away == found.away
                assert found.measured["buffer"] <= found.predicted["buffer"]
                assert "kept in memory by the last forward pass" in found.report
                assert ("on disk (measured peak" in found.report) == (offload == "disk")


@pytest.mark.parametrize("offload", ["host", "disk"])
def test_the_formula_knows_what_is_moved_away(pool: RankPool, tmp_path: Any, offload: str) -> None:
    for shape in SHAPES:
        for found in pool.run(trained, "none", offload, str(tmp_path), shape, False):
            assert found.predicted["activation"] == pytest.approx(found.measured["activation"], rel=0.02)
            assert found.away == found.peak_away and (found.away > 0) == (offload == "disk")


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def divided() -> tuple[int, int, int]:
    """Checkpoints of ranks that compute the same, each a world of its own."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("tensor", "shard"))
    torch.manual_seed(0)
    model = Stack()
    asked = sw.Activations(partition=mesh["tensor"].get_group())
    run = sw.shard(model, stage=2, mesh=mesh["shard"], activations=asked)
    model(torch.randn(512, 64)).backward()
    assert run._keeping is not None
    kept = sum(size.kept_bytes for size in run._keeping.sizes.stretches)
    found = kept, run.predicted_memory().activation, run.measured_memory()["activation"]
    run.close()
    return found


def test_a_divided_checkpoint_is_a_part(pool: RankPool) -> None:
    for kept, predicted, measured in pool.run(divided):
        assert kept == checkpoint_bytes(batch=1, sequence=512, hidden=64, layers=4, itemsize=4, degree=2)
        assert predicted == pytest.approx(measured, rel=0.02) and predicted > kept


def alone(**options: Any) -> tuple[sw.Run, nn.Module]:
    torch.manual_seed(0)
    model = Stack()
    return sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **options), model


def test_forward_passes_whose_tensors_are_still_kept_count_together() -> None:
    run, model = alone(activations="units")
    x = torch.randn(8, 64)
    once = model(x)
    one = run.predicted_memory().activation
    again = model(x + 1)
    assert run.predicted_memory().activation == 2 * one, "both are kept until their backward"
    (once + again).backward()
    model(x).backward()
    assert run._keeping is not None and len(run._keeping.sizes.stretches) == 4, "those are gone"
    run.close()


def test_measuring_counts_what_autograd_keeps_and_only_while_it_does() -> None:
    run, model = alone()
    x = torch.randn(8, 64)
    with run.measuring_activations():
        loss = model(x)
    now = run.ledger.now(Tier.HOST, Kind.ACTIVATION)
    assert now == run.predicted_memory().activation == run.measured_memory()["activation"] >= 5 * x.nbytes
    loss.backward()
    assert run.ledger.now(Tier.HOST, Kind.ACTIVATION) == 0 and run.measured_memory()["activation"] == now
    run.close()


def test_a_measured_forward_pass_still_notices_changes_in_place() -> None:
    run, model = alone()
    with run.measuring_activations():
        hidden = torch.tanh(model.blocks[0](torch.randn(8, 64)))
        loss = hidden.exp().sum()
        with torch.no_grad():
            hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    run.close()
