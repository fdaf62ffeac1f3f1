"""Units are found without hints, and every parameter is in exactly one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from cases import CASES
from shardwise.config import UnitRule
from shardwise.errors import ConfigError, ModelError
from shardwise.partition import find_units, join_small
from shardwise.testing.models import GPT, GPTBlock, GPTConfig

BOUND = 256 << 20
DTYPES = (torch.float32, torch.float32, torch.float16)


def names(model: nn.Module, rule: UnitRule | None = None, bound: int = BOUND) -> dict[str, list[str]]:
    return {spec.name: [info.name for info in spec.infos] for spec in find_units(model, rule, bound)}


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_parameter_is_in_exactly_one_unit(case: str) -> None:
    model = CASES[case].build()
    found = [name for group in names(model).values() for name in group]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


def test_repeated_blocks_are_units_and_the_rest_goes_to_the_root() -> None:
    model = GPT(GPTConfig(vocabulary=67, context=16, layers=3, heads=2, hidden=24))
    found = names(model)
    assert list(found) == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert found["root"] == ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"]


def test_a_huge_tied_embedding_stands_alone_at_the_common_ancestor() -> None:
    specs = find_units(GPT(GPTConfig(vocabulary=9000, context=16, layers=2, heads=2, hidden=64)), None, BOUND)
    table = next(spec for spec in specs if spec.name == "wte.weight")
    assert table.infos[0].names == ("wte.weight", "head.weight")
    assert table.module_path == ""


def test_a_block_above_the_bound_is_split() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)))
    assert list(names(model)) == ["0", "1"]
    assert list(names(model, bound=20_000)) == ["0.0", "0.1", "1.0", "1.1"]


def test_the_rest_above_the_bound_goes_to_children() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 32)

    assert list(names(Pair())) == ["root"]
    assert list(names(Pair(), bound=18_000)) == ["left", "right"]


def test_frozen_parameters_and_other_dtypes_are_their_own_units() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3).double())
    specs = find_units(nn.ModuleDict({"a": model}), lambda m: isinstance(m, nn.Sequential), BOUND)
    assert {spec.name for spec in specs} == {"a:float32", "a:float32:frozen", "a:float64"}
    assert [spec.is_trainable for spec in specs if spec.name.endswith("frozen")] == [False]


def test_the_user_can_name_units() -> None:
    model = GPT(GPTConfig(vocabulary=67, context=16, layers=2, heads=2, hidden=24))
    assert list(names(model, GPTBlock)) == ["root", "blocks.0", "blocks.1"]
    assert "blocks.0.up" in names(model, (nn.Linear,))
    assert list(names(model, lambda m: m is model)) == ["root"]
    with pytest.raises(ConfigError, match=r"matches no module.*GPTBlock"):
        names(model, nn.LSTM)


def test_a_parameter_shared_by_blocks_belongs_to_their_ancestor() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    model[2][0].weight = model[0][0].weight
    found = names(model)
    assert "0.0.weight" in found["root"]
    assert found["2"] == ["2.0.bias"]


def test_small_units_of_one_kind_are_joined() -> None:
    blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(10))  # 256 KiB each
    blocks[3].requires_grad_(False)
    specs = find_units(nn.ModuleDict({"a": blocks}), None, BOUND)
    found = join_small(specs, 1 << 20)
    assert [spec.name for spec in found] == ["a.0 to a.4", "a.3", "a.5 to a.8", "a.9"]
    assert [spec.is_trainable for spec in found] == [True, False, True, True]
    assert [spec.module_path for spec in found] == ["", "a.3", "", "a.9"]
    assert [spec.joined_paths for spec in found] == [("a.0", "a.1", "a.2", "a.4"), (), ("a.5", "a.6", "a.7", "a.8"), ()]
    only, frozen = join_small(specs, 1 << 30)
    assert only.joined_paths == ("", *(f"a.{n}" for n in range(10) if n != 3)), "the model opens the only joined Unit too"
    assert frozen.joined_paths == ()
    assert join_small(specs, 256 << 10) == join_small(specs, 0) == specs


def test_joined_units_have_every_parameter_once_and_keep_the_bound() -> None:
    rng = random.Random(3)
    for _ in range(300):
        layers = [nn.Linear(rng.randrange(1, 40), rng.randrange(1, 40), dtype=rng.choice(DTYPES)) for _ in range(12)]
        for layer in layers:
            layer.requires_grad_(rng.random() < 0.8)
        specs = find_units(nn.ModuleDict({"a": nn.ModuleList(layers)}), nn.Linear, BOUND)
        bound = rng.randrange(0, 20_000)
        found = join_small(specs, bound)
        names = [info.name for spec in found for info in spec.infos]
        assert sorted(names) == sorted(info.name for spec in specs for info in spec.infos)
        for spec in found:
            assert {(info.param.dtype, info.param.requires_grad) for info in spec.infos} == {
                (spec.infos[0].param.dtype, spec.is_trainable)
            }
            assert spec in specs or (spec.num_bytes <= bound and spec.module_path == "")
        assert [names.index(spec.infos[0].name) for spec in found] == sorted(names.index(s.infos[0].name) for s in found)


def test_no_parameters_is_an_error() -> None:
    with pytest.raises(ModelError, match="no parameters"):
        find_units(nn.ReLU(), None, BOUND)


def test_zero_size_and_scalar_parameters_have_a_place() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.empty(0, 3))

    assert names(Odd()) == {"root": ["scalar", "empty"]}
