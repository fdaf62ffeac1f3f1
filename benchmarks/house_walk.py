"""Run by `house.py`: prints, as JSON, which functions of the library run in one training step at stage 3."""

from __future__ import annotations

import json
import pathlib
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.testing import RankPool

SOURCE = pathlib.Path(sw.__file__).parent


def walk() -> dict[str, list[str]]:
    """Three steps; the third, and the forward after it, under a profiler."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = sw.shard(model, optimizer, stage=3)
    inputs = torch.randn(4, 256)
    found: dict[str, set[str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            name = str(path.relative_to(SOURCE))
            if not name.startswith("testing"):
                found.setdefault(name, set()).add(frame.f_code.co_qualname)

    for number in range(4):
        if number == 2:
            sys.setprofile(note)  # the training thread, which runs autograd too; a Lane only runs the ends of a reduction
        loss = model(inputs).square().mean()
        if number == 3:
            sys.setprofile(None)
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {name: sorted(functions) for name, functions in found.items()}


if __name__ == "__main__":
    with RankPool(2) as pool:
        print(json.dumps(pool.run(walk)[0]))
