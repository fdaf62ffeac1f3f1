"""Build a model that need not fit: every block is partitioned as soon as it is complete.

python examples/sharded_init.py
torchrun --nproc-per-node 2 examples/sharded_init.py
"""

import os

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.testing.models import GPT, GPTConfig

rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
with sw.sharded_init():
    model = GPT(GPTConfig(layers=4, hidden=128, context=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = sw.shard(model, optimizer, stage=3)

for step in range(3):
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(10 * step + rank))
    with run.measuring_activations():
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

if rank == 0:
    print(f"{model.config.num_parameters} parameters, loss {loss.item():.3f} after 3 steps")
    print(run.report())
run.close()
if dist.is_initialized():
    dist.destroy_process_group()
