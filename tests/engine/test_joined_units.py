"""Small Units that were joined at stage 3: gathered once for several blocks, freed soon after, counted by the formula."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from cases import Patched, sharded
from shardwise.observe import delays
from shardwise.testing import ParityReport, RankPool, compare_with_plain
from shardwise.tiers import Kind, Tier

WIDTH, BLOCKS = 24, 8
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Block(nn.Module):
    def __init__(self, *, is_adapted: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, 2, bias=False) if is_adapted else None
        self.back = nn.Linear(2, WIDTH, bias=False) if is_adapted else None
        self.base.requires_grad_(not is_adapted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return torch.tanh(y if self.adapter is None or self.back is None else y + self.back(self.adapter(x)))


class Blocks(nn.Module):
    """Blocks that take part by number: `skips` differs between ranks if user code says so."""

    def __init__(self, *, is_adapted: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(is_adapted=is_adapted) for _ in range(BLOCKS))
        self.skips: set[int] = set()
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.skips:
                x = block(x)
            if self.writes and number == 3:
                with torch.no_grad():
                    block.base.bias.add_(0.125)  # after its use: the graph saves no bias
        return x.square().mean()


def make(*, is_adapted: bool, transport: str, bound: int) -> tuple[Any, ...]:
    torch.default_generator.manual_seed(0)
    model = Blocks(is_adapted=is_adapted)
    plain = copy.deepcopy(model)
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (model, plain)]
    optimizers = [torch.optim.AdamW(params, lr=1e-2) for params in trained]
    run = sharded(model, optimizers[0], stage=3, transport=transport, min_unit_bytes=bound)
    return run, model, optimizers[0], plain, optimizers[1]


def loss(model: nn.Module, number: int) -> torch.Tensor:
    rank = torch.distributed.get_rank()
    return model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank)))


def events(transport: str, is_adapted: bool = False) -> list[tuple[str, str]]:
    run, model, optimizer, _, _ = make(is_adapted=is_adapted, transport=transport, bound=3 * BLOCK_BYTES)
    for number in range(2):
        run.events.clear()
        loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = run.events.listing("gather", "free", "backward", "reduce")
    run.close()
    return found


def test_a_joined_unit_is_gathered_once_in_each_direction(pool: RankPool) -> None:
    first, second, third = units = ["blocks.0 to blocks.2", "blocks.3 to blocks.5", "blocks.6 to blocks.7"]
    expected = [("gather", first), ("gather", second), ("free", first), ("gather", third), ("free", second), ("free", third)]
    expected += [("backward", "")]
    expected += [("gather", third), ("gather", second), ("free", third), ("gather", first), ("free", second)]
    expected += [("reduce", name) for name in reversed(units)]  # one exchange
    expected += [("free", first)]
    for found in pool.run(events, "copied"):
        assert found == expected
    for found in pool.run(events, "shared"):  # overlays: the model's own forward opens all of them
        assert found[:3] == [("gather", name) for name in units] and sorted(found[3:6]) == [("free", name) for name in units]
        assert found[6:] == [("backward", ""), *(("reduce", name) for name in reversed(units))]


def test_joined_units_of_two_kinds_do_not_displace_each_other(pool: RankPool) -> None:
    for found in pool.run(events, "copied", is_adapted=True):
        gathers = Counter(name for kind, name in found if kind == "gather")
        assert len(gathers) >= 4 and set(gathers.values()) <= {1, 2}, gathers  # once in each direction


def parities(transport: str, is_adapted: bool, bound: int) -> ParityReport:
    run, model, optimizer, plain, plain_optimizer = make(is_adapted=is_adapted, transport=transport, bound=bound)
    model.writes = plain.writes = not is_adapted
    report = compare_with_plain(run, model, optimizer, plain, plain_optimizer, loss, steps=6, accumulate=2)
    run.close()
    return report


@pytest.mark.parametrize("transport", ["shared", "copied", "pairwise"])
@pytest.mark.parametrize("is_adapted", [False, True], ids=["written in forward", "adapters between frozen layers"])
def test_joined_units_train_as_plain_ones_do(pool: RankPool, transport: str, is_adapted: bool) -> None:
    for bound in (2 * BLOCK_BYTES, 5 * BLOCK_BYTES, 100 * BLOCK_BYTES):
        for report in pool.run(parities, transport, is_adapted, bound):
            assert report.is_bitwise, f"{bound}: {report}"


def different_blocks() -> bool:
    """Ranks leave out different blocks of one joined Unit, which a gather of single blocks could not do over messages."""
    run, model, optimizer, plain, plain_optimizer = make(is_adapted=False, transport="pairwise", bound=100 * BLOCK_BYTES)
    model.skips = plain.skips = {1, 2} if torch.distributed.get_rank() else {6}
    report = compare_with_plain(run, model, optimizer, plain, plain_optimizer, loss, steps=4)
    run.close()
    return report.is_bitwise


def test_ranks_may_use_different_blocks_of_a_joined_unit(pool: RankPool) -> None:
    assert pool.run(different_blocks) == [True, True]


def most_gathered(bound: int, is_adapted: bool) -> tuple[int, int, int]:
    """Largest bytes of full vectors that the ledger saw, the formula's, and the largest Unit's."""
    run, model, optimizer, _, _ = make(is_adapted=is_adapted, transport="copied", bound=bound)
    exchange = run.transport.planned_exchange_bytes
    begin = run.ledger.now(Tier.HOST, Kind.BUFFER)
    for number in range(3):
        loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = run.ledger.peak(Tier.HOST, Kind.BUFFER) - begin
    largest = max(unit.full_bytes for unit in run._runtime.units)
    result = seen, run.predicted_memory().buffer - exchange, largest
    run.close()
    return result


@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_formula_counts_what_stays_gathered(pool: RankPool, is_adapted: bool) -> None:
    for bound in (0, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES, 100 * BLOCK_BYTES):
        for seen, predicted, largest in pool.run(most_gathered, bound, is_adapted):
            assert largest <= seen <= predicted, (bound, seen, predicted)
            assert is_adapted or seen == predicted, (bound, seen, predicted)


# -- blocks that are called without the model's own forward ------------------------------------------------------------


def by_blocks(transport: str, bound: int) -> tuple[bool, int]:
    """Blocks are called one by one; over shared memory some are frozen, and rank 1 uses only those. Counts a step's gathers."""
    torch.default_generator.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    model = nn.ModuleDict({name: make() for name in ("first", "second", "third", "fourth")})
    for name in ("third", "fourth"):
        model[name].requires_grad_(transport != "shared")
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=3, transport=transport, min_unit_bytes=bound, timeout_s=20.0)

    def pairs(m: nn.Module, number: int) -> torch.Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number), requires_grad=True)
        uses_frozen = torch.distributed.get_rank() == 1 and transport == "shared"
        first, second = ("third", "fourth") if uses_frozen else ("first", "second")
        return m[second](m[first](x)).square().mean()

    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], pairs, steps=3)
    run.events.clear()
    pairs(model, 9).backward()
    num_gathers = len(run.events.listing("gather"))
    run.close()
    return report.is_bitwise, num_gathers


