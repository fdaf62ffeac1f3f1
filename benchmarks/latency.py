"""Milliseconds per step where there is next to nothing to compute or send: 12 blocks with two small parameters each.

    python benchmarks/latency.py [--rounds 4] [--steps 60] [--ranks 2]

What is left is what a system costs per step, per block and per message. Every round starts every system anew in its own
processes, one after the other; figures are medians over all steps of all rounds.
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

from ranks import run_ranks

WIDTH, BLOCKS = 64, 12
SYSTEMS = {
    "compute alone": ("compute alone", {}),
    "DDP": ("DDP", {}),
    "FSDP2": ("FSDP2", {}),
    **{
        f"shardwise stage {stage}, {transport}": (f"shardwise stage {stage}", {"transport": transport})
        for transport in ("shared", "pairwise")
        for stage in (1, 2, 3)
    },
}


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    found: dict[str, list[list[float]]] = {name: [] for name in args.only or SYSTEMS}
    for number in range(args.rounds):
        for name in found:
            with tempfile.TemporaryDirectory() as directory:
                command = [sys.executable, __file__, "--worker", name, f"--steps={args.steps}", "--out"]
                outs = [Path(directory) / f"{rank}.json" for rank in range(args.ranks)]
                run_ranks([[*command, str(out)] for out in outs], args.timeout_s, name)
                found[name] += json.loads(outs[0].read_text())
            print(f"round {number + 1} {name}", file=sys.stderr)
    print(f"{BLOCKS} blocks of nn.Linear({WIDTH}, {WIDTH}), {args.ranks} ranks")
    print(f"medians of {args.rounds} rounds x {args.steps} steps\n")
    print("| system | step (ms) | CPU (ms) | x DDP |\n|---|---|---|---|")
    medians = {name: [1e3 * statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    for name, (wall, cpu) in medians.items():
        ratio = f"{wall / medians['DDP'][0]:.2f}" if "DDP" in medians else "-"
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {ratio} |")


def work(args: argparse.Namespace) -> None:
    import torch
    from torch import nn

    from systems import OPTIONS, start_group
    from systems import SYSTEMS as BUILDERS

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x.square().mean()

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    system, options = SYSTEMS[args.worker]
    start_group(system)
    torch.manual_seed(0)
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    OPTIONS.update(options)
    step = BUILDERS[system](Blocks(), lambda model: model(batch))
    rows = []
    for number in range(args.steps + 5):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        step()
        if number >= 5:
            rows.append([time.perf_counter() - begin, time.process_time() - begin_cpu])
    Path(args.out).write_text(json.dumps(rows))
    os._exit(0)  # some systems hang in their own clean-up


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", action="append", choices=SYSTEMS)
    parser.add_argument("--timeout-s", type=float, default=120)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
