"""The loop of the README on a small GPT: nothing of it changes when the model is sharded.

python examples/plain_loop.py
torchrun --nproc-per-node 2 examples/plain_loop.py
"""

import os

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.testing.models import GPT, GPTConfig

rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)  # alike on every rank: all build the same model
model = GPT(GPTConfig(layers=2, hidden=64, context=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run = sw.shard(model, optimizer, stage=3)

numbers = torch.Generator().manual_seed(rank)  # every rank its own data: arithmetic sequences modulo 256
losses = []
for _ in range(40):
    start = torch.randint(256, (8, 1), generator=numbers)
    sequence = (start + 3 * torch.arange(33)) % 256
    loss = model(sequence[:, :-1], sequence[:, 1:])
    loss.backward()
    run.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

if rank == 0:
    print(f"transport {run.transport.name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
run.close()
if dist.is_initialized():
    dist.destroy_process_group()
