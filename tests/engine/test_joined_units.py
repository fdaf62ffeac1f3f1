"""Small Units that were joined at stage 3: gathered once for several blocks, freed soon after, counted by the formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cases import sharded
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


def events(transport: str) -> list[tuple[str, str]]:
    run, model, optimizer, _, _ = make(is_adapted=False, transport=transport, bound=3 * BLOCK_BYTES)
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
            assert largest <= seen == predicted, (bound, seen, predicted)
