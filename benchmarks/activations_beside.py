"""Checkpoints of activations of shardwise, FSDP2 and DeepSpeed on one shape, in one interleaved run.

    python benchmarks/activations_beside.py [--layers 12] [--batch 4] [--sequence 1024] [--steps 2] [--rounds 1] [--only host ...]

GPT-2 124M shape by default, fp32, AdamW(fused=True), 2 CPU ranks. All ranks have the same batch, because checkpoints can only be
divided among ranks that have equal ones. Each setting is a process group of its own in every round, in an order that changes.
A setting's function below is what a user writes for it besides the script that trains without checkpoints; its statements are
counted. A setting that fails is a row without figures, and its error is printed below the table. `loss` is that of the last timed
step: settings that train alike have the same.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interleaved import figures, launch_ranks, print_errors, run_rounds, tell

SHAPE = dict(vocabulary=50257, heads=12, hidden=768)
Options = dict[str, Any]


class Checkpointed(nn.Module):
    """Stands for the line `x = deepspeed.checkpointing.checkpoint(block, x)` in a model's own forward."""

    def __init__(self, block: nn.Module, ds: Any) -> None:
        super().__init__()
        self.block, self.checkpoint = block, ds.checkpointing.checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the block."""
        return self.checkpoint(self.block, x)


# -- what a user writes: options of sw.shard, or changes of the model -------------------------------------------------


def whole(model: nn.Module, sw: Any) -> Options:
    return dict()


def device(model: nn.Module, sw: Any) -> Options:
    return dict(activations=sw.Activations())


def host(model: nn.Module, sw: Any) -> Options:
    return dict(activations=sw.Activations(offload="host"))


def disk(model: nn.Module, sw: Any) -> Options:
    return dict(activations=sw.Activations(offload="disk"))


def divided(model: nn.Module, sw: Any) -> Options:
    return dict(activations=sw.Activations(partition=dist.group.WORLD))


def wrapped(model: nn.Module, fsdp: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)


def wrapped_offload(model: nn.Module, fsdp: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    for number, block in enumerate(model.blocks):
        model.blocks[number] = offload_wrapper(checkpoint_wrapper(block))


def ds_checkpoint(model: nn.Module, ds: Any) -> None:
    ds.checkpointing.configure(None)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block, ds)


def ds_cpu(model: nn.Module, ds: Any) -> None:
    ds.checkpointing.configure(None, checkpoint_in_cpu=True)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block, ds)


def ds_cpu_alone(model: nn.Module, ds: Any) -> None:
    ds.checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block, ds)


def ds_partition(model: nn.Module, ds: Any) -> None:
    class ModelParallel:
        get_model_parallel_rank = staticmethod(dist.get_rank)
        get_model_parallel_world_size = staticmethod(dist.get_world_size)
        get_model_parallel_group = staticmethod(lambda: dist.group.WORLD)

    ds.checkpointing.configure(ModelParallel, partition_activations=True)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block, ds)


def ds_partition_cpu(model: nn.Module, ds: Any) -> None:
    class ModelParallel:
        get_model_parallel_rank = staticmethod(dist.get_rank)
        get_model_parallel_world_size = staticmethod(dist.get_world_size)
        get_model_parallel_group = staticmethod(lambda: dist.group.WORLD)

    ds.checkpointing.configure(
        ModelParallel,
        partition_activations=True,
        checkpoint_in_cpu=True,
        contiguous_checkpointing=True,
        num_checkpoints=len(model.blocks),
    )
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block, ds)


SETTINGS: dict[str, tuple[str, Callable[[nn.Module, Any], Options | None]]] = {
    "whole": ("shardwise stage 3", whole),
    "device": ("shardwise stage 3", device),
    "host": ("shardwise stage 3", host),
    "disk": ("shardwise stage 3", disk),
    "divided": ("shardwise stage 3", divided),
    "checkpoint_wrapper": ("FSDP2", wrapped),
    "checkpoint_wrapper, offload_wrapper": ("FSDP2", wrapped_offload),
    "checkpointing": ("DeepSpeed stage 3", ds_checkpoint),
    "cpu_checkpointing": ("DeepSpeed stage 3", ds_cpu),
    "cpu_checkpointing, partition of one": ("DeepSpeed stage 3", ds_cpu_alone),
    "partition_activations": ("DeepSpeed stage 3", ds_partition),
    "partition_activations, cpu, contiguous": ("DeepSpeed stage 3", ds_partition_cpu),
}
MODULES = {"shardwise stage 3": "shardwise", "FSDP2": "torch.distributed.fsdp", "DeepSpeed stage 3": "deepspeed"}


# -- one rank ----------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> dict[str, Any]:
    from shardwise.testing.models import GPT, GPTConfig
    from systems import OPTIONS, SYSTEMS, measure, start_group

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    system, prepare = SETTINGS[args.worker]
    start_group(system)
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=args.layers, context=args.sequence, **SHAPE))
    tokens = torch.randint(0, SHAPE["vocabulary"], (args.batch, args.sequence + 1))
    if system.startswith("DeepSpeed"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed").init_distributed(dist_backend="gloo", verbose=False)
    OPTIONS.update(prepare(model, importlib.import_module(MODULES[system])) or {})
    step = SYSTEMS[system](model, lambda m: m(tokens[:, :-1], tokens[:, 1:]))
    del model
    return measure(step, args.steps, sampled_steps=1)


# -- all of them -------------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker:
        tell(args.out, lambda: train(args))
    settings = args.only or list(SETTINGS)
    passed_on = {name: getattr(args, name) for name in ("layers", "batch", "sequence", "steps")}
    found = run_rounds(
        settings,
        args.rounds,
        lambda setting, place: launch_ranks(__file__, setting, passed_on, args.ranks, args.timeout_s, place),
        args.directory,
    )
    print(
        f"{args.layers} layers, batch {args.batch}, sequence {args.sequence}, {args.ranks} ranks, "
        f"{args.rounds} rounds of {args.steps} steps\n"
    )
    print("| system | setting | step s | x device | CPU s | peak GB | loss | statements |")
    print("|---" * 8 + "|")
    for setting in found:
        system, prepare = SETTINGS[setting]
        cells = figures(found, setting, "device", cpu=False)
        print(f"| {system} | {setting} | {' | '.join(cells)} | {num_statements(prepare)} |")
    print_errors(found, lambda setting: f"{SETTINGS[setting][0]}, {setting}")


def num_statements(prepare: Callable[..., Any]) -> int:
    """Statements in a setting's function."""
    (function,) = ast.parse(inspect.getsource(prepare)).body
    return 0 if prepare is whole else sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", action="append", choices=SETTINGS)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
