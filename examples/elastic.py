"""Training that goes on when a rank is lost: every start resumes from the newest checkpoint, with as many ranks as there are.

On every host, with the address of one of them:

torchrun --nnodes=2:3 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-id=1 \
    examples/elastic.py --checkpoints /shared/directory
"""

import argparse
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import shardwise as sw

BATCH = 12  # sequences over all ranks, so that the curve does not depend on their number


def train(directory: str, last: int, pause_s: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = sw.shard(model, optimizer, stage=3)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    checkpoints = sw.Checkpoints(directory, keep=2)
    found = checkpoints.resume(run)
    first = 0 if found is None else found.num_steps
    if run.rank == 0:
        print(f"{time.time():.2f} {world_size} ranks begin after step {first}", flush=True)
    for step in range(first, last):
        batch = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
        mine = batch[run.rank * BATCH // world_size : (run.rank + 1) * BATCH // world_size]
        loss = (model(mine) - mine).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if world_size > 1:
            dist.all_reduce(mean)
        checkpoints.save(run, step + 1)
        if run.rank == 0:
            print(f"{time.time():.2f} step {step + 1}  ranks {world_size}  loss {mean.item() / world_size:.6f}", flush=True)
        time.sleep(pause_s)
    run.close()
    if dist.is_initialized():
        dist.destroy_process_group()


parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints", help="A directory that all hosts share.")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--pause-s", type=float, default=0.0, help="Sleep after every step, to have time to kill a rank.")
asked = parser.parse_args()
try:
    with tempfile.TemporaryDirectory() as own:  # used by one rank without --checkpoints
        train(asked.checkpoints or own, asked.steps, asked.pause_s)
except sw.ShardwiseError as error:
    print(f"{time.time():.2f} rank {os.environ.get('RANK', 0)} fails: {error}", flush=True)
    sys.stdout.flush()
    os._exit(1)  # at once: torchrun starts all ranks again
