"""Trains a model whose states are larger than the memory it may use: everything lives on disk and comes up in time.

    python examples/bigger_than_memory.py [--layers 48 --hidden 1600 --heads 25] [--steps 3] [--path DIR]

The default is the shape of GPT-2 XL: 1.56 billion parameters, 25 GB of parameters, gradients and moments, on one process within
a few GB. The disk needs about 32 GB while the model is built.
"""

import argparse
import functools
import tempfile
import time

import torch
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.observe import MemorySampler
from shardwise.testing.models import GPT, GPTConfig

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=48)
parser.add_argument("--hidden", type=int, default=1600)
parser.add_argument("--heads", type=int, default=25)
parser.add_argument("--vocabulary", type=int, default=50257)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--path", default=tempfile.gettempdir())
args = parser.parse_args()

offload = sw.Offload(params="disk", grads="disk", optimizer="disk", path=args.path)
torch.manual_seed(0)
with MemorySampler() as memory:
    begin = time.perf_counter()
    with sw.sharded_init(offload=offload):
        model = GPT(GPTConfig(vocabulary=args.vocabulary, context=1024, layers=args.layers, heads=args.heads, hidden=args.hidden))
    for block in model.blocks:  # keep only what goes in and out of a block, compute the rest again in backward
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)  # fused: shardwise's own kernel updates
    run = sw.shard(model, optimizer, stage=3, offload=offload)
    num_parameters = sum(param.numel() for param in model.parameters())
    print(f"{num_parameters / 1e6:.0f} million parameters, built in {time.perf_counter() - begin:.0f} s", flush=True)
    tokens = torch.randint(0, args.vocabulary, (1, args.sequence + 1))
    for step in range(args.steps):
        begin = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        print(f"step {step}: loss {loss.item():.4f}, {middle - begin:.1f} s + {end - middle:.1f} s", flush=True)
print(f"peak memory {memory.peak_bytes / 1e9:.2f} GB; states at 16 bytes each {16 * num_parameters / 1e9:.1f} GB")
print(run.report())
run.close()
