"""Portions of a streamed step: together they are all Units, in order, each within its limit, at the places of the shelves."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest

from shardwise.optim.states import cut
from shardwise.tiers import QUANTUM, whole_quanta


@pytest.mark.parametrize("seed", range(60))
def test_portions_cover_all_units_in_order(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, QUANTUM - 1, QUANTUM, QUANTUM + 1, rng.randint(1, 9 * QUANTUM)]) for _ in range(rng.randint(1, 9))]
    units: list[Any] = [types.SimpleNamespace(span=types.SimpleNamespace(numel=length)) for length in lengths]
    most = rng.choice([1, QUANTUM, 3 * QUANTUM + 5, 100 * QUANTUM])
    limit = max(most // QUANTUM, 1) * QUANTUM
    portions = cut(units, most)
    starts, at = {}, 0  # a shelf puts Units one after the other, each at a whole quantum
    for unit, length in zip(units, lengths, strict=True):
        starts[id(unit)] = at
        at += whole_quanta(length)
    covered = []
    end = 0
    for portion in portions:
        assert portion.start == end and 0 < portion.numel <= limit
        end += portion.numel
        for run in portion.runs:
            assert portion.start + run.at == starts[id(run.unit)] + run.low
            covered.append((id(run.unit), run.low, run.high))
    assert end == at
    expected = []
    for unit, length in zip(units, lengths, strict=True):
        expected += [(id(unit), low, min(low + limit, length)) for low in range(0, length, limit)]
    assert covered == expected
