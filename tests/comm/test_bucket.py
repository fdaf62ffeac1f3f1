"""Several vectors reduced as one: whatever is cut into whatever chunks arrives where it belongs, once."""

from __future__ import annotations

import random

import pytest
import torch

from shardwise.comm import BucketSink, BucketSource


class Vector:
    """A full vector as a source."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __call__(self, start: int, out: torch.Tensor) -> None:
        out.copy_(self.values[start : start + out.numel()])

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        return self.values[start : start + numel]


class Shard:
    """One rank's shard as a sink; every element must come exactly once."""

    def __init__(self, numel: int) -> None:
        self.values = torch.zeros(numel)
        self.times = torch.zeros(numel, dtype=torch.int64)

    def place(self, start: int, numel: int) -> torch.Tensor | None:
        return self.values[start : start + numel]

    def __call__(self, start: int, total: torch.Tensor) -> None:
        self.values[start : start + total.numel()] = total
        self.times[start : start + total.numel()] += 1


def joined(vectors: list[torch.Tensor], lengths: list[int], ranks: int) -> torch.Tensor:
    """The joined vector: rank by rank, that rank's slice of every vector."""
    parts = [v[rank * n : (rank + 1) * n] for rank in range(ranks) for v, n in zip(vectors, lengths, strict=True)]
    return torch.cat(parts)


def chunks(total: int, rng: random.Random) -> list[tuple[int, int]]:
    found, at = [], 0
    while at < total:
        numel = min(rng.choice([1, 2, 7, 30, total]), total - at)
        found.append((at, numel))
        at += numel
    return found


@pytest.mark.parametrize("seed", range(40))
def test_any_range_of_the_joined_vector_is_read(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    lengths = [rng.randint(1, 25) for _ in range(rng.randint(1, 6))]
    vectors = [torch.rand(ranks * n) for n in lengths]
    expected = joined(vectors, lengths, ranks)
    source = BucketSource([Vector(v) for v in vectors], lengths)
    for start, numel in chunks(expected.numel(), rng):
        out = torch.full((numel,), -1.0)
        source(start, out)
        assert torch.equal(out, expected[start : start + numel])
        view = source.view(start, numel)
        assert view is None or torch.equal(view, expected[start : start + numel])
    at = 0
    for length in lengths:  # a range inside one part needs no copy
        assert source.view(at, length) is not None
        at += length


@pytest.mark.parametrize("seed", range(40))
def test_every_element_reaches_its_shard_once(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 25) for _ in range(rng.randint(1, 6))]
    shards = [Shard(n) for n in lengths]
    sink = BucketSink(shards, lengths)
    totals = torch.rand(sum(lengths))
    for start, numel in chunks(totals.numel(), rng):
        place = sink.place(start, numel)
        if place is not None:
            place.copy_(totals[start : start + numel])
        sink(start, totals[start : start + numel] if place is None else place)
    assert torch.equal(torch.cat([shard.values for shard in shards]), totals)
    assert all(bool((shard.times == 1).all()) for shard in shards)
