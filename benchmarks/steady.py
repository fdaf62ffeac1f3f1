"""Resident memory over steps of changing batch sizes and lengths, of several systems, and what the steps cost.

    python benchmarks/steady.py [--steps 200] [--ranks 2] [--settings 'stage 3,device,host,disk,all on disk,DDP,FSDP2']

A GPT of 4 blocks of 256, fp32, AdamW. Every step has a batch of 1 to 8 sequences of 8 to 256 tokens, drawn from a seed of each
rank's own; every 10 steps an evaluation follows, every 25 steps a short greedy generation. Resident memory (private pages and
the share of shared ones, page cache excluded) is read right after `zero_grad()` of each step, in time that is not counted.
`stage 3` keeps what autograd saves; `device`, `host` and `disk` compute blocks again and keep their inputs there; `all on disk`
keeps parameters, gradients, optimizer states and inputs of blocks on disk. `off` behind a setting switches trimming off. The
largest of all ranks is printed for memory and wall time, the mean for CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranks import run_ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

SHAPE = dict(vocabulary=512, context=256, layers=4, heads=4, hidden=256)
SHOWN = [5, 10, 20, 50, 100, 150, 200]
ACTIVATIONS: dict[str, str | None] = {
    "stage 3": None,
    "device": "device",
    "host": "host",
    "disk": "disk",
    "all on disk": "disk",
}
SETTINGS = [*ACTIVATIONS, "DDP", "FSDP2"]


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    settings = args.settings.split(",")
    unknown = [setting for setting in settings if setting.removesuffix(" off") not in SETTINGS]
    if unknown:
        sys.exit(f"unknown settings {unknown}; choose from {SETTINGS}, with ' off' behind those of shardwise")
    found: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
    for number in range(args.rounds):
        for setting in settings[number % len(settings) :] + settings[: number % len(settings)]:
            found[setting].append(launch(setting, args))
            last = found[setting][-1]
            print(f"round {number + 1}: {setting}: x {ratio(last):.3f}, {last['cpu_s']:.1f} CPU s", file=sys.stderr, flush=True)
    print_table(found, args)
    largest = max(ratio(run) for runs in found.values() for run in runs)
    if args.most is not None and largest > args.most:
        sys.exit(f"resident memory at the end is {largest:.3f} x that of step {SHOWN[0]}, above {args.most}")


def launch(setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """One setting in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="shardwise-steady-", dir=args.directory) as directory:
        outs = [Path(directory) / f"rank-{rank}.json" for rank in range(args.ranks)]
        command = [sys.executable, __file__, f"--worker={setting}", f"--steps={args.steps}", f"--directory={directory}"]
        run_ranks([[*command, f"--out={out}"] for out in outs], args.timeout_s, setting)
        ranks = [json.loads(out.read_text()) for out in outs]
    worst = max(ranks, key=lambda rank: ratio(rank))
    wall = [max(times) for times in zip(*(rank["wall_s"] for rank in ranks), strict=True)]
    return {
        "resident": worst["resident"],
        "wall_s": sum(wall),
        "cpu_s": statistics.mean(rank["cpu_s"] for rank in ranks),
        "num_trims": max(rank["num_trims"] for rank in ranks),
        "cost_s": max(rank["cost_s"] for rank in ranks),
    }


def ratio(run: dict[str, Any], at: int = -1) -> float:
    """Resident memory after a step (the last one) over that after step 5."""
    resident: list[int] = run["resident"]
    return resident[at] / resident[SHOWN[0] - 1]


