"""Puts a model under a training system and measures its steps; used by the workers of compare.py and activations_beside.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LEARNING_RATE = 1e-4


def adamw(params: object) -> torch.optim.Optimizer:
    """The same optimizer for every system."""
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)  # type: ignore[arg-type]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module], torch.Tensor]):
    """The loop every PyTorch user writes."""

    def step() -> float:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def compute_alone(model, loss_of):
    """No communication at all: the limit."""
    return plain_step(model, adamw(model.parameters()), loss_of)


def ddp(model, loss_of):
    """Torch's replicated training."""
    model = nn.parallel.DistributedDataParallel(model)
    return plain_step(model, adamw(model.parameters()), loss_of)


def zero_redundancy(model, loss_of):
    """Torch's ZeroRedundancyOptimizer on DDP: stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return plain_step(model, optimizer, loss_of)


def fsdp2(model, loss_of):
    """fully_shard on every block and on the model."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return plain_step(model, adamw(model.parameters()), loss_of)


def deepspeed(stage: int):
    """DeepSpeed with the same client optimizer."""

    def build(model, loss_of):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed as ds

        ds.init_distributed(dist_backend="gloo", verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "fp16": {"enabled": False},
            "bf16": {"enabled": False},
        }
        engine, _, _, _ = ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

        def step() -> float:
            loss = loss_of(engine)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step

    return build


OPTIONS: dict[str, Any] = {}
"""Further options of shard()."""


def shardwise(stage: int):
    """This library."""

    def build(model, loss_of):
        import shardwise as sw

        optimizer = adamw(model.parameters())
        run = sw.shard(model, optimizer, stage=stage, **OPTIONS)
        step = plain_step(model, optimizer, loss_of)
        step.run = run
        return step

    return build


SYSTEMS = {
    "compute alone": compute_alone,
    "DDP": ddp,
    "torch ZeRO-1 (ZeroRedundancyOptimizer)": zero_redundancy,
    "FSDP2": fsdp2,
    "DeepSpeed stage 1": deepspeed(1),
    "DeepSpeed stage 2": deepspeed(2),
    "DeepSpeed stage 3": deepspeed(3),
    "shardwise stage 1": shardwise(1),
    "shardwise stage 2": shardwise(2),
    "shardwise stage 3": shardwise(3),
}


def start_group(system: str) -> None:
    """Join the process group, except where a system must not communicate."""
    if system != "compute alone":
        dist.init_process_group("gloo")


def measure(step: Callable[[], float], steps: int, sampled_steps: int) -> dict[str, Any]:
    """Wall and CPU seconds of `steps` steps, after one that allocates; then the peak memory of steps that are not timed."""
    from shardwise.observe import MemorySampler

    wall, cpu, losses = [], [], []
    for _ in range(steps + 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        losses.append(step())
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    with MemorySampler() as memory:
        for _ in range(sampled_steps):
            step()
    return {"wall_s": wall[1:], "cpu_s": cpu[1:], "peak_bytes": memory.peak_bytes, "loss": losses[-1]}
