"""The public interface for training scripts: `shard` and `sharded_init`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.activations import apply, choose
from shardwise.checkpoint import load_into_plain, open_together
from shardwise.comm import World
from shardwise.config import Activations, Offload, Precision, ShardConfig, Tiling, UnitRule
from shardwise.engine import assemble, constructing, one_model, was_built_on_disk
from shardwise.errors import ConfigError, ModelError
from shardwise.optim import innermost
from shardwise.planner import admission
from shardwise.run import Run
from shardwise.tiling.operators import OPERATORS


def shard(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int | None = None,
    precision: Precision | str | None = None,
    units: UnitRule | None = None,
    max_unit_bytes: int = ShardConfig.max_unit_bytes,
    min_unit_bytes: int = ShardConfig.min_unit_bytes,
    exchange_bytes: int = ShardConfig.exchange_bytes,
    prefetch_bytes: int | None = ShardConfig.prefetch_bytes,
    methods: str | Sequence[str] = (),
    buffers: str = ShardConfig.buffers,
    transport: str = ShardConfig.transport,
    timeout_s: float = ShardConfig.timeout_s,
    offload: Offload | str | None = None,
    activations: Activations | str | int | None = None,
    tiling: Tiling | int | None = None,
    mesh: DeviceMesh | None = None,
    mesh_roles: Mapping[str, str] | None = None,
    **unknown: Any,
) -> Run:
    """Partition `model` and `optimizer` in place over the ranks of this launch; return the handle.

    `model` may be several modules: the stages of one model that this rank of an interleaved pipeline holds.

    `stage` is required: 0, 1, 2 or 3. The other options are documented at the fields of `shardwise.config.ShardConfig`; an
    unknown one raises ConfigError, which suggests the nearest name. `mesh` is a DeviceMesh (default: all ranks), whose dimensions
    have roles by their names: Units are divided over the ranks of 'shard', replicated along 'replicate' (hybrid sharding), and
    are those of this rank's part of the model along 'tensor' and 'pipe' (tensor and pipeline parallelism). `mesh_roles` gives
    other names a role: `{'dp_outer': 'replicate', 'dp_inner': 'shard'}`.
    Every rank must call this with the same model and options.
    """
    config = ShardConfig.of(
        {
            **({} if stage is None else {"stage": stage}),
            "precision": precision,
            "units": units,
            "max_unit_bytes": max_unit_bytes,
            "min_unit_bytes": min_unit_bytes,
            "exchange_bytes": exchange_bytes,
            "prefetch_bytes": prefetch_bytes,
            "methods": methods,
            "buffers": buffers,
            "transport": transport,
            "timeout_s": timeout_s,
            "offload": offload,
            "activations": activations,
            "tiling": tiling,
            **unknown,
        }
    )
    optimizer = innermost(optimizer)
    stages: Sequence[nn.Module] = tuple(model) if isinstance(model, (list, tuple)) else ()
    whole: Any = one_model(stages) if stages else model
    for module in stages or (whole,):
        if getattr(module, "_shardwise_run", None) is not None:
            raise ModelError(
                "this model is sharded already; use the run that sw.shard() returned, or build a new model to shard it otherwise."
            )
    if offload is None and isinstance(whole, nn.Module) and was_built_on_disk(whole):
        raise ConfigError(
            "the model was built under sharded_init(offload=...) with parameters on disk, and shard() was given no offload: they "
            "would all come back to memory. Pass the same offload= here, or Offload() if that is meant."
        )
    chosen: tuple[str, ...] = ()
    problem: Exception | None = None
    try:
        chosen = choose(whole, config)
    except Exception as error:  # assemble raises it, once the other ranks know of it; else they would wait for this one
        problem = error
    also = {"modules to compute again": chosen if problem is None else problem}
    runtime = assemble(whole, optimizer, config, mesh, admission(config, optimizer), also, OPERATORS, mesh_roles, stages)
    keeping = None if config.activations is None else apply(whole, runtime, config.activations, chosen)
    run = Run(whole, optimizer, config, runtime, keeping)
    for module in stages or (whole,):
        module._shardwise_run = run
    return run


@contextlib.contextmanager
def sharded_init(
    *,
    mesh: DeviceMesh | None = None,
    mesh_roles: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
    offload: Offload | str | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> Iterator[None]:
    """Build a model larger than memory: inside the context every submodule is partitioned as soon as it is complete.

    Use the same seed on every rank, and call `shard` afterwards. Parameters are bit-identical to plain construction. With
    `offload=Offload(params='disk')` shards are written to disk at once, so that the model may be larger than the host's memory.

    With `weights`, a Hugging Face directory, a safetensors file or a checkpoint of `run.save`, the one model that is built inside
    the context gets its parameters and buffers from there: its own initialisation is skipped, and every rank reads its shards
    only. Names and shapes must fit, else CheckpointError is raised at the end of the context.
    """
    world = World.of(mesh, torch.device(device), mesh_roles)
    asked = Offload.of(offload)
    if weights is None:
        with constructing(world, asked):
            yield
        return
    source = open_together(world, weights)
    try:
        with constructing(world, asked, source):
            yield
    finally:
        source.close()


def load_pretrained(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> tuple[str, ...]:
    """Load weights into `model`, sharded or not: a Hugging Face directory, a safetensors file, or a checkpoint of `run.save`.

    Into a sharded model every rank reads the ranges of its own shards only, wherever they are kept, and all ranks must call;
    optimizer states stay as they are. Values are rounded to each parameter's dtype. Names and shapes are compared first: if they
    do not fit, CheckpointError lists the differences and nothing has changed. With `strict=False` names that only one side has
    are left out and returned. For optimizer states and everything else of a checkpoint use `run.load`.
    """
    run = getattr(model, "_shardwise_run", None)
    return load_into_plain(model, path, strict=strict) if run is None else run._load_pretrained(path, strict=strict)