def print_table(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    shown = [step for step in SHOWN if step <= args.steps]
    print(f"{args.ranks} ranks, {args.steps} steps, {args.rounds} rounds; MB resident, of the round with the largest ratio\n")
    steps = " | ".join(f"step {step}" for step in shown)
    print(f"| setting | {steps} | end / step 5 | largest / step 5 | wall s | CPU s | trims |")
    print("|---" * (len(shown) + 6) + "|")
    for setting, runs in found.items():
        worst = max(runs, key=lambda run: ratio(run))
        largest = max(ratio(run, at) for run in runs for at in range(SHOWN[0], args.steps))
        row = [setting, *(f"{worst['resident'][step - 1] / 1e6:.1f}" for step in shown)]
        row += [f"{ratio(worst):.3f}", f"{largest:.3f}"]
        row += [f"{statistics.median(run[key] for run in runs):.1f}" for key in ("wall_s", "cpu_s")]
        trims = f"{worst['num_trims']} in {worst['cost_s']:.2f} s" if setting in ACTIVATIONS else "-"
        print(f"| {' | '.join([*row, trims])} |")


def batches(steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Tokens of every step: batch and length are random."""
    import torch

    sizes = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        shape = sizes.randint(1, 8), sizes.randint(8, SHAPE["context"])
        yield torch.randint(0, SHAPE["vocabulary"], shape, generator=generator)


def work(args: argparse.Namespace) -> None:
    """One rank: train, and write what was measured."""
    import torch
    import torch.distributed as dist

    from shardwise.testing.models import GPT, GPTConfig

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer, heap = build(args.worker, GPT(GPTConfig(**SHAPE)), args.directory)
    found = measure(model, optimizer, args.steps, seed=int(os.environ["RANK"]))
    found["num_trims"], found["cost_s"] = (heap.num_trims, heap.cost_s) if heap is not None else (0, 0.0)
    Path(args.out).write_text(json.dumps(found))
    os._exit(0)  # torch's own clean-up of process groups may wait for ranks that have ended


def build(setting: str, model: nn.Module, directory: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The model under one system, its optimizer, and the heap that the library trims."""
    import torch

    import shardwise as sw

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)

    if setting == "DDP":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        return wrapped, adamw(wrapped.parameters()), None
    if setting == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
        return model, adamw(model.parameters()), None
    name = setting.removesuffix(" off")
    where = ACTIVATIONS[name]
    activations = None
    if where is not None:
        activations = sw.Activations(offload=where, path=directory if where == "disk" else None)
    offload = None
    if name == "all on disk":
        offload = sw.Offload(params="disk", grads="disk", optimizer="disk", path=directory)
    optimizer = adamw(model.parameters())
    run = sw.shard(model, optimizer, stage=3, activations=activations, **({} if offload is None else {"offload": offload}))
    heap = run._runtime.heap
    if setting.endswith(" off"):
        heap.is_on = False
    return model, optimizer, heap


def measure(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> dict[str, Any]:
    """Train; resident bytes after each step, seconds of each step, CPU seconds of all."""
    from shardwise.observe import process_memory

    resident, wall, cpu = [], [], 0.0
    evaluation, prompt = next(batches(1, seed + 1000)), next(batches(1, seed + 2000))[:1, :16]

    def step(number: int, tokens: torch.Tensor) -> Callable[[], None]:
        def after() -> None:
            if number % 10 == 0:
                evaluate(model, evaluation)
            if number % 25 == 0:
                generate(model, prompt, 16)

        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return after

    for number, tokens in enumerate(batches(steps, seed), 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        after = step(number, tokens)
        middle, middle_cpu = time.perf_counter(), time.process_time()
        resident.append(process_memory().total)
        again, again_cpu = time.perf_counter(), time.process_time()
        after()
        wall.append(time.perf_counter() - again + middle - begin)
        cpu += time.process_time() - again_cpu + middle_cpu - begin_cpu
    return {"resident": resident, "wall_s": wall, "cpu_s": cpu}


def evaluate(model: nn.Module, tokens: torch.Tensor) -> float:
    """The loss without gradients."""
    import torch

    model.eval()
    with torch.no_grad():
        loss = model(tokens, tokens).item()
    model.train()
    return float(loss)


def generate(model: nn.Module, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy: the most likely next token, `count` times."""
    import torch

    model.eval()
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    model.train()
    return tokens


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--most", type=float, help="exit with an error if the end is more than this times step 5")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
