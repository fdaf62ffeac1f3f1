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
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks

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


def work(args: argparse.Namespace) -> None:
    """Train with one setting, and write what was measured, or the error."""
    try:
        found = train(args)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    Path(f"{args.out}.{os.environ['RANK']}").write_text(json.dumps(found))
    sys.stderr.flush()
    os._exit(0)  # some systems hang in their own clean-up


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
        work(args)
        return
    settings = args.only or list(SETTINGS)
    found: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory(prefix="shardwise-activations-", dir=args.directory) as directory:
        for number in range(args.rounds):
            at = number % len(settings)
            for setting in settings[at:] + settings[:at]:
                found[setting].append(launch(setting, args, Path(directory)))
                print(f"round {number + 1} {setting}: {found[setting][-1]}", file=sys.stderr, flush=True)
    print_table(found, args)


def launch(setting: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All ranks once: what the slower one took, CPU seconds and memory per rank; or the first rank's error."""
    out = directory / "out"
    passed_on = [f"--{name}={getattr(args, name)}" for name in ("layers", "batch", "sequence", "steps")]
    command = [sys.executable, __file__, f"--worker={setting}", f"--out={out}", *passed_on]
    with open(directory / "log", "w+") as log:
        try:
            run_ranks([command] * args.ranks, args.timeout_s, setting, log)
        except (SystemExit, subprocess.TimeoutExpired) as error:
            log.seek(0)
            return {"error": f"{error}; the last line printed: {(log.read().strip().splitlines() or [''])[-1]}"}
    ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(args.ranks)]
    for rank in ranks:
        if "error" in rank:
            return {"error": rank["error"]}
    return {
        "wall_s": [max(times) for times in zip(*(rank["wall_s"] for rank in ranks), strict=True)],
        "cpu_s": [sum(times) / len(ranks) for times in zip(*(rank["cpu_s"] for rank in ranks), strict=True)],
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "loss": ranks[0]["loss"],
    }


def print_table(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    def middle(setting: str, key: str) -> float:
        values = [value for run in found[setting] if key in run for value in run[key]]
        return statistics.median(values) if values else math.nan

    base = middle("device", "wall_s") if "device" in found else math.nan
    print(
        f"{args.layers} layers, batch {args.batch}, sequence {args.sequence}, {args.ranks} ranks, "
        f"{args.rounds} rounds of {args.steps} steps\n"
    )
    print("| system | setting | step s | x device | CPU s | peak GB | loss | statements |")
    print("|---" * 8 + "|")
    for setting, runs in found.items():
        system, prepare = SETTINGS[setting]
        done = [run for run in runs if "wall_s" in run]
        row = ["did not run", *["-"] * 4]
        if done:
            wall, peak = middle(setting, "wall_s"), statistics.median(run["peak_bytes"] for run in done)
            row = [f"{wall:.2f}", f"{wall / base:.2f}", f"{middle(setting, 'cpu_s'):.2f}", f"{peak / 1e9:.2f}"]
            row.append(f"{done[0]['loss']:.6f}")
        print(f"| {system} | {setting} | {' | '.join(row)} | {num_statements(prepare)} |")
    for setting, runs in found.items():
        for error in sorted({run["error"] for run in runs if "error" in run}):
            print(f"\n{SETTINGS[setting][0]}, {setting}: {error}")


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
