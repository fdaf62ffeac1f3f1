"""Temporary buffers do not grow with the model: those of a model four times as deep are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from cases import sharded
from shardwise.testing import RankPool
from shardwise.testing.models import GPT, GPTConfig
from shardwise.tiers import Kind, Tier

LAYERS = (6, 12, 24)
DEEP = (24, 48, 96)
"""With gradients on disk: as many layers as are reduced at once, and more."""


def most_buffers(layers: int, **options: Any) -> tuple[int, int, int]:
    """(peak of buffers over three steps with evaluation in between, the same by the formula, peak of parameters)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=64, context=16, layers=layers, heads=2, hidden=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = sharded(model, optimizer, stage=3, **options)
    tokens = torch.randint(0, 64, (2, 16))
    for _ in range(3):
        model(tokens, tokens).backward()
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens, tokens)
    tiers = (Tier.DEVICE, Tier.HOST)
    found = (
        sum(run.ledger.peak(tier, Kind.BUFFER) for tier in tiers),
        run.predicted_memory().buffer,
        sum(run.ledger.peak(tier, Kind.PARAM) for tier in Tier),
    )
    run.close()
    return found


WAYS: dict[str, dict[str, Any]] = {
    "overlays": {},
    "copied": {"transport": "copied"},
    "pairwise": {"transport": "pairwise"},
    # portions of a step that are smaller than the smallest of the models
    "disk": {"offload": sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)},
    "computed again": {"transport": "copied", "activations": sw.Activations(offload="host")},
    "tiles": {"transport": "copied", "tiling": 16384},
}


@pytest.mark.parametrize("way", WAYS)
def test_buffers_do_not_grow_with_the_model(pool: RankPool, way: str) -> None:
    by_size = [pool.run(most_buffers, layers, **WAYS[way]) for layers in (DEEP if way == "disk" else LAYERS)]
    for sizes in zip(*by_size, strict=True):  # of each rank
        buffers, bounds, params = zip(*sizes, strict=True)
        assert params[2] > 3 * params[0], "the models do grow"
        assert bounds[0] == bounds[1] == bounds[2] >= max(buffers), (way, bounds, buffers)
        if way != "disk":  # how many of the allowed buffers are in use at once depends on the disk's pace there
            assert buffers[0] == buffers[1] == buffers[2], (way, buffers)
