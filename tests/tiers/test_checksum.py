"""One checksum: the same with and without the native library, and no single change goes unseen."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from marks import needs_native
from shardwise import native
from shardwise.tiers import checksum

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool)


def _random(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_forms_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [_random(numel, dtype, numel) for numel in (0, 1, 7, 511, 512, 513, 4096, 10_007)]
    values.append(_random(6000, dtype, 1).view(60, 100).t())  # as if it were contiguous
    values.append(_random(6001, dtype, 2)[1:])  # an odd address
    found = [checksum(value) for value in values]
    monkeypatch.setattr(native, "library", lambda: None)
    assert [checksum(value) for value in values] == found
    assert len(set(found)) == len(found)


def test_any_flipped_bit_shows() -> None:
    rng = random.Random(0)
    for numel in (1, 100, 1500):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        before = checksum(values)
        raw = values.view(torch.int32)
        for _ in range(300):
            at, bit = rng.randrange(numel), rng.randrange(32)
            flip = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            raw[at] ^= flip
            assert checksum(values) != before, (at, bit)
            raw[at] ^= flip
    assert checksum(values) == before


def _changes(a: torch.Tensor) -> dict[str, torch.Tensor]:
    """What training code does to a whole matrix, or to every so many elements of it."""
    found = {"negated": -a, "doubled": a * 2, "halved": a / 2, "transposed": a.t().contiguous(), "zeroed": a * 0}
    for step in (1, 2, 3, 4, 8, 16, 64):
        for start in (0, 1, 3):
            for factor in (-1.0, 2.0, 0.5, 4.0, 256.0):
                changed = a.clone()
                changed[:, start::step] *= factor
                found[f"columns {start}::{step} times {factor}"] = changed
                changed = a.clone()
                changed[start::step, 1::2] *= factor
                found[f"rows {start}::{step}, odd columns times {factor}"] = changed
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_regular_changes_show(dtype: torch.dtype, size: int) -> None:
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = checksum(a)
    for name, changed in _changes(a).items():
        assert torch.equal(changed, a) == (checksum(changed) == before), name


def test_a_default_device_does_not_matter() -> None:
    expected = checksum(torch.arange(5000.0))
    sys.modules["shardwise.tiers.checksum"]._weights.cache_clear()
    values = torch.arange(5000.0)
    with torch.device("meta"):
        assert checksum(values) == expected


def test_moved_elements_and_lengths_show() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    seen = {
        checksum(values),
        checksum(values.flip(0)),
        checksum(values.roll(1)),
        checksum(values.roll(512)),
        checksum(values[:-1]),
    }
    seen |= {checksum(torch.zeros(numel)) for numel in (0, 1, 2, 1000)}
    assert len(seen) == 9
    assert all(0 <= mark < 1 << 62 for mark in seen), "its negative fits 64 bits"
