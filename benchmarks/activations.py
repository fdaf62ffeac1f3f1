"""What checkpoints of activations cost in time and memory, kept in place, in host memory and on disk, in one interleaved run.

    python benchmarks/activations.py [--batch 4] [--sequence 1024] [--steps 2] [--rounds 2] [--settings whole,device,host,disk]

GPT-2 124M shape, fp32, one rank, stage 3, plain AdamW. `whole`: what autograd saves, where it is; the others compute each block
again and keep its input on the device, in the host's reused memory (on a CPU: a copy), or on disk; `moved`: nothing is computed
again, and what autograd saves goes to disk. Each setting is a process of its own in every round, in an order that changes. Time
is the median of steps, wall and CPU; memory the peak of private pages after the first step; `waiting` the share of a step in
which it waited for checkpoints; bytes per step beside the formula 4 bsz seq hd nl (fp32).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks import run_ranks

SHAPE = dict(layers=12, heads=12, hidden=768)
VOCABULARY = 50257
SETTINGS: dict[str, dict[str, Any] | None] = {
    "whole": None,
    "device": {},
    "host": dict(offload="host"),
    "disk": dict(offload="disk"),
    "moved": dict(checkpoint=None, offload="disk", bytes=1 << 30),
}


def main() -> None:
    args = parse()
    if args.worker:
        train(args)
        return
    settings = args.settings.split(",")
    found: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory(prefix="shardwise-activations-", dir=args.directory) as directory:
        for number in range(args.rounds):
            for setting in settings[number % len(settings) :] + settings[: number % len(settings)]:
                print(f"round {number + 1}: {setting}", file=sys.stderr, flush=True)
                out = Path(directory) / "out.json"
                command = [sys.executable, __file__, f"--worker={setting}", f"--out={out}", f"--directory={directory}"]
                command += [f"--batch={args.batch}", f"--sequence={args.sequence}", f"--steps={args.steps}"]
                run_ranks([command], args.timeout_s, setting)
                found[setting].append(json.loads(out.read_text()))
    formula = 4 * args.batch * args.sequence * SHAPE["hidden"] * SHAPE["layers"]
    print(f"batch {args.batch}, sequence {args.sequence}, {args.rounds} rounds of {args.steps} steps")
    print(f"formula {formula / 1e6:.0f} MB\n")
    print("| setting | step s | x device | CPU s | x device | peak GB | waiting | written MB | read MB | kept MB |")
    print("|---" * 10 + "|")

    def middle(setting: str, key: str) -> float:
        return statistics.median(value for run in found[setting] for value in run[key])

    base = "device" if "device" in found else settings[0]
    for setting in settings:
        wall, cpu = middle(setting, "wall"), middle(setting, "cpu")
        print(
            f"| {setting} | {wall:.2f} | {wall / middle(base, 'wall'):.3f} | {cpu:.2f} | {cpu / middle(base, 'cpu'):.3f} | "
            f"{middle(setting, 'peak') / 1e9:.2f} | {middle(setting, 'stall') / wall:.3f} | "
            + " | ".join(f"{middle(setting, key) / 1e6:.0f}" for key in ("written", "read", "kept"))
            + " |"
        )


def train(args: argparse.Namespace) -> None:
    """One process: train, and write what was measured."""
    import torch

    import shardwise as sw
    from shardwise.observe import MemorySampler
    from shardwise.testing.models import GPT, GPTConfig
    from shardwise.tiers import Kind, Tier

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=VOCABULARY, context=args.sequence, **SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    asked = SETTINGS[args.worker]
    if asked is not None and asked.get("offload") == "disk":
        asked = {**asked, "path": args.directory}
    run = sw.shard(model, optimizer, stage=3, activations=None if asked is None else sw.Activations(**asked))
    tokens = torch.randint(0, VOCABULARY, (args.batch, args.sequence))
    found: dict[str, list[float]] = {key: [] for key in ("wall", "cpu", "stall", "written", "read", "kept", "peak")}
    keeping = run._keeping
    disk = getattr(getattr(keeping, "_store", None), "_disk", None)

    def figures() -> tuple[float, float, int, int]:
        stall = 0.0 if keeping is None else keeping.stall_s
        return time.process_time(), stall, disk.bytes_written if disk else 0, disk.bytes_read if disk else 0

    for step in range(args.steps + 1):
        with MemorySampler() as memory:
            before, begin = figures(), time.perf_counter()
            loss = model(tokens, tokens)
            kept = sum(run.ledger.now(tier, Kind.ACTIVATION) for tier in Tier)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            wall, after = time.perf_counter() - begin, figures()
        if step:
            cpu, stall, written, read = (b - a for a, b in zip(before, after, strict=True))
            values = dict(wall=wall, cpu=cpu, stall=stall, written=written, read=read, kept=kept, peak=memory.peak_bytes)
            for key, value in values.items():
                found[key].append(value)
    Path(args.out).write_text(json.dumps(found))
    run.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--settings", default="whole,device,host,disk")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
