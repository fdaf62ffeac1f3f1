"""Hybrid sharding: Units are divided inside a group of ranks and replicated across groups, with the sums of plain training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from cases import CASES, OPTIMIZERS, sharded
from shardwise.comm import meshes
from shardwise.errors import ConfigError, RanksDifferError
from shardwise.testing import ParityReport, RankPool, compare_with_plain


def hybrid(replicas: int = 2, names: tuple[str, str] = ("replicate", "shard")) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=names)


def in_groups(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum as two replicas do: inside each in rank order, then across."""
    half = len(parts) // 2
    sums = []
    for group in (parts[:half], parts[half:]):
        total = group[0].clone()
        for part in group[1:]:
            total = total + part
        sums.append(total)
    return sums[0] + sums[1]


def built(name: str, optimizer: str = "adamw", **options: Any) -> tuple[sw.Run, Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = CASES[name].build()
    plain = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (model, plain)]
    options.setdefault("mesh", hybrid())
    return sharded(model, optimizers[0], **options), model, optimizers[0], plain, optimizers[1]


def trained(name: str, directory: str, **options: Any) -> ParityReport:
    if options.get("offload") == "disk":
        options["offload"] = sw.Offload(
            optimizer="disk", grads="disk", params="disk" if options["stage"] == 3 else "device", path=directory
        )
    run, *both = built(name, **options)
    assert run._runtime.world.shard.size == 2 and run._runtime.world.replicate.size == 2
    report = compare_with_plain(run, *both, CASES[name].loss, steps=4, accumulate=2, max_norm=0.5, add_up=in_groups)
    run.close()
    return report


@pytest.mark.parametrize("transport", ["auto", "pairwise"])
@pytest.mark.parametrize(
    ("stage", "offload"), [(0, None), (1, None), (2, None), (3, None), (1, "disk"), (2, "disk"), (3, "disk")]
)
def test_four_ranks_have_the_bits_of_plain_training(
    pool4: RankPool, tmp_path: Path, stage: int, offload: str | None, transport: str
) -> None:
    for name in ("gpt", "branchy"):
        for report in pool4.run(trained, name, str(tmp_path), stage=stage, offload=offload, transport=transport):
            assert report.is_bitwise, f"{name}, stage {stage}, {offload}, {transport}: {report}"


