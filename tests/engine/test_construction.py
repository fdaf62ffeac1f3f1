"""sharded_init: bit-identical parameters, bounded peak memory, later touches honoured."""

from __future__ import annotations

import copy
import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

import shardwise as sw
from cases import CASES, sharded
from launching import run_program
from shardwise.errors import FreedParameterError, RanksDifferError
from shardwise.partition import FreedParameter
from shardwise.testing import RankPool
from shardwise.testing.parity import compare_with_plain


class Fancy(nn.Module):
    """Initialises by hand, after the fact, through apply, by index, and ties."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 7)
        self.first.weight.data.normal_(std=0.1)
        with torch.no_grad():
            self.first.bias[2] = 5.0
            self.first.bias.mul_(2.0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)) for _ in range(2)])
        self.table = nn.Embedding(7, 11, padding_idx=1)
        self.direct = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(11, 7, bias=False)
        self.apply(self._init)
        self.head.weight = self.table.weight
        self.first.bias.requires_grad_(False)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, gain=0.5)
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.3)
            module.weight.data[module.padding_idx].zero_()


def identical(kind: str, stage: int) -> dict[str, bool]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return Fancy() if kind == "fancy" else _transformers_model(kind)

    plain = make()
    with sw.sharded_init():
        model = make()
    assert all(isinstance(p, FreedParameter) for p in model.parameters())
    checks = {
        "random state": True,
        "names": [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()],
    }
    expected = torch.rand(3)
    plain_again = make()
    checks["random state"] = bool(torch.equal(expected, torch.rand(3))) and plain_again is not None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run = sharded(model, optimizer, stage=stage)
    state = run.full_state_dict(rank0_only=False)
    for name, value in plain.state_dict().items():
        checks[name] = torch.equal(state[name], value)
    checks["requires_grad"] = [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    run.close()
    return checks


def _transformers_model(kind: str) -> nn.Module:
    import transformers

    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=211, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=97,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["fancy", "gpt2", "llama"])
def test_parameters_are_bit_identical_to_plain_construction(pool: RankPool, kind: str, stage: int) -> None:
    for checks in pool.run(identical, kind, stage):
        assert len(checks) > 8
        assert all(checks.values()), {k: v for k, v in checks.items() if not v}


def trains(kind: str) -> Any:
    torch.manual_seed(3)
    plain = _transformers_model(kind)
    torch.manual_seed(3)
    with sw.sharded_init():
        model = _transformers_model(kind)
    for m in (model, plain):
        m.eval()  # no dropout; transformers draws it from the global generator otherwise
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=3)

    def loss(m: nn.Module, number: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(number * 2 + torch.distributed.get_rank())
        tokens = torch.randint(0, 97, (2, 12), generator=g)
        return m(input_ids=tokens, labels=tokens).loss

    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=3, accumulate=2)
    run.close()
    return report


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_models_train_with_parity(pool: RankPool, kind: str) -> None:
    for report in pool.run(trains, kind):
        assert report.is_bitwise, str(report)


def touched_too_early() -> tuple[str, str]:
    with sw.sharded_init():
        model = CASES["mlp"].build()
    try:
        model(torch.randn(1, 13))
        first = "ran"
    except FreedParameterError as error:
        first = str(error)
    torch.manual_seed(torch.distributed.get_rank())  # ranks that draw different numbers
    with sw.sharded_init():
        other = CASES["mlp"].build()
    try:
        sharded(other, stage=3)
        second = "accepted"
    except RanksDifferError as error:
        second = str(error)
    return first, second


def test_mistakes_are_named(pool: RankPool) -> None:
    for first, second in pool.run(touched_too_early):
        assert "autograd would record it" in first and "call sw.shard" in first
        assert "differ in the values of parameter 'layers.0.weight'" in second


def test_world_of_one_and_an_exception_inside() -> None:
    with pytest.raises(ZeroDivisionError), sw.sharded_init():
        raise ZeroDivisionError
    assert type(nn.Linear(2, 2).weight) is nn.Parameter, "the hooks must be gone"
    torch.manual_seed(0)
    plain = CASES["gpt"].build()
    torch.manual_seed(0)
    with sw.sharded_init():
        model = CASES["gpt"].build()
    run = sharded(model, stage=3)
    assert all(torch.equal(run.master(n), p) for n, p in plain.named_parameters())


def test_peak_memory_of_building_gpt2_is_shards_plus_three_largest_units(tmp_path: Path) -> None:
    """A transformers GPT-2 with the proportions of the 124M one, 2 ranks, in processes of their own."""
    script = Path(__file__).parents[2] / "benchmarks" / "construction.py"
    result = run_program(
        [sys.executable, str(script), "--layers", "6", "--hidden", "512", "--vocabulary", "50257", "--rounds", "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "within the bound: yes" in result.stdout, result.stdout
    assert "bit-identical: yes" in result.stdout, result.stdout


def lost_write(through_data: bool) -> str:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(3000, 1500), nn.Linear(3000, 1500)
            with torch.no_grad():
                for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    k.data.copy_(q.data) if through_data else k.copy_(q)

    torch.manual_seed(0)
    try:
        with sw.sharded_init():
            model = Momentum()
    except sw.ShardwiseError as error:
        return str(error)
    run = sharded(model, stage=3)
    same = torch.equal(run.master("query.weight"), run.master("key.weight"))
    run.close()
    return "equal" if same else "lost silently"


def test_copies_between_modules_are_kept_or_refused(pool: RankPool) -> None:
    assert pool.run(lost_write, False) == ["equal", "equal"]
    for text in pool.run(lost_write, True):  # too large to keep both gathered
        assert "the write was lost" in text and "param.copy_" in text


class SplitOwner(nn.Module):
    """A huge weight gets a Unit of its own, apart from the bias it was built with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.wide = nn.Linear(8, 40_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.wide(x).square().mean()


def split_owner(stage: int) -> Any:
    torch.manual_seed(0)
    plain = SplitOwner()
    torch.manual_seed(0)
    with sw.sharded_init():
        model = SplitOwner()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=stage)
    assert "wide.weight" in run.units and len(run.units) == 4
    loss = lambda m, k: m(torch.full((2, 8), 0.1 * k + torch.distributed.get_rank()))  # noqa: E731
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=2)
    run.close()
    return report


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_module_whose_parameters_go_to_different_units(pool: RankPool, stage: int) -> None:
    for report in pool.run(split_owner, stage):
        assert report.is_bitwise, str(report)


