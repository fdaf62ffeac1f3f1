"""Calls that are computed again, and tensors that are moved away, give the bits of plain training."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from cases import CASES, Patched, generator, rank, sharded
from shardwise.activations import keeping as keeping_module
from shardwise.errors import ConfigError, DiskError, ModelError, RanksDifferError, StaleGraphError
from shardwise.testing import ParityReport, RankPool, compare_with_plain
from shardwise.tiers import Kind, Tier


class State(NamedTuple):
    hidden: torch.Tensor
    extra: dict[str, Any]


class Block(nn.Module):
    """Dropout, nested inputs and outputs, an argument that is no tensor, a mask that all blocks get."""

    def __init__(self, width: int, inner: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.3)
        self.inner = inner

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.tanh(self.up(self.norm(x)))))

    def forward(self, state: State, *, mask: torch.Tensor, options: dict[str, Any]) -> tuple[State, list[float]]:
        x = state.hidden
        new = self.part(x) if not self.inner else checkpoint(self.part, x, use_reentrant=self.inner == "reentrant")
        assert options["scale"] == 0.5
        return State(x + options["scale"] * new * mask, {"seen": [state.extra["seen"][0] + 1]}), [1.0]


class Deep(nn.Module):
    def __init__(self, inner: str = "", width: int = 12, depth: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(depth))
        self.head = nn.Linear(width, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(*tokens.shape, 1)
        state = State(self.embed(tokens), {"seen": [0]})
        for number, block in enumerate(self.blocks):
            state, _ = block(state, mask=mask, options={"scale": 0.5})
            if number == 2:  # what is between blocks is computed once, whatever is computed again
                state = State(torch.sin(state.hidden), state.extra)
        assert state.extra["seen"] == [len(self.blocks)]
        return self.head(state.hidden).logsumexp(-1).mean()


def deep_loss(model: nn.Module, number: int) -> torch.Tensor:
    tokens = torch.randint(0, 23, (2 + rank(), 5 + number % 3), generator=generator(number))
    torch.manual_seed(100 * number + rank())
    return model(tokens)


MODELS: dict[str, Any] = {
    "deep": (Deep, deep_loss),
    "own": (lambda: Deep("other"), deep_loss),
    "reentrant": (lambda: Deep("reentrant"), deep_loss),
    "lora": (CASES["lora"].build, CASES["lora"].loss),
    "gpt": (CASES["gpt"].build, CASES["gpt"].loss),
    "conv": (CASES["conv"].build, CASES["conv"].loss),
}
POLICIES: dict[str, Any] = {
    "units": "units",
    "two": 2,
    "some": lambda name, module: name.endswith((".1", ".2", "blocks.3.part")),
    "none": None,
}


def trained(
    name: str,
    policy: str,
    offload: str,
    directory: str,
    accumulate: int = 1,
    max_norm: float | None = None,
    states: sw.Offload | None = None,
    shares_file: bool = False,
    **options: Any,
) -> tuple[ParityReport, int]:
    """Compare with plain training; also how many bytes are still counted as activations at the end.

    `shares_file`: activations on disk are in the file of the run's states, not in one of their own.
    """
    make, loss = MODELS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    path = {"path": directory} if offload == "disk" and not shares_file else {}
    activations = sw.Activations(checkpoint=POLICIES[policy], offload=offload, **path)
    names = [*model.state_dict()], [*map(type, model.modules())]
    with Patched(keeping_module, "SMALL_BYTES", 1):
        run = sharded(model, optimizers[0], activations=activations, offload=states, **options)
        report = compare_with_plain(
            run, model, optimizers[0], plain, optimizers[1], loss, steps=4, accumulate=accumulate, max_norm=max_norm
        )
        assert names == ([*model.state_dict()], [*map(type, model.modules())])
    left = sum(run.ledger.now(tier, Kind.ACTIVATION) for tier in Tier)
    run.close()
    return report, left


WAYS = [(0, "auto"), (1, "auto"), (2, "auto"), (3, "shared"), (3, "copied"), (3, "pairwise")]
SETTINGS = [
    (policy, offload)
    for policy in POLICIES
    for offload in ("device", "host", "disk")
    if not (policy == "none" and offload == "device")
]


CELLS = [
    pytest.param(name, *way, marks=[] if way == (3, "copied") or (name == "deep" and way[0] in (1, 3)) else pytest.mark.slow)
    for name in sorted(MODELS)
    for way in WAYS
]


@pytest.mark.parametrize(("name", "stage", "transport"), CELLS)
def test_every_policy_has_the_bits_of_plain_training(
    pool: RankPool, tmp_path: Any, name: str, stage: int, transport: str
) -> None:
    for number, (policy, offload) in enumerate(SETTINGS):
        if policy == "some" and name in ("lora", "conv"):
            continue
        more: dict[str, Any] = {} if number % 2 else {"accumulate": 2, "max_norm": 0.5}
        for report, left in pool.run(trained, name, policy, offload, str(tmp_path), stage=stage, transport=transport, **more):
            assert report.is_bitwise, f"{name}, stage {stage}, {transport}, {policy}, {offload}: {report}"
            assert left == 0


ON_DISK = ("deep", "gpt", "lora", "own", "reentrant")


def check_everything_on_disk(pool: RankPool, directory: Any, name: str, transport: str, settings: list[tuple[str, str]]) -> None:
    """Policies beside parameters, gradients and optimizer states on disk, in one file with them and in one of their own."""
    states = sw.Offload(params="disk", grads="disk", optimizer="disk", path=directory, step_bytes=1 << 16)
    more: dict[str, Any] = dict(stage=3, transport=transport, states=states, accumulate=2, max_norm=0.5)
    for policy, offload in settings:
        for shares_file in (True, False) if offload == "disk" else (False,):
            answers = pool.run(trained, name, policy, offload, str(directory), shares_file=shares_file, **more)
            for report, left in answers:
                assert report.is_bitwise, f"{name}, {transport}, {policy}, {offload}, shares file {shares_file}: {report}"
                assert left == 0
    assert not [*directory.iterdir()], "nothing is left in the directory"


@pytest.mark.parametrize("number", range(len(ON_DISK)))
def test_everything_on_disk_has_the_bits_of_plain_training(pool: RankPool, tmp_path: Any, number: int) -> None:
    """Each setting once here; the whole grid is among the slow tests."""
    transport = ("shared", "copied", "pairwise")[number % 3]
    check_everything_on_disk(pool, tmp_path, ON_DISK[number], transport, SETTINGS[number :: len(ON_DISK)])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "copied", "pairwise"])
@pytest.mark.parametrize("name", ON_DISK)
def test_everything_on_disk_with_every_policy(pool: RankPool, tmp_path: Any, name: str, transport: str) -> None:
    check_everything_on_disk(pool, tmp_path, name, transport, SETTINGS)


ON_FOUR = ("deep", "gpt", "reentrant")


def check_four_ranks(
    pool4: RankPool, directory: Any, name: str, stage: int, transport: str, settings: list[tuple[str, str]]
) -> None:
    """docs/numerics.md, row `3 and 4 ranks, fp32, shared or pairwise`: equal to the last bit."""
    for number, (policy, offload) in enumerate(settings):
        more: dict[str, Any] = {"accumulate": 2, "max_norm": 0.5} if number % 2 else {}
        answers = pool4.run(trained, name, policy, offload, str(directory), stage=stage, transport=transport, **more)
        for report, left in answers:
            assert report.is_bitwise, f"{name}, stage {stage}, {transport}, {policy}, {offload}: {report}"
            assert left == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_ranks_have_the_bits_of_plain_training(pool4: RankPool, tmp_path: Any, stage: int) -> None:
    """Each setting once here; the whole grid is among the slow tests."""
    check_four_ranks(pool4, tmp_path, ON_FOUR[stage - 1], stage, "auto", SETTINGS[stage - 1 :: 3])


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "transport"), WAYS[1:])
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_with_every_policy(pool4: RankPool, tmp_path: Any, name: str, stage: int, transport: str) -> None:
    check_four_ranks(pool4, tmp_path, name, stage, transport, SETTINGS)


def summed_elsewhere(offload: str, directory: str, stage: int) -> float:
    """torch chooses the order of sums in the reference transport. SGD: Adam divides by gradients that may be all rounding."""
    torch.manual_seed(0)
    model = Deep()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, plain)]
    activations = sw.Activations(offload=offload, **({"path": directory} if offload == "disk" else {}))
    with Patched(keeping_module, "SMALL_BYTES", 1):
        run = sharded(model, optimizers[0], stage=stage, transport="reference", activations=activations)
        report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], deep_loss, steps=4, accumulate=2)
    run.close()
    return report.largest


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_ranks_summed_in_another_order_are_within_tolerance(pool4: RankPool, tmp_path: Any, stage: int) -> None:
    """docs/numerics.md, row `3 and more ranks, reference transport`; the stricter of its bounds, atol 1e-6."""
    for offload in ("device", "host", "disk"):
        for largest in pool4.run(summed_elsewhere, offload, str(tmp_path), stage):
            assert largest < 1e-6


# -- what is kept ------------------------------------------------------------------------------------------------------


def measured(policy: Any, offload: str, directory: str, batch: int, length: int, width: int, depth: int) -> dict[str, int]:
    """The bytes that are kept after a forward pass, per tier, and what was moved, for a GPT of a given shape."""
    from shardwise.testing.models import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=61, context=length, layers=depth, heads=2, hidden=width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = {"path": directory} if offload == "disk" else {}
    run = sharded(model, optimizer, stage=3, activations=sw.Activations(checkpoint=policy, offload=offload, **path))
    tokens = torch.randint(0, 61, (batch, length), generator=generator(0))
    found: dict[str, int] = {}
    for step in range(3):
        loss = model(tokens, tokens)
        found = {tier.value: run.ledger.now(tier, Kind.ACTIVATION) for tier in Tier}
        disk = run._keeping._store._disk if offload == "disk" else None
        written = disk.bytes_written if disk else 0
        loss.backward()
        optimizer.step()
        assert all(run.ledger.now(tier, Kind.ACTIVATION) == 0 for tier in Tier), "backward has used all of it"
        if disk is not None:
            found["written"], found["read"] = written // (step + 1), disk.bytes_read // (step + 1)
    if offload == "host":
        found["slabs"] = len(run._keeping._store._arena._slabs)
        found["space"] = run._keeping._store._arena.num_bytes
    run.close()
    return found


@pytest.mark.parametrize("shape", [(4, 32, 256, 6), (2, 64, 192, 4), (3, 48, 128, 9)])
@pytest.mark.parametrize(("policy", "interval"), [("units", 1), (2, 2), (3, 3)])
def test_bytes_of_checkpoints_follow_the_formula(
    pool: RankPool, tmp_path: Any, shape: tuple[int, int, int, int], policy: Any, interval: int
) -> None:
    batch, length, width, depth = shape
    formula = 4 * batch * length * width * -(-depth // interval)  # 2 bsz seq hd nl / ci in 16 bit; twice that in fp32
    for offload in ("device", "host", "disk"):
        for found in pool.run(measured, policy, offload, str(tmp_path), *shape):
            where = "disk" if offload == "disk" else "host"  # on a CPU, device and host are one memory
            assert found[where] == pytest.approx(formula, rel=0.02), (offload, found, formula)
            assert found["host" if where == "disk" else "disk"] == 0
            if offload == "disk":
                assert found["written"] == found["read"] == pytest.approx(formula, rel=0.02)
            if offload == "host":
                assert found["slabs"] == 1 and found["space"] <= max(1.02 * formula, 4 << 20), "one piece, and no larger"


class Plain(nn.Module):
    """Blocks that do what `body` says."""

    def __init__(self, body: Any, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Body(body) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Body(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0
        self._body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._body(self, x)


def alone(body: Any, **options: Any) -> tuple[sw.Run, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Plain(body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sharded(model, optimizer, stage=3, activations=sw.Activations(**options)), model, optimizer


def changes_its_input(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x.clone()) * 0.5  # backward does not need the input itself
    with torch.no_grad():
        x.mul_(2)
    return y


def changes_what_is_saved(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(self.linear(x))
    with torch.no_grad():
        y.mul_(2)
    return self.linear(y)


def test_a_tensor_that_is_changed_although_backward_needs_it_is_noticed() -> None:
    run, model, _ = alone(changes_what_is_saved)
    with pytest.raises(StaleGraphError, match=r"'blocks\.\d' has changed a tensor"):
        model(torch.randn(4, 8)).backward()
    run.close()


def counts(self: Body, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return torch.tanh(self.linear(x if self.count == 1 else torch.cat([x, x])))[: x.shape[0]]


def test_an_input_that_is_changed_in_place_is_noticed_or_was_copied() -> None:
    run, model, _ = alone(changes_its_input)
    with pytest.raises(StaleGraphError, match=r"'blocks\.\d'.*changed in place"):
        model(torch.randn(4, 8)).backward()
    run.close()
    with Patched(keeping_module, "SMALL_BYTES", 1):
        run, model, _ = alone(changes_its_input, offload="host")
        model(torch.randn(4, 8)).backward()
        grads = {name: grad for name, grad in run.iter_grads()}
        run.close()
    torch.manual_seed(0)
    plain = Plain(changes_its_input)
    plain(torch.randn(4, 8)).backward()
    assert all(torch.equal(param.grad, grads[name]) for name, param in plain.named_parameters())


def test_a_forward_that_does_something_else_the_second_time_is_refused() -> None:
    run, model, _ = alone(counts)
    with pytest.raises(ModelError, match=r"module 'blocks\.\d' saves .* when it is computed again"):
        model(torch.randn(4, 8)).backward()
    run.close()


def tanh(self: Body, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return torch.tanh(self.linear(x))


def test_backward_can_run_twice_and_in_parts() -> None:
    run, model, _ = alone(tanh, checkpoint=2)
    torch.manual_seed(0)
    plain = Plain(tanh)
    x = torch.randn(4, 8)
    for net in (model, plain):
        loss = net(x)
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
    grads = {name: grad for name, grad in run.iter_grads()}
    assert all(torch.equal(param.grad, grads[name]) for name, param in plain.named_parameters())
    assert [block.count for block in model.blocks] == [3, 3, 3], "once, and again for each backward"
    run.close()


def test_evaluation_keeps_nothing_and_computes_once() -> None:
    run, model, _ = alone(tanh)
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert [block.count for block in model.blocks] == [1, 1, 1]
    loss = model(torch.randn(4, 8))
    assert run.ledger.now(Tier.HOST, Kind.ACTIVATION) > 0
    del loss  # without a backward
    assert run.ledger.now(Tier.HOST, Kind.ACTIVATION) == 0
    run.close()


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    def fails(self: Body, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 2 and x.shape[0] == 3:
            raise ValueError("no")
        return torch.tanh(self.linear(x))

    run, model, _ = alone(fails)
    model(torch.randn(4, 8))
    with contextlib.suppress(ValueError):
        model(torch.randn(3, 8))
    model(torch.randn(4, 8)).backward()
    assert run.ledger.now(Tier.HOST, Kind.ACTIVATION) == 0
    run.close()


def test_autocast_is_the_same_the_second_time() -> None:
    run, model, _ = alone(tanh)
    torch.manual_seed(0)
    plain = Plain(tanh)
    x = torch.randn(4, 8)
    for net in (model, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x)
        loss.backward()
    grads = {name: grad for name, grad in run.iter_grads()}
    assert all(torch.equal(param.grad, grads[name]) for name, param in plain.named_parameters())
    run.close()


@pytest.mark.parametrize("offload", ["device", "host", "disk"])
def test_a_run_can_be_closed_before_its_graphs(tmp_path: Any, offload: str) -> None:
    unraised: list[Any] = []
    with Patched(keeping_module, "SMALL_BYTES", 1), Patched(sys, "unraisablehook", unraised.append):
        run, model, _ = alone(tanh, offload=offload, **({"path": tmp_path} if offload == "disk" else {}))
        loss = model(torch.randn(4, 8))
        run.close()
        del loss, model, run
        gc.collect()
    assert not unraised


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(checkpoint="unit"), "checkpoint='unit'"),
        (dict(checkpoint=0), "at least 1 block"),
        (dict(checkpoint=True), "checkpoint=True"),
        (dict(offload="hots"), "did you mean 'host'"),
        (dict(partition="tp"), "True, False or a process group"),
        (dict(bytes=1 << 30), "nothing is moved"),
        (dict(offload="host", bytes=5), "at least"),
        (dict(offload="host", path="/tmp"), "Use offload='disk'"),
        (dict(checkpoint=None), "Leave activations out"),
        (dict(chekpoint=1), "did you mean 'checkpoint'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        sw.Activations(**options)


def is_plain(model: nn.Module, optimizer: torch.optim.Optimizer, plain: nn.Module) -> bool:
    """Whether a model that was refused is still an ordinary one, which trains as its copy `plain` does."""
    if any(type(param) is not nn.Parameter for param in model.parameters()):
        return False
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for module in model.modules() for kind in hooks) or hasattr(model, "_shardwise_run"):
        return False
    for net, opt in ((model, optimizer), (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))):
        for number in range(2):
            deep_loss(net, number).backward()
            opt.step()
            opt.zero_grad()
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


BAD_POLICIES: dict[str, tuple[Any, type[Exception], str]] = {
    "names nothing": (lambda name, module: False, ConfigError, "none of the model's modules"),
    "raises": (lambda name, module: 1 // 0, ZeroDivisionError, "by zero"),
    "differs": (lambda name, module: name == f"blocks.{rank()}", RanksDifferError, "other modules to compute again than rank 0"),
    "one names nothing": (lambda name, module: rank() == 0 and name == "blocks.1", ConfigError, "none of the model's modules"),
    "one raises": (lambda name, module: 1 // (1 - rank()) and name == "blocks.1", ZeroDivisionError, "by zero"),
}


def refused(stage: int, transport: str, states: str | None, **activations: Any) -> tuple[str, str, bool]:
    """Shard with a policy that is bad on some ranks: (the error's type and text, whether the model is as it was)."""
    torch.manual_seed(0)
    model = Deep()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if "policy" in activations:
        activations["checkpoint"] = BAD_POLICIES[activations.pop("policy")][0]
    if "paths" in activations:
        activations["path"] = activations.pop("paths")[rank()]
    try:
        sharded(model, optimizer, stage=stage, transport=transport, offload=states, activations=sw.Activations(**activations))
    except Exception as error:
        return type(error).__name__, str(error), is_plain(model, optimizer, plain)
    return "", "not refused", False


REFUSALS = [(1, "auto", None), (2, "auto", None), (3, "shared", None), (3, "pairwise", "disk")]


@pytest.mark.parametrize(("stage", "transport", "states"), REFUSALS)
@pytest.mark.parametrize("policy", BAD_POLICIES)
def test_bad_policies_are_refused_on_all_ranks_and_change_nothing(
    pool: RankPool, policy: str, stage: int, transport: str, states: str | None
) -> None:
    _, error, text = BAD_POLICIES[policy]
    answers = pool.run(refused, stage, transport, states, policy=policy, timeout_s=60)
    for number, (kind, found, is_as_before) in enumerate(answers):
        is_other = policy.startswith("one ") and number == 0  # its own policy is good: it is told of the other's
        assert text in found and (not is_other or "rank 1" in found)
        assert kind == (RanksDifferError if is_other else error).__name__
        assert is_as_before


@pytest.mark.parametrize("bad", ["both", "one"])
def test_a_directory_that_is_missing_is_refused_on_all_ranks_and_changes_nothing(pool: RankPool, tmp_path: Any, bad: str) -> None:
    paths = [str(tmp_path / "missing") if bad == "both" else str(tmp_path), str(tmp_path / "missing")]
    for stage, transport, states in REFUSALS:
        answers = pool.run(refused, stage, transport, states, offload="disk", paths=paths, timeout_s=60)
        for number, (kind, found, is_as_before) in enumerate(answers):
            is_other = bad == "one" and number == 0
            assert f"{tmp_path / 'missing'} does not exist" in found and "path=" in found
            assert kind == (RanksDifferError if is_other else DiskError).__name__
            assert is_as_before


def test_models_without_blocks_are_refused_and_unchanged() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    before = [*model.parameters()]
    with pytest.raises(ConfigError, match="no repeated blocks"):
        sw.shard(model, stage=3, activations="units")
    assert [*map(id, model.parameters())] == [*map(id, before)] and type(before[0]) is nn.Parameter


def test_budgets_that_are_too_small_say_what_is_needed(tmp_path: Any) -> None:
    x = torch.randn(1 << 16, 8)
    for options in (dict(offload="host", bytes=1 << 20), dict(offload="disk", bytes=1 << 20, path=tmp_path)):
        run, model, _ = alone(tanh, **options)
        with pytest.raises(sw.ShardwiseError, match=r"Activations\(bytes=1048576\) does not suffice: .*2097152|4194304"):
            model(x)
        model(x[:4096]).backward()  # the run goes on with what fits
        assert all(run.ledger.now(tier, Kind.ACTIVATION) == 0 for tier in Tier)
        grads = dict(run.iter_grads())
        torch.manual_seed(0)
        plain = Plain(tanh)
        plain(x[:4096]).backward()
        assert all(torch.equal(param.grad, grads[name]) for name, param in plain.named_parameters())
        run.close()