@pytest.mark.parametrize("transport", ["shared", "copied", "pairwise"])
def test_blocks_that_are_called_alone_are_joined_in_backward_too(pool: RankPool, transport: str) -> None:
    apart = pool.run(by_blocks, transport, 0)
    joined = pool.run(by_blocks, transport, 100 * BLOCK_BYTES)
    assert all(is_bitwise for is_bitwise, _ in [*apart, *joined])
    for (_, alone), (_, together) in zip(apart, joined, strict=True):
        assert together <= alone, "a call gathers its Unit once, not once per operation"


# -- several that linger, and several kinds ----------------------------------------------------------------------------


class Rows(nn.Module):
    def __init__(self, rows: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 256, dtype=dtype) * 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.weight.dtype)
        return x + ((y @ self.weight.t()) @ self.weight).to(x.dtype)


def uneven(sizes: list[int], bound: int) -> tuple[int, int]:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(*(Rows(rows) for rows in sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=3, transport="copied", min_unit_bytes=1024 * bound)
    exchange = run.transport.planned_exchange_bytes
    begin = run.ledger.now(Tier.HOST, Kind.BUFFER)
    for _ in range(2):
        model(torch.ones(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    result = run.ledger.peak(Tier.HOST, Kind.BUFFER) - begin, run.predicted_memory().buffer - exchange
    run.close()
    return result


def test_the_formula_counts_all_that_linger(pool: RankPool) -> None:
    rng = random.Random(7)
    cases = [[25, 25, 76, 25, 25, 60, 40], *([rng.randrange(1, 90) for _ in range(9)] for _ in range(8))]
    for sizes in cases:
        for seen, predicted in pool.run(uneven, sizes, 100):
            assert seen <= predicted, (sizes, seen, predicted)


class Mixed(nn.Module):
    """A large parameter of one dtype beside a small one of another, which is joined with those of the other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(1024, 1024, bias=False)
        self.small = nn.Parameter(torch.ones(320 * 128, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(x) * 1e-2 + self.small.mean().float() * x


def most_grads(bound: int, stage: int) -> tuple[int, int]:
    """Largest bytes of gradients, with those that have arrived before their Unit was complete; and the formula's."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(*(Mixed() for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=stage, transport="shared", min_unit_bytes=bound)
    ledger, arrivals, most = run.ledger, run._runtime._arrivals, 0
    reserve = ledger.reserve

    def look(tier: Tier, kind: Kind, num_bytes: int) -> None:
        nonlocal most
        reserve(tier, kind, num_bytes)
        waiting = sum(entry.grad.nbytes for arrived in arrivals._arrived for entry in arrived)
        most = max(most, waiting + ledger.now(Tier.HOST, Kind.GRAD))

    with Patched(ledger, "reserve", look), delays(lambda edge: time.sleep(0.02) if edge.startswith("reduce") else None):
        for _ in range(2):  # slow reductions: as many buckets as may be are under way
            model(torch.ones(2, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    result = most, run.predicted_memory().grad
    run.close()
    return result


def test_gradients_of_a_unit_that_spans_the_model_are_counted(pool: RankPool) -> None:
    for stage in (2, 3):
        for bound in (0, 2 << 20):
            for seen, predicted in pool.run(most_grads, bound, stage):
                assert seen <= predicted, (stage, bound, seen, predicted)
