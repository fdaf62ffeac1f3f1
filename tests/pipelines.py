"""A decoder as a pipeline of sharded stages, and the same training in one place."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from cases import OPTIMIZERS, sharded
from decoders import Decoder, tokens
from shardwise.engine import clip_factor
from shardwise.testing.parity import plain_norm

LAYERS, MICRO = 4, 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def grid(pipes: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (pipes, dist.get_world_size() // pipes), mesh_dim_names=("pipe", "shard"))


def whole_model(seed: int = 0) -> Decoder:
    torch.default_generator.manual_seed(seed)
    return Decoder(LAYERS)


def stage_of(whole: Decoder, number: int, count: int) -> Decoder:
    """The stage `number` of a model that is cut into `count`: a copy without the modules of the others."""
    stage = copy.deepcopy(whole)
    own = range(number * LAYERS // count, (number + 1) * LAYERS // count)
    for name in list(stage.layers):
        if int(name) not in own:
            del stage.layers[name]
    if number > 0:
        stage.table = None
    if number < count - 1:
        stage.norm = stage.head = None
    return stage


def micro_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pipeline:
    """One rank of a pipeline of sharded stages."""

    def __init__(self, kind: str, *, seed: int = 0, mesh: DeviceMesh | None = None, scales: bool = True, **options: Any) -> None:
        """`scales`: the schedule divides gradients by the number of micro-batches; else the loss does."""
        self.mesh = grid() if mesh is None else mesh
        place, ranks = self.mesh["pipe"].get_local_rank(), self.mesh["pipe"].size()
        count = 2 * ranks if kind == "interleaved" else ranks
        self.numbers = list(range(place, count, ranks))
        self.modules = [stage_of(whole_model(seed), number, count) for number in self.numbers]
        params = [param for module in self.modules for param in module.parameters()]
        self.optimizer = OPTIMIZERS["adamw"](params)
        model = self.modules if kind == "interleaved" else self.modules[0]
        self.run = sharded(model, self.optimizer, mesh=self.mesh, **options)  # type: ignore[arg-type]
        group = self.mesh["pipe"].get_group()
        device = torch.device("cpu")
        stages = [PipelineStage(m, n, count, device, group=group) for m, n in zip(self.modules, self.numbers, strict=True)]
        self.is_last = self.numbers[-1] == count - 1
        self.is_first = self.numbers[0] == 0
        args: Any = stages if kind == "interleaved" else stages[0]
        loss = micro_loss if scales else lambda logits, targets: micro_loss(logits, targets) / MICRO
        self.schedule = SCHEDULES[kind](args, MICRO, loss_fn=loss, scale_grads=scales)

    def step(self, number: int, *, accumulates: bool = True, max_norm: float | None = 0.3) -> tuple[list[float], float]:
        """One step; returns the losses (on the last stage) and the norm."""
        data = tokens(number, self.mesh["shard"].get_local_rank(), batch=2 * MICRO)
        losses: list[torch.Tensor] = []
        with self.run.accumulating() if accumulates else contextlib.nullcontext():
            self.schedule.step(
                *([data[:, :-1]] if self.is_first else []),
                **({"target": data[:, 1:], "losses": losses} if self.is_last else {}),
            )
        if accumulates:
            self.run.reduce()
        norm = self.run.clip_grad_norm_(max_norm).item() if max_norm is not None else 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses], norm


class Whole:
    """The same training in one place: micro-batches one after the other, and the mean over the data-parallel ranks."""

    def __init__(self, seed: int = 0) -> None:
        self.model = whole_model(seed)
        self.optimizer = OPTIMIZERS["adamw"](self.model.parameters())

    def step(self, number: int, data_ranks: int, *, max_norm: float | None = 0.3) -> tuple[list[list[float]], float]:
        sums: list[list[torch.Tensor]] = []
        losses = []
        for rank in range(data_ranks):
            data = tokens(number, rank, batch=2 * MICRO)
            found = [micro_loss(self.model(part[:, :-1]), part[:, 1:]) for part in data.chunk(MICRO)]
            for loss in found:
                loss.backward()
            losses.append([loss.item() for loss in found])
            sums.append([param.grad / MICRO for param in self.model.parameters()])  # type: ignore[operator]
            self.model.zero_grad()
        for param, *parts in zip(self.model.parameters(), *sums, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            param.grad = total / data_ranks
        grads = [param.grad for param in self.model.parameters()]
        norm = plain_norm(grads)  # type: ignore[arg-type]
        if max_norm is not None:
            for grad in grads:
                grad.mul_(clip_factor(norm, max_norm))  # type: ignore[union-attr]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm.item()