# -- what libraries do under sharded_init -------------------------------------------------------------------------


def _weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))


def _copied_block() -> nn.Module:
    block = nn.Linear(4, 4)
    return nn.Sequential(block, copy.deepcopy(block), copy.deepcopy(block))


def _given_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.data = torch.full((4, 4), 0.5)
    nn.utils.vector_to_parameters(torch.arange(20.0) / 7, model[1].parameters())
    with torch.no_grad():
        model[0].bias.set_(torch.ones(4))
    return model


BUILDS: dict[str, Any] = {
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
    "Transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "deepcopy": _copied_block,
    "weight_norm": _weight_normed,
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "data and set_": _given_data,
}


def built(name: str) -> bool:
    torch.manual_seed(0)
    plain = BUILDS[name]()
    torch.manual_seed(0)
    with sw.sharded_init():
        model = BUILDS[name]()
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    state, expected = run.full_state_dict(rank0_only=False), plain.state_dict()
    run.close()
    return list(state) == list(expected) and all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", sorted(BUILDS))
def test_what_modules_do_while_they_are_built(pool: RankPool, name: str) -> None:
    assert pool.run(built, name) == [True, True]


def test_tying_through_data_is_refused_in_both_worlds() -> None:
    with pytest.raises(sw.ShardwiseError, match="as one"), sw.sharded_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.data = model[0].weight.data
        model[0].weight.norm()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(sw.errors.ModelError, match="over the same memory"):
        sharded(model, stage=2)


def adapted(stage: int) -> dict[str, Any]:
    """The base is built under sharded_init, adapters are added outside, as everybody does who fine-tunes a model too large."""
    import peft

    def make() -> nn.Module:
        torch.manual_seed(3)
        return _transformers_model("llama")

    def adapt(base: nn.Module) -> Any:
        torch.manual_seed(4)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    plain = adapt(make())
    with sw.sharded_init():
        base = make()
    base.requires_grad_(False)
    model = adapt(base)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=stage)
    tokens = torch.arange(12).view(2, 6) + torch.distributed.get_rank()
    loss = lambda m, k: m(input_ids=tokens + k, labels=tokens + k).loss  # noqa: E731
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=3)
    run.close()
    return {"parity": report.is_bitwise, "text": str(report)}


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_on_a_model_built_under_sharded_init(pool: RankPool, stage: int) -> None:
    for found in pool.run(adapted, stage):
        assert found["parity"], found["text"]


def pretrained(path: str, dtype: str, offload: str | None) -> dict[str, bool]:
    import transformers

    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    with sw.sharded_init(offload=offload):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    found = {"partitioned": all(isinstance(p, FreedParameter) for p in model.parameters())}
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, offload=offload)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        found["logits"] = torch.equal(model(tokens).logits, plain(tokens).logits)
    state, expected = run.full_state_dict(rank0_only=False), plain.state_dict()
    found["values"] = list(state) == list(expected) and all(torch.equal(state[key], expected[key]) for key in expected)
    run.close()
    return found


@pytest.mark.parametrize(
    ("kind", "shards", "dtype", "offload"),
    [
        ("llama", "1GB", "float32", None),
        ("gpt2", "40KB", "float32", None),
        ("llama", "20KB", "bfloat16", None),
        ("gpt2", "1GB", "float32", "disk"),
    ],
)
def test_from_pretrained(pool: RankPool, tmp_path: Path, kind: str, shards: str, dtype: str, offload: str | None) -> None:
    torch.manual_seed(0)
    _transformers_model(kind).to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards != "1GB")
    for found in pool.run(pretrained, str(tmp_path), dtype, offload):
        assert all(found.values()), found


