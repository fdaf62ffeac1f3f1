"""Train, save, and go on in a new run at another stage: the losses are those of training that was never interrupted.

torchrun --standalone --nproc-per-node=2 examples/save_and_resume.py
"""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist

import shardwise as sw

HALF = 4
rank = int(os.environ.get("RANK", 0))


def make(stage: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, sw.Run]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, sw.shard(model, optimizer, stage=stage)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


model, optimizer, run = make(stage=3)
train(model, optimizer, 0, HALF)
place = [tempfile.mkdtemp()]
if dist.is_initialized():
    dist.broadcast_object_list(place)  # all ranks save to the same directory
checkpoints = sw.Checkpoints(place[0], keep=2)
checkpoints.save(run, HALF, extra={"step": HALF})
expected = train(model, optimizer, HALF, 2 * HALF)
run.close()

model, optimizer, run = make(stage=1)
found = checkpoints.resume(run)
assert found is not None
losses = train(model, optimizer, found.extra["step"], 2 * HALF)
print(f"rank {rank}: resumed after step {found.num_steps}; the same losses: {losses == expected}")
run.close()
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
if rank == 0:
    shutil.rmtree(place[0])
