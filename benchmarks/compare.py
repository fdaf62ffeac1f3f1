"""Step time and peak memory per rank of several training systems, in one interleaved run.

    python benchmarks/compare.py [--rounds 3] [--steps 4] [--batch 1] [--only DDP --only 'shardwise stage 3']
    python benchmarks/compare.py --beside ../before   # also another version of this library, checked out and built there

Every round starts every system anew in its own processes, one after the other, so that slow moments of the machine fall
on all of them. Times are medians over all steps of all rounds; memory is the peak of private pages plus the
proportional share of shared ones, page cache excluded, sampled in steps that are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks import free_port, rank_environment

BESIDE = " (beside)"
SHAPES = {
    "gpt2-124m": dict(vocabulary=50257, context=1024, layers=12, heads=12, hidden=768),
    "wide": dict(vocabulary=4096, context=1024, layers=2, heads=16, hidden=2048),
    "small-blocks": dict(vocabulary=256, context=128, layers=200, heads=2, hidden=64),
    "tiny": dict(vocabulary=512, context=128, layers=4, heads=4, hidden=128),
}


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    from systems import SYSTEMS

    names = args.only or list(SYSTEMS)
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        sys.exit(f"unknown systems {unknown}; choose from {list(SYSTEMS)}")
    if args.beside:
        names = [entry for name in names for entry in ([name, name + BESIDE] if name.startswith("shardwise") else [name])]
    results: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names:
            results[name].append(launch(name, args))
            done = results[name][-1]
            print(
                f"round {number + 1} {name}: {statistics.median(done['wall_s']):.2f} s, {done['peak_bytes'] / 1e9:.2f} GB",
                file=sys.stderr,
            )
    print_table(names, results, args)


def launch(name: str, args: argparse.Namespace) -> dict:
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for rank in range(args.ranks):
            env = {**rank_environment(rank, args.ranks, port), "CCL_LOG_LEVEL": "error"}
            if name.endswith(BESIDE):
                env["PYTHONPATH"] = str(Path(args.beside) / "src")
            out = Path(directory) / f"rank-{rank}.json"
            command = [sys.executable, __file__, "--worker", name.removesuffix(BESIDE), "--out", str(out), *passed_on(args)]
            log = open(Path(directory) / f"rank-{rank}.log", "w")  # noqa: SIM115  closed after the process
            processes.append((subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT), out, log))
        deadline = time.monotonic() + args.timeout_s
        try:
            for process, _, _ in processes:
                process.wait(timeout=max(deadline - time.monotonic(), 1))
        finally:
            for process, _, log in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                log.close()
        found = []
        for process, out, log in processes:
            if not out.exists():
                sys.exit(f"{name} failed (exit {process.returncode}):\n{Path(log.name).read_text()[-4000:]}")
            found.append(json.loads(out.read_text()))
    return {
        "wall_s": [max(times) for times in zip(*(f["wall_s"] for f in found), strict=True)],
        "cpu_s": [sum(times) / args.ranks for times in zip(*(f["cpu_s"] for f in found), strict=True)],
        "peak_bytes": max(f["peak_bytes"] for f in found),
        "base_bytes": max(f["base_bytes"] for f in found),
        "formula_bytes": max(f["formula_bytes"] for f in found),
        "loss": found[0]["loss"],
    }


def passed_on(args: argparse.Namespace) -> list[str]:
    return [
        f"--steps={args.steps}",
        f"--batch={args.batch}",
        f"--sequence={args.sequence}",
        f"--shape={args.shape}",
        *(f"--option={option}" for option in args.option),
    ]


def work(args: argparse.Namespace) -> None:
    import torch

    from shardwise.observe import process_memory
    from shardwise.planner import gpt_activation_bytes
    from shardwise.testing.models import GPT, GPTConfig
    from systems import OPTIONS, SYSTEMS, measure, start_group

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    start_group(args.worker)
    warm = GPT(GPTConfig(layers=1))  # what torch loads and allocates at its first step belongs to the base
    optimizer = torch.optim.AdamW(warm.parameters(), fused=True)
    warm(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)).backward()
    optimizer.step()
    del warm, optimizer
    base = process_memory().total
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    model = GPT(GPTConfig(**shape))
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(0, shape["vocabulary"], (args.batch, args.sequence + 1), generator=generator)
    OPTIONS.update((name, int(value)) for name, _, value in (option.partition("=") for option in args.option))
    step = SYSTEMS[args.worker](model, lambda m: m(tokens[:, :-1], tokens[:, 1:]))
    del model
    found = measure(step, args.steps, sampled_steps=2)
    run = getattr(step, "run", None)
    formula = 0
    if run is not None:
        activations = gpt_activation_bytes(
            layers=shape["layers"],
            hidden=shape["hidden"],
            heads=shape["heads"],
            sequence=args.sequence,
            batch=args.batch,
            vocabulary=shape["vocabulary"],
        )
        formula = run.predicted_memory(activation_bytes=activations).total
    Path(args.out).write_text(json.dumps({**found, "base_bytes": base, "formula_bytes": formula}))
    os._exit(0)  # some systems hang in their own clean-up


def print_table(names: list[str], results: dict[str, list[dict]], args: argparse.Namespace) -> None:
    medians = {
        name: {
            "wall": statistics.median(t for r in results[name] for t in r["wall_s"]),
            "cpu": statistics.median(t for r in results[name] for t in r["cpu_s"]),
            "peak": statistics.median(r["peak_bytes"] for r in results[name]),
            "base": statistics.median(r["base_bytes"] for r in results[name]),
            "formula": results[name][0]["formula_bytes"],
        }
        for name in names
    }
    print(
        f"{args.shape}, fp32, {args.ranks} ranks, sequence {args.sequence}, batch {args.batch}; "
        f"medians of {args.rounds} rounds x {args.steps} steps\n"
    )
    others = {"DDP": "DDP", "FSDP2": "FSDP2", "DeepSpeed stage 3": "DS 3", "compute alone": "compute"}
    columns = ["system", "step (s)", "CPU (s)", *(f"x {short}" for short in others.values()), "over compute per block (us)"]
    columns += ["peak (GB)", "x DDP peak", "formula + base (GB)", "peak / that"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name in names:
        m = medians[name]
        row = [name, f"{m['wall']:.3f}", f"{m['cpu']:.3f}"]
        row += [ratio(medians, name, "wall", other) for other in others]
        over = m["wall"] - medians["compute alone"]["wall"] if "compute alone" in medians else None
        row.append("-" if over is None else f"{1e6 * over / SHAPES[args.shape]['layers']:.0f}")
        expected = m["formula"] + m["base"]
        row += [f"{m['peak'] / 1e9:.2f}", ratio(medians, name, "peak", "DDP")]
        row += [f"{expected / 1e9:.2f}", f"{m['peak'] / expected:.2f}"] if m["formula"] else ["-", "-"]
        print(f"| {' | '.join(row)} |")


def ratio(medians: dict[str, dict], name: str, key: str, other: str) -> str:
    return f"{medians[name][key] / medians[other][key]:.2f}" if other in medians else "-"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--only", action="append")
    parser.add_argument("--option", action="append", default=[], help="name=number, an option of shard() for shardwise systems")
    parser.add_argument("--beside", help="the directory of another version, whose stages are run in turn with these")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
