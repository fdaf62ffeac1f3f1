"""An empty batch is a batch: a rank without samples takes part, and nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from cases import rank, sharded
from shardwise.testing import RankPool
from shardwise.testing.models import GPT, GPTConfig


def empty(offload: str, directory: str, stage: int, transport: str) -> list[bool]:
    """Rank 1 has no samples in every other step; the others' gradients count as they are."""
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=61, context=16, layers=3, heads=2, hidden=32)
    model, plain = GPT(config), GPT(config)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (model, plain)]
    path = {"path": directory} if offload == "disk" else {}
    run = sharded(model, optimizers[0], stage=stage, transport=transport, activations=sw.Activations(offload=offload, **path))
    for step in range(4):
        batches = [torch.randint(0, 61, (0 if who == 1 and step % 2 else 2, 16), generator=_seeded(step, who)) for who in (0, 1)]
        model(batches[rank()]).square().sum().backward()
        sum(plain(batch).square().sum() for batch in batches).backward()  # type: ignore[union-attr]
        for param in plain.parameters():
            param.grad /= 2  # the mean over ranks
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = [torch.allclose(run.master(name), param, rtol=1e-4, atol=1e-6) for name, param in plain.named_parameters()]
    run.close()
    return found


def _seeded(step: int, who: int) -> torch.Generator:
    return torch.Generator().manual_seed(10 * step + who)


@pytest.mark.parametrize(("stage", "transport"), [(1, "auto"), (2, "auto"), (3, "shared"), (3, "pairwise")])
@pytest.mark.parametrize("offload", ["device", "disk"])
def test_a_rank_without_samples_takes_part(pool: RankPool, tmp_path: Any, offload: str, stage: int, transport: str) -> None:
    for found in pool.run(empty, offload, str(tmp_path), stage, transport):
        assert all(found)
