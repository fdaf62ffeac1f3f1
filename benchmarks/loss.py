"""Peak memory and time of a large head's loss, forward and backward: in chunks against all logits at once.

    python benchmarks/loss.py [--vocabulary 128256 --hidden 2048 --tokens 4096 --chunk-mib 128 --rounds 3 --steps 1]

Every measurement has a process of its own, and the variants take turns. `all logits` is `F.cross_entropy(F.linear(...))`,
`in chunks` is `linear_cross_entropy`, `recomputes` the same with `recomputes=True`. Time is the median over rounds of the mean of
`--steps` steps after one of a few tokens; the ratio is that of the medians. Memory is the peak of private pages above what the
process held with weight, hidden states and labels; `gradients` is the size of what backward returns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

VARIANTS = ("all logits", "in chunks", "recomputes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk-mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(measure(args)))
        return
    variants = args.variants.split(",")
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for _ in range(args.rounds):
        for variant in variants:
            done = subprocess.run([sys.executable, *sys.argv, "--work", variant], stdout=subprocess.PIPE, text=True, check=True)
            found[variant].append(json.loads(done.stdout.splitlines()[-1]))
    show(args, found)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Runs in a process of its own."""
    import torch
    from torch.nn import functional as F

    import shardwise as sw
    from shardwise.observe import MemorySampler

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    weight = torch.empty(args.vocabulary, args.hidden).normal_(std=0.02).requires_grad_()
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    labels = torch.randint(0, args.vocabulary, (args.tokens,))

    def step(tokens: int) -> float:
        if args.work == "all logits":
            loss = F.cross_entropy(F.linear(hidden[:tokens], weight), labels[:tokens])
        else:
            chunk_bytes, recomputes = args.chunk_mib << 20, args.work == "recomputes"
            loss = sw.linear_cross_entropy(
                hidden[:tokens], weight, labels[:tokens], chunk_bytes=chunk_bytes, recomputes=recomputes
            )
        loss.backward()
        hidden.grad = weight.grad = None
        return float(loss.detach())

    with MemorySampler() as memory:
        before = memory.sample()
        step(8)
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            loss = step(args.tokens)
        wall_s, cpu_s = (time.perf_counter() - begin) / args.steps, (time.process_time() - cpu) / args.steps
    return {"wall": wall_s, "cpu": cpu_s, "peak": memory.peak_bytes - before, "loss": loss}


def show(args: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> None:
    medians = {
        variant: {key: statistics.median(row[key] for row in rows) for key in ("wall", "cpu", "peak", "loss")}
        for variant, rows in found.items()
    }
    base = next(iter(medians.values()))
    grads = 4 * args.hidden * (args.vocabulary + args.tokens)
    print(
        f"vocabulary {args.vocabulary:,}, hidden {args.hidden:,}, {args.tokens:,} tokens, fp32, {args.threads} threads, chunks "
        f"of {args.chunk_mib} MiB, {args.rounds} rounds of {args.steps} steps;\nall logits "
        f"{4e-9 * args.tokens * args.vocabulary:.2f} GB, gradients {grads / 1e9:.2f} GB\n"
    )
    print("| loss | step (s) | CPU (s) | x step | x CPU | peak (GB) | x peak | peak - gradients (GB) | value |")
    print("|---|---|---|---|---|---|---|---|---|")
    for variant, row in medians.items():
        times = [f"{row[key]:.3f}" for key in ("wall", "cpu")] + [f"{row[key] / base[key]:.2f}" for key in ("wall", "cpu")]
        peaks = [f"{row['peak'] / 1e9:.3f}", f"{row['peak'] / base['peak']:.2f}", f"{(row['peak'] - grads) / 1e9:.3f}"]
        print("| " + " | ".join([variant, *times, *peaks, f"{row['loss']:.5f}"]) + " |")


if __name__ == "__main__":
    main()
