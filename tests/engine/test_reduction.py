"""Local gradients read as the flat vector of their Unit: any range, by the native copy and by torch, is the same."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch

from shardwise import native
from shardwise.engine import reduction
from shardwise.engine.reduction import LocalGrad
from shardwise.partition import make_layout


def a_unit(rng: random.Random) -> Any:
    shapes = [tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 7))]
    strides = [torch.empty(shape).stride() for shape in shapes]
    params = [(f"p{number}", shape, stride) for number, (shape, stride) in enumerate(zip(shapes, strides, strict=True))]
    return types.SimpleNamespace(layout=make_layout(params, 4, rng.randint(1, 3)))


def expected_vector(layout: Any, grads: dict[int, torch.Tensor]) -> torch.Tensor:
    vector = torch.zeros(layout.numel)
    for slot, grad in grads.items():
        place = layout.slots[slot]
        vector[place.offset : place.end] = grad.float().contiguous().reshape(-1)
    return vector


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_any_range_is_read(seed: int, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_native:
        monkeypatch.setattr(reduction, "library", lambda: None)
    rng = random.Random(seed)
    unit = a_unit(rng)
    layout = unit.layout
    kind = rng.choice(["as the parameters", "turned", "another dtype"])
    grads = {}
    for slot, place in enumerate(layout.slots):
        if rng.random() < 0.8:  # else this backward has not used it
            grad = torch.rand(place.shape)
            if kind == "turned" and len(place.shape) == 2:
                grad = grad.t().contiguous().t()
            grads[slot] = grad.double() if kind == "another dtype" and slot == 0 else grad
    source = LocalGrad(unit, grads, {slot: grad._version for slot, grad in grads.items()})
    expected = expected_vector(layout, grads)
    for _ in range(30):
        start = rng.randrange(layout.numel)
        out = torch.full((rng.randint(1, layout.numel - start),), -1.0)
        source(start, out)
        assert torch.equal(out, expected[start : start + out.numel()])


@pytest.mark.skipif(native.library() is None, reason="the native library was not built")
def test_small_gradients_are_copied_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = a_unit(random.Random(0))
    grads = {slot: torch.rand(place.shape) for slot, place in enumerate(unit.layout.slots)}
    source = LocalGrad(unit, grads, {})

    def refuse(*_: object) -> None:
        raise AssertionError("copied one by one")

    monkeypatch.setattr(reduction, "_read_flat", refuse)
    out = torch.zeros(unit.layout.numel)
    source(0, out)
    assert torch.equal(out, expected_vector(unit.layout, grads))
