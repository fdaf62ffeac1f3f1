"""What user code, checkpoints and other operations do to a tiled parameter: as to a whole one, or refused with the remedy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from cases import sharded
from shardwise.errors import (
    ConfigError,
    FreedParameterError,
    MemoryBudgetError,
    ModelError,
    RanksDifferError,
)
from shardwise.partition import TiledParameter
from shardwise.testing import RankPool
from shardwise.tiers import Kind, Tier

MAX_BYTES = 4096
WAYS: list[dict[str, Any]] = [{"stage": 1}, {"stage": 3}, {"stage": 3, "transport": "copied"}, {"stage": 3, "offload": "disk"}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.up = nn.Linear(32, 96)
        self.down = nn.Linear(96, 48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.embed(tokens))))


def made(seed: int = 0, lr: float = 1e-2, **options: Any) -> tuple[sw.Run, Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    options.setdefault("tiling", MAX_BYTES)
    return sharded(model, optimizer, **options), model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    tokens = torch.randint(0, 48, (3, 5), generator=torch.Generator().manual_seed(number))  # the same on every rank
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# -- the parameter itself ----------------------------------------------------------------------------------------------


def seen(**options: Any) -> None:
    run, model, optimizer = made(**options)
    plain = Net()
    weight, before = model.up.weight, run.full_state_dict(rank0_only=False)
    assert isinstance(weight, TiledParameter) and isinstance(weight, nn.Parameter)
    assert weight.shape == (96, 32) and weight.stride() == (32, 1) and weight.is_contiguous() and weight.numel() == 3072
    assert [*model.state_dict()] == [*plain.state_dict()] and len([*model.parameters()]) == 5
    assert weight.t().shape == (32, 96) and weight.T.stride() == (1, 32) and weight.t().t() is weight
    assert torch.zeros_like(weight).shape == (96, 32) and weight.to(torch.float32) is weight
    assert "tiles=3" in repr(weight) and weight.grad is None
    step(model, optimizer, 0)
    tokens = torch.arange(4)
    model(tokens).sum().backward()
    with pytest.raises(FreedParameterError, match=r"run\.grad"):
        _ = weight.grad
    grad = run.grad("up.weight")
    assert grad is not None and grad.shape == (96, 32) and dict(run.iter_grads())["up.weight"].equal(grad)
    assert run.master("up.weight").shape == (96, 32)
    optimizer.zero_grad()
    assert weight.grad is None and run.grad("up.weight") is None
    for refused in (
        lambda: weight.register_hook(print),
        lambda: weight.register_post_accumulate_grad_hook(print),
        lambda: copy.deepcopy(weight),
        lambda: weight.set_(torch.zeros(96, 32)),
        lambda: torch.autograd.grad(model(tokens).sum(), [weight]),
        lambda: weight.data_ptr(),
    ):
        with pytest.raises(FreedParameterError):
            refused()
    with pytest.raises(FreedParameterError, match=r"setting \.data"):
        weight.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        weight.mul_(2.0)
    if options["stage"] == 3:
        with pytest.raises(FreedParameterError, match=r"run\.gathered"), torch.no_grad():
            weight.view(-1)
    for name, value in run.full_state_dict(rank0_only=False).items():
        assert value.shape == before[name].shape
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_tiled_parameter_looks_like_a_whole_one(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(seen, **way)


def changed_by_hand(**options: Any) -> None:
    """Changes of every kind reach the tiles, and the next steps train from them."""
    run, model, optimizer = made(**options)
    plain = Net()
    plain.load_state_dict(run.full_state_dict(rank0_only=False))

    def alike(what: str) -> None:
        for name, value in run.full_state_dict(rank0_only=False).items():
            assert torch.equal(value, plain.state_dict()[name]), (what, name)

    with torch.no_grad():
        for net in (model, plain):
            net.up.weight.mul_(0.5)
    alike("mul_")
    for net in (model, plain):
        net.up.weight.data.add_(1.0)
    alike(".data.add_")
    for net in (model, plain):
        net.up.weight.data = torch.linspace(-1, 1, 3072).view(96, 32)
    alike(".data =")
    with torch.no_grad():
        for net in (model, plain):
            net.embed.weight[7] = 0.25
    alike("setitem")
    for net in (model, plain):
        torch.manual_seed(3)
        nn.init.normal_(net.down.weight)
    alike("init")
    with run.gathered(model.up):
        assert torch.equal(model.up.weight.detach(), plain.up.weight.detach())
        twin = copy.deepcopy(model.up)
        with torch.no_grad():
            model.up.weight.view(-1)[:50] = 2.0
    with torch.no_grad():
        plain.up.weight.view(-1)[:50] = 2.0
    assert type(twin.weight) is nn.Parameter and isinstance(model.up.weight, TiledParameter)
    alike("gathered")
    state = {name: value + 1.0 for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)
    alike("load_state_dict")
    # In a forward pass under no_grad, as spectral or weight normalisation does it.
    handle = model.up.register_forward_pre_hook(lambda module, _: _halve(module))
    other = plain.up.register_forward_pre_hook(lambda module, _: _halve(module))
    tokens = torch.arange(6)
    assert torch.allclose(model(tokens), plain(tokens), atol=1e-5)
    handle.remove()
    other.remove()
    optimizer.zero_grad()
    step(model, optimizer, 0)
    step(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 0)
    for name, value in run.full_state_dict(rank0_only=False).items():
        assert torch.allclose(value, plain.state_dict()[name], atol=2e-5), name
    run.close()


def _halve(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight.mul_(0.5)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_changes_by_hand_reach_the_tiles(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(changed_by_hand, **way)


def other_operations(**options: Any) -> None:
    """Operations that cannot run tile by tile use a copy of the whole, with the same gradients."""
    run, model, optimizer = made(**options)
    plain = Net()
    plain.load_state_dict(run.full_state_dict(rank0_only=False))

    def loss_of(net: Net) -> torch.Tensor:
        tokens = torch.arange(5)
        mixed = torch.einsum("ti,oi->to", net.embed(tokens), net.up.weight)
        return net(tokens).square().mean() + mixed.sum() + net.down.weight.norm() + (net.up.weight * 2).std()

    loss, expected = loss_of(model), loss_of(plain)
    assert torch.allclose(loss, expected, rtol=1e-5)
    loss.backward()
    expected.backward()
    for name, param in plain.named_parameters():
        assert torch.allclose(run.grad(name), param.grad, rtol=1e-4, atol=1e-5), name
    found = run._runtime.tiles.gathered_whole
    assert {key[0] for key in found} == {"up.weight", "down.weight"}, found
    optimizer.step()
    assert "cannot run tile by tile" in run.report() and "up.weight" in run.report()
    del loss
    buffers = run.ledger.now(Tier.HOST, Kind.BUFFER)
    assert buffers == 0 or options.get("offload"), f"copies are released: {buffers}"
    view = model.up.weight.reshape(-1) if options["stage"] == 3 else None  # recorded by autograd: a view of a copy
    if view is not None:
        with torch.no_grad():
            view.zero_()
        with pytest.raises(ModelError, match="would be lost"):
            model(torch.arange(3))
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_other_operations_use_a_copy_of_the_whole(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(other_operations, **way)


def flags(**options: Any) -> None:
    run, model, optimizer = made(**options)
    model.up.weight.requires_grad_(False)
    before = run.master("up.weight")
    step(model, optimizer, 0)
    assert torch.equal(run.master("up.weight"), before) and not model.up.weight.requires_grad
    model.up.weight.requires_grad = True
    step(model, optimizer, 1)
    assert not torch.equal(run.master("up.weight"), before)
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_freezing_a_tiled_parameter(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(flags, **way)


def in_a_graph_of_gathered(**options: Any) -> None:
    run, model, _ = made(**options)
    plain = Net()
    plain.load_state_dict(run.full_state_dict(rank0_only=False))
    tokens = torch.arange(5)
    with run.gathered():
        model(tokens).square().mean().backward()
    plain(tokens).square().mean().backward()
    for name, param in plain.named_parameters():
        assert torch.allclose(run.grad(name), param.grad, rtol=1e-4, atol=1e-6), name
    run.close()


def test_a_backward_inside_gathered_divides_the_gradient(pool: RankPool) -> None:
    for way in WAYS[1:]:
        pool.run(in_a_graph_of_gathered, **way)


def test_selfcheck_of_a_tiled_model() -> None:
    run, _, _ = made(stage=3)
    report = run.selfcheck(lambda model, number: model(torch.arange(5) + number).square().mean(), steps=2)
    assert report.compared_elements and report.largest < 1e-5, report
    run.close()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved_and_loaded(directory: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    """Train, save, load into a run with other options, and go on alike."""
    path = Path(directory)
    run, model, optimizer = made(**one)
    for number in range(2):
        step(model, optimizer, number)
    run.save(path / "saved")
    held = run.state_dict()
    whole_states = run.full_optimizer_state_dict()
    run.export(path / "exported")
    expected = [step(model, optimizer, number) for number in range(2, 5)]
    final = run.full_state_dict(rank0_only=False)
    run.load_state_dict(held)
    assert [step(model, optimizer, number) for number in range(2, 5)] == expected
    run.close()

    run, model, optimizer = made(seed=9, **two)
    run.load(path / "saved")
    found = [step(model, optimizer, number) for number in range(2, 5)]
    assert found == pytest.approx(expected, rel=1e-5)
    for name, value in run.full_state_dict(rank0_only=False).items():
        assert torch.allclose(value, final[name], atol=1e-5), name
    again = run.full_optimizer_state_dict()
    if whole_states:
        assert [*again["state"]] == [*whole_states["state"]]
        for key, state in whole_states["state"].items():
            assert state["exp_avg"].shape == again["state"][key]["exp_avg"].shape == list(Net().parameters())[key].shape
    sw.load_pretrained(model, path / "exported")
    for name, value in run.full_state_dict(rank0_only=False).items():
        assert torch.equal(value, torch_load(path / "exported")[name]), name
    run.close()


def torch_load(path: Path) -> dict[str, torch.Tensor]:
    plain = Net()
    sw.load_pretrained(plain, path)
    return plain.state_dict()


PAIRS = [
    ({"stage": 3}, {"stage": 3, "tiling": None}),
    ({"stage": 3, "tiling": None}, {"stage": 3}),
    ({"stage": 1}, {"stage": 3, "offload": "disk", "tiling": 6000}),
    ({"stage": 3, "offload": "disk"}, {"stage": 0, "tiling": 8192}),
]


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_checkpoints_do_not_depend_on_tiles(pool: RankPool, tmp_path: Path, number: int) -> None:
    pool.run(saved_and_loaded, str(tmp_path), *PAIRS[number])


def loaded_alone(directory: str) -> list[float]:
    run, model, optimizer = made(seed=4, stage=3, tiling=5000)
    run.load(Path(directory) / "saved")
    found = [step(model, optimizer, number) for number in range(2, 5)]
    run.close()
    return found


def saved_by_two(directory: str) -> list[float]:
    run, model, optimizer = made(stage=3)
    for number in range(2):
        step(model, optimizer, number)
    run.save(Path(directory) / "saved")
    found = [step(model, optimizer, number) for number in range(2, 5)]
    run.close()
    return found


def test_tiles_of_two_ranks_load_on_one(pool: RankPool, tmp_path: Path) -> None:
    expected = pool.run(saved_by_two, str(tmp_path))[0]
    assert loaded_alone(str(tmp_path)) == pytest.approx(expected, rel=1e-5)


def moved_in(**options: Any) -> None:
    """An optimizer that has stepped moves in, and out again."""
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    optimizer, plain_optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    for number in range(2):
        assert step(model, optimizer, number) == step(plain, plain_optimizer, number)
    run = sharded(model, optimizer, tiling=MAX_BYTES, **options)
    for number in range(2, 4):
        assert step(model, optimizer, number) == pytest.approx(step(plain, plain_optimizer, number), rel=1e-5)
    state = run.full_optimizer_state_dict()
    if run.rank == 0:
        for key, expected in plain_optimizer.state_dict()["state"].items():
            assert torch.allclose(state["state"][key]["exp_avg"], expected["exp_avg"], atol=1e-6)
            assert state["state"][key]["step"] == expected["step"]
        fresh = torch.optim.AdamW(Net().parameters(), lr=1e-2)
        fresh.load_state_dict(state)
    run.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_optimizer_that_has_stepped_moves_in(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(moved_in, **way)


def built_under_sharded_init(offload: str) -> list[float]:
    torch.manual_seed(0)
    with sw.sharded_init(offload=sw.Offload(params=offload)):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = sharded(model, optimizer, stage=3, tiling=MAX_BYTES, offload=sw.Offload(params=offload))
    found = [step(model, optimizer, number) for number in range(3)]
    run.close()
    return found


def test_tiles_of_a_model_built_under_sharded_init(pool: RankPool) -> None:
    run, model, optimizer = made(stage=3)
    expected = [step(model, optimizer, number) for number in range(3)]
    run.close()
    for offload in ("device", "disk"):
        for found in pool.run(built_under_sharded_init, offload):
            assert found == pytest.approx(expected, rel=1e-5)


# -- bad input ---------------------------------------------------------------------------------------------------------


def still_plain(model: nn.Module) -> None:
    """The model is an ordinary one, and trains."""
    assert all(type(p) is nn.Parameter for p in model.parameters())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


def test_bounds_that_cannot_be_honoured() -> None:
    for wrong in (0, -1, 100, True, "4 MB", 1.5e6):
        with pytest.raises(ConfigError, match="max_bytes"):
            sw.Tiling(max_bytes=wrong)
    with pytest.raises(ConfigError, match="did you mean 'max_bytes'"):
        sw.Tiling(max_byte=4096)
    model = nn.Sequential(nn.Linear(2048, 8))
    with pytest.raises(ModelError, match=r"one row of parameter '0.weight'.*8192 bytes"):
        sw.shard(model, stage=3, tiling=4096)
    assert type(model[0].weight) is nn.Parameter
    model = Net()
    model.up.weight = nn.Parameter(torch.randn(32, 96).t())
    with pytest.raises(ModelError, match="rows do not lie one after the other"):
        sw.shard(model, stage=3, tiling=4096)
    still_plain(model)
    model = Net()
    handle = model.up.weight.register_hook(lambda grad: grad)
    with pytest.raises(ModelError, match="hook on its gradient"):
        sw.shard(model, stage=3, tiling=4096)
    handle.remove()
    still_plain(model)


def test_a_budget_without_room_for_a_copy_of_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 65536, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = 6 << 20  # the weight takes 16 MiB
    offload = sw.Offload(params="disk", grads="disk", optimizer="disk", host_bytes=budget, step_bytes=1 << 16, path=tmp_path)
    run = sw.shard(model, optimizer, stage=3, tiling=1 << 18, offload=offload, exchange_bytes=1 << 18, prefetch_bytes=0)
    before = run.master("0.weight")
    with pytest.raises(MemoryBudgetError, match=r"norm on parameter '0.weight'.*cannot run tile by tile"):
        model[0].weight.norm()
    assert torch.equal(run.master("0.weight"), before)
    model(torch.randn(3, 64)).square().mean().backward()
    optimizer.step()
    assert run.ledger.peak(Tier.HOST) <= budget
    run.close()


def differing() -> str:
    model = Net()
    torch.manual_seed(0)
    with pytest.raises(RanksDifferError, match="Tiling"):
        torch.manual_seed(0)
        model = Net()
        sw.shard(model, stage=3, tiling=4096 if torch.distributed.get_rank() else 8192)
    still_plain(model)
    return "refused"


def test_ranks_that_cut_differently_are_refused(pool: RankPool) -> None:
    assert pool.run(differing) == ["refused", "refused"]