def sums_of_other_numbers(replicas: int, stage: int) -> ParityReport:
    """Four replicas of whole Units, or one: then the order of sums is that of other transports."""
    run, *both = built("gpt", stage=stage, mesh=hybrid(replicas))
    assert (run._runtime.world.shard.size, run._runtime.world.replicate.size) == (4 // replicas, replicas)
    report = compare_with_plain(run, *both, CASES["gpt"].loss, steps=3, max_norm=0.5)
    run.close()
    return report


@pytest.mark.parametrize("replicas", [1, 4])
def test_all_replicas_or_none(pool4: RankPool, replicas: int) -> None:
    for stage in (1, 3):
        for report in pool4.run(sums_of_other_numbers, replicas, stage):
            assert report.is_bitwise, f"{replicas} replicas, stage {stage}: {report}"


class Skipping(nn.Module):
    """One rank's loss may reach no trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        return x * 1.0 if skips else self.layers(x)


def without_gradients(replicas: int) -> None:
    torch.manual_seed(0)
    model = Skipping()
    plain = copy.deepcopy(model)
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, mesh=hybrid(replicas), timeout_s=20.0)
    rank, x = dist.get_rank(), torch.ones(3, 64)
    model(x.clone().requires_grad_(), rank >= 2).square().sum().backward()
    (plain(x, False).square().sum() * 0.5).backward()  # two ranks of four
    for name, param in plain.named_parameters():
        assert torch.allclose(run.grad(name), param.grad, rtol=1e-5), name  # type: ignore[arg-type]
    run.close()


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_replica_whose_loss_reaches_no_parameter(pool4: RankPool, replicas: int) -> None:
    pool4.run(without_gradients, replicas)


def rounded(replicas: int) -> ParityReport:
    run, *both = built("gpt", stage=2, mesh=hybrid(replicas), precision=sw.Precision(reduce=torch.bfloat16))
    report = compare_with_plain(run, *both, CASES["gpt"].loss, steps=3)
    run.close()
    return report


@pytest.mark.parametrize("replicas", [2, 4])
def test_gradients_are_rounded_once_before_they_are_summed(pool4: RankPool, replicas: int) -> None:
    for report in pool4.run(rounded, replicas):
        assert report.is_bitwise, report


# -- what is sent ------------------------------------------------------------------------------------------------------


def traffic(stage: int, transport: str) -> tuple[dict[str, int], int]:
    """Elements that this rank sends in one step, and elements of all flat vectors."""
    run, model, optimizer, *_ = built("gpt", stage=stage, transport=transport)
    for number in range(2):
        run.transport.counters.reset()
        CASES["gpt"].loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = dict(run.transport.counters.elements)
    psi = sum(unit.layout.numel for unit in run._runtime.units)
    run.close()
    return sent, psi


@pytest.mark.parametrize("transport", ["auto", "pairwise"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_sends_its_shard_across_and_the_rest_inside(pool4: RankPool, stage: int, transport: str) -> None:
    shards = replicas = 2
    for sent, psi in pool4.run(traffic, stage, transport):
        across = sent.pop("across reduce") + sent.pop("across gather")
        assert across == psi // shards * 2 * (replicas - 1) // replicas, "Psi / F x 2 (R - 1) / R"
        # Overlays are read in place in backward, so that stage 3 gathers once where shared memory is.
        passes = {1: 2, 2: 2, 3: 3 if transport == "pairwise" else 2}[stage]
        assert set(sent) == {"gather", "reduce"}
        assert sum(sent.values()) == passes * psi * (shards - 1) // shards, (sent, psi)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(directory: str, mesh_of: str, stage: int, in_background: bool) -> list[float]:
    """Train two steps, save, train three more; the losses of these."""
    run, model, optimizer, *_ = built("gpt", stage=stage, mesh=_mesh(mesh_of))
    losses = [_step(model, optimizer, number) for number in range(2)]
    torch.manual_seed(100 + dist.get_rank())
    ticket = run.save(Path(directory) / "saved", wait=not in_background)
    losses = [*(_step(model, optimizer, number) for number in range(2, 5)), torch.rand(1).item()]
    if in_background:
        ticket.wait()
    run.close()
    return losses


def loaded(directory: str, mesh_of: str, stage: int) -> list[float]:
    run, model, optimizer, *_ = built("gpt", stage=stage, mesh=_mesh(mesh_of))
    _step(model, optimizer, 9)
    run.load(Path(directory) / "saved")
    losses = [*(_step(model, optimizer, number) for number in range(2, 5)), torch.rand(1).item()]
    run.close()
    return losses


def _mesh(of: str) -> DeviceMesh | None:
    return {"hybrid": hybrid, "replicas": lambda: hybrid(4), "plain": lambda: None}[of]()


def _step(model: Any, optimizer: Any, number: int) -> float:
    loss = CASES["gpt"].loss(model, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("before", "after"), [("hybrid", "hybrid"), ("hybrid", "plain"), ("plain", "hybrid"), ("hybrid", "replicas")]
)
def test_checkpoints_do_not_depend_on_replicas(pool4: RankPool, tmp_path: Path, before: str, after: str) -> None:
    first = pool4.run(saved, str(tmp_path), before, 3, after == "plain")
    second = pool4.run(loaded, str(tmp_path), after, 1)
    for mine, theirs in zip(first, second, strict=True):
        assert mine[0] == theirs[0], "the same parameters give the same loss"
        assert torch.allclose(torch.tensor(mine[:3]), torch.tensor(theirs[:3]), rtol=1e-5), "sums have another order"
        if before == after:  # at another stage, with the same sums
            assert mine == theirs, "to the last bit, random generators of every replica included"
    files = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert len(files) == (3 if before == "hybrid" else 5), files


# -- around the step ---------------------------------------------------------------------------------------------------


def around() -> None:
    run, model, _, plain, _ = built("gpt", stage=3)
    state = run.full_state_dict(rank0_only=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    with run.gathered(), torch.no_grad():
        next(model.parameters()).mul_(2.0)
    name = next(iter(dict(model.named_parameters())))
    assert torch.equal(run.master(name), 2.0 * state[name])
    with pytest.raises(RanksDifferError), run.gathered(), torch.no_grad():  # replicas must make the same change too
        next(model.parameters()).add_(dist.get_rank() // 2)
    report = run.selfcheck(CASES["gpt"].loss, steps=2)
    assert report.is_bitwise and report.compared_elements
    assert "across 2 replicas" in run.report()
    run.close()


def test_the_handle_works_with_replicas(pool4: RankPool) -> None:
    pool4.run(around)


def constructed() -> None:
    torch.manual_seed(0)
    with sw.sharded_init(mesh=hybrid()):
        model = CASES["gpt"].build()
    torch.manual_seed(0)
    plain = CASES["gpt"].build()
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain)]
    run = sharded(
        model, optimizers[0], stage=3, mesh=hybrid(names=("outer", "inner")), mesh_roles={"outer": "replicate", "inner": "shard"}
    )
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], CASES["gpt"].loss, steps=2, add_up=in_groups)
    assert report.is_bitwise, report
    run.close()


def test_models_built_under_sharded_init_and_other_names(pool4: RankPool) -> None:
    pool4.run(constructed)


# -- bad meshes --------------------------------------------------------------------------------------------------------


def refused() -> None:
    model = CASES["mlp"].build()
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    named = [
        (hybrid(names=("replicate", "model")), None, "dimension 'model' is not known"),
        (init_device_mesh("cpu", (2, 2)), None, "have no names"),
        (hybrid(names=("a", "b")), {"a": "shard", "b": "shard"}, "both have the role 'shard'"),
        (hybrid(names=("a", "b")), {"a": "shard", "c": "replicate"}, "names 'c', which is not a dimension"),
        (hybrid(names=("a", "b")), {"a": "shard", "b": "expert"}, "role 'expert' of dimension 'b' is not known"),
        (init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",)), None, "no dimension has the role 'shard'"),
        (DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("replicate", "shard")), None, "not in ascending order"),
        (None, {"a": "shard"}, "no mesh was given"),
    ]
    for mesh, roles, text in named:
        with pytest.raises(ConfigError, match=text):
            sw.shard(model, optimizer, stage=3, mesh=mesh, mesh_roles=roles)
    if dist.get_rank() == 3:
        with pytest.raises(ConfigError, match="rank 3 is not in it"):
            sw.shard(model, optimizer, stage=3, mesh=DeviceMesh("cpu", [0, 1], _init_backend=False))
    for name, param in model.named_parameters():
        assert param is before[name][0] and torch.equal(param, before[name][1]), name


def test_meshes_that_do_not_fit_are_refused_and_change_nothing(pool4: RankPool) -> None:
    pool4.run(refused)


def differing() -> str:
    mine = hybrid(2) if dist.get_rank() < 2 else hybrid(2, ("shard", "replicate"))
    try:
        meshes.check_alike(mine, meshes.dimensions(mine, None), timeout_s=2.0)
    except RanksDifferError as error:
        return str(error)
    return ""


def test_ranks_that_pass_different_meshes(pool4: RankPool) -> None:
    for rank, text in enumerate(pool4.run(differing)):
        assert f"rank {rank} passes" in text, text
        assert "('shard', 'replicate')" in text and "('replicate', 'shard')" in text, text