INITS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": lambda w: nn.init.normal_(w, std=0.02),
    "uniform": lambda w: nn.init.uniform_(w, -2.0, 3.0),
    "constant": lambda w: nn.init.constant_(w, 3.5),
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "eye": nn.init.eye_,
    "xavier": nn.init.xavier_normal_,
    "kaiming": lambda w: nn.init.kaiming_uniform_(w, nonlinearity="relu"),
    "trunc": lambda w: nn.init.trunc_normal_(w, std=0.5),
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "method": lambda w: no_grad(lambda: w.normal_(0.0, 0.1)),
    "copy": lambda w: no_grad(lambda: w.copy_(torch.arange(float(w.numel())).reshape(w.shape))),
    "broadcast": lambda w: no_grad(lambda: w.copy_(torch.arange(float(w.shape[1])))),
}


NOTICED_LATE = ("eye", "trunc", "orthogonal", "sparse")
"""Functions of nn.init that torch lets nobody override as a whole: their parts gather."""


def no_grad(function: Callable[[], object]) -> object:
    with torch.no_grad():
        return function()


def initialised_again(name: str) -> tuple[bool, bool, int]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 30))
        for layer in model:
            assert INITS[name](layer.weight) is layer.weight
        return model

    plain = build()
    with sw.sharded_init():
        model = build()
    counters = model[0].weight._shardwise.unit.owner.transport.counters
    num_gathers = counters.calls.get("gather", 0)
    run = sharded(model, stage=3)
    values = run.full_state_dict(rank0_only=False)
    same = all(torch.equal(values[key], value) for key, value in plain.state_dict().items())
    run.close()
    drawn = torch.rand(1)
    build()
    return same, torch.equal(drawn, torch.rand(1)), num_gathers


@pytest.mark.parametrize("name", INITS)
def test_initialising_again(pool: RankPool, name: str) -> None:
    for same, is_in_step, num_gathers in pool.run(initialised_again, name):
        assert same
        assert is_in_step, "the generator is where plain construction leaves it"
        assert num_gathers == 0 or name in NOTICED_LATE


def copied_out() -> list[bool]:
    """Parameters as the source of a write into something else."""
    found = []
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    torch.manual_seed(0)
    with sw.sharded_init():
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        mine = torch.zeros(5, 5)
        with torch.no_grad():
            found.append(mine.copy_(model[0].weight) is mine)
            model[1].weight.data.copy_(model[0].weight)
    found.append(torch.equal(mine, plain[0].weight))
    run = sharded(model, stage=3)
    values = run.full_state_dict(rank0_only=False)
    found += [torch.equal(values[name], plain[0].weight) for name in ("0.weight", "1.weight")]
    run.close()
    return found


def test_a_parameter_that_is_copied_from_keeps_its_values(pool: RankPool) -> None:
    for found in pool.run(copied_out):
        assert all(found) and len(found) == 4, found


def initialised_under_an_alias() -> bool:
    with sw.sharded_init():
        model = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(6)))  # more than the window's room
        alias = model[0].weight.data
        with torch.no_grad():
            for layer in model:
                layer.weight.add_(1.0)
        del alias
        nn.init.zeros_(model[0].weight)
    run = sharded(model, stage=3)
    found = bool((run.full_state_dict(rank0_only=False)["0.weight"] == 0).all())
    run.close()
    return found


def test_initialising_after_an_alias_was_held(pool: RankPool) -> None:
    assert pool.run(initialised_under_an_alias) == [True, True]


# -- what a construction leaves ------------------------------------------------------------------------------------


class TiedLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.kept = self.head.weight if dist.get_rank() == 0 else None  # user code may hold what tying replaces
        self.head.weight = self.table.weight


def leftovers() -> tuple[bool, int, list[bool]]:
    """Without the garbage collector: whether a held parameter has its values, Units after building, and what is left."""
    gc.collect()
    gc.disable()
    try:
        with sw.sharded_init():
            model = TiedLater()
        construction = model.table.weight._shardwise.unit.owner
        num_units = len(construction.digests)
        is_usable = model.kept is None or bool(model.kept._shardwise.unit.shard.count_nonzero())
        ends = [weakref.ref(construction), weakref.ref(construction.transport), *map(weakref.ref, construction.digests)]
        model.kept = None
        del construction
        sharded(model, stage=3).close()
        return is_usable, num_units, [end() is None for end in ends[:3]]
    finally:
        gc.enable()


def test_a_construction_ends_without_the_garbage_collector(pool: RankPool) -> None:
    (is_usable, num_held, _), (_, num_units, is_gone) = pool.run(leftovers)
    assert is_usable and (num_held, num_units) == (2, 1), "what tying replaced goes, unless user code holds it"
    assert is_gone == [True] * 3
