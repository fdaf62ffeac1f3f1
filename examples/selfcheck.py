"""Is sharded training of your own model the same as plain training? Ask before a long run.

python examples/selfcheck.py
torchrun --nproc-per-node 2 examples/selfcheck.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw


class MyModel(nn.Module):
    """Any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Classification loss."""
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of one rank at one step: your data, your forward."""
    numbers = torch.Generator().manual_seed(100 * step + int(os.environ.get("RANK", "0")))
    loss: torch.Tensor = model(torch.randn(16, 48, generator=numbers), torch.randint(10, (16,), generator=numbers))
    return loss


torch.manual_seed(0)
model = MyModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = sw.shard(model, optimizer, stage=3)
report = run.selfcheck(loss_of, steps=3)  # on copies; rank 0 prints what differs
run.close()
if dist.is_initialized():
    dist.destroy_process_group()
raise SystemExit(0 if report.is_bitwise else 1)
