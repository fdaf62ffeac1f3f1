"""What tiles cost and save: one large layer cut into 1, 4 and 16 tiles, and the smallest memory that trains a large model.

    python benchmarks/tiling.py layer [--hidden 8192] [--tokens 512] [--rounds 2] [--steps 2]
    python benchmarks/tiling.py weight [--steps 2]
    python benchmarks/tiling.py model [--shape xl] [--steps 2]

`layer`: a feed-forward layer, h to 4 h and back, fp32, one rank, plain SGD; parameters, gradients and states on disk, then all in
memory. Memory is the ledger's peak of gathered weights and local gradients in forward and backward, in bytes and as a share of
the larger weight; time the median of forward and backward, wall and CPU. Each setting is a process of its own in every round, in
an order that changes.

`weight`: a linear layer of 20,480 x 16,384, whose weight alone has 1.34 GB, trained by AdamW from disk in tiles of 32 MiB with
`host_bytes` of 1 GB. The ledger's peak, and the process's (private pages) while the layer is built and while it trains.

`model`: GPT-2 shapes, one rank, everything on disk, AdamW, batch 1, sequence 128, five settings from today's defaults to tiles
of 8 MiB. Memory is the process's peak from construction on (private pages, page cache excluded).
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

SHAPES = {
    "124m": dict(layers=12, heads=12, hidden=768),
    "large": dict(layers=36, heads=20, hidden=1280),
    "xl": dict(layers=48, heads=25, hidden=1600),
}
FACTORS = (1, 4, 16)
VOCABULARY, SEQUENCE = 50257, 128
MIB = 1 << 20
SETTINGS: dict[str, dict[str, Any]] = {
    "blocks computed again": {},
    "+ their inputs on disk": dict(keeps="disk"),
    "+ loss in chunks": dict(keeps="disk", chunked=True),
    "+ tiles of 32 MiB": dict(keeps="disk", chunked=True, tile=32 * MIB, step=8 * MIB),
    "+ tiles of 8 MiB": dict(keeps="disk", chunked=True, tile=8 * MIB, step=2 * MIB, ahead=8 * MIB, exchange=4 * MIB),
}


def main() -> None:
    args = parse()
    if args.worker:
        {"layer": layer, "weight": weight, "model": model}[args.what](args)
    else:
        {"layer": compare_layers, "weight": show_weight, "model": compare_models}[args.what](args)


def launch(args: argparse.Namespace, worker: str, directory: str) -> dict[str, Any]:
    print(worker, file=sys.stderr, flush=True)
    out = Path(directory) / "out.json"
    options = [f"--{name}={getattr(args, name)}" for name in ("hidden", "tokens", "steps", "shape")]
    command = [sys.executable, __file__, args.what, f"--worker={worker}", f"--out={out}", f"--directory={directory}", *options]
    run_ranks([command], args.timeout_s, worker)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


# -- one layer ---------------------------------------------------------------------------------------------------------


def compare_layers(args: argparse.Namespace) -> None:
    weight_bytes = 4 * args.hidden * 4 * args.hidden
    print(f"hidden {args.hidden}, {args.tokens} tokens, {args.rounds} rounds of {args.steps} steps")
    print(f"a weight takes {weight_bytes / MIB:.0f} MiB\n")
    print("| states | tiles | gathered MiB | local gradients MiB | both, share of untiled | wall s | x | CPU s | x |")
    print("|---" * 9 + "|")
    for place in ("disk", "device"):
        found: dict[int, list[dict[str, Any]]] = {factor: [] for factor in FACTORS}
        with tempfile.TemporaryDirectory(prefix="shardwise-tiling-", dir=args.directory) as directory:
            for number in range(args.rounds):
                for factor in FACTORS[number % 3 :] + FACTORS[: number % 3]:
                    found[factor].append(launch(args, f"{place}:{factor}", directory))
        for factor in FACTORS:
            runs, base = found[factor], found[1]

            def middle(key: str, of: list[dict[str, Any]]) -> float:
                return statistics.median(value for run in of for value in run[key])

            memory, whole = (middle("gathered", r) + middle("grads", r) for r in (runs, base))
            print(
                f"| {place} | {factor} | {middle('gathered', runs) / MIB:.0f} | {middle('grads', runs) / MIB:.0f} | "
                f"{memory / whole:.3f} | "
                + " | ".join(f"{middle(k, runs):.2f} | {middle(k, runs) / middle(k, base):.3f}" for k in ("wall", "cpu"))
                + " |"
            )


def layer(args: argparse.Namespace) -> None:
    import torch
    from torch import nn

    import shardwise as sw
    from shardwise.tiers import Kind, Tier

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    place, factor = args.worker.split(":")
    torch.manual_seed(0)
    hidden = args.hidden
    net = nn.Sequential(nn.Linear(hidden, 4 * hidden, bias=False), nn.GELU(), nn.Linear(4 * hidden, hidden, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    offload = sw.Offload(params=place, grads=place, optimizer=place, **({"path": args.directory} if place == "disk" else {}))
    bound = 4 * hidden * 4 * hidden // int(factor)
    run = sw.shard(
        net, optimizer, stage=3, offload=offload, tiling=None if factor == "1" else bound, prefetch_bytes=0, max_unit_bytes=MIB
    )
    inputs = torch.randn(args.tokens, hidden, requires_grad=True)
    found: dict[str, list[float]] = {key: [] for key in ("wall", "cpu", "gathered", "grads")}
    for step in range(args.steps + 1):
        shards = run.ledger.now(Tier.HOST, Kind.GRAD)
        buffers = run.ledger.now(Tier.HOST, Kind.BUFFER)
        run.ledger.reset_peak()
        begin, cpu = time.perf_counter(), time.process_time()
        net(inputs).square().mean().backward()
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        if step:
            found["wall"].append(wall)
            found["cpu"].append(cpu)
            found["gathered"].append(run.ledger.peak(Tier.HOST, Kind.BUFFER) - buffers)
            found["grads"].append(run.ledger.peak(Tier.HOST, Kind.GRAD) - shards)
        optimizer.step()
        optimizer.zero_grad()
        inputs.grad = None
    Path(args.out).write_text(json.dumps(found))
    run.close()


# -- one weight above the budget ---------------------------------------------------------------------------------------


def show_weight(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="shardwise-tiling-", dir=args.directory) as directory:
        found = launch(args, "weight", directory)
    print("| weight GB | host_bytes GB | ledger's peak GB | process, building GB | process, training GB | step s | losses |")
    print("|---" * 7 + "|")
    sizes = " | ".join(f"{found[key] / 1e9:.2f}" for key in ("weight", "budget", "ledger", "building", "training"))
    print(f"| {sizes} | {statistics.median(found['steps']):.1f} | {', '.join(f'{loss:.5f}' for loss in found['losses'])} |")


def weight(args: argparse.Namespace) -> None:
    import torch
    from torch import nn

    import shardwise as sw
    from shardwise.observe import MemorySampler
    from shardwise.tiers import Tier

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    budget = 10**9
    offload = sw.Offload(params="disk", grads="disk", optimizer="disk", path=args.directory, host_bytes=budget)
    found: dict[str, Any] = {"budget": budget, "steps": [], "losses": []}
    with MemorySampler() as memory:
        with sw.sharded_init(offload=sw.Offload(params="disk", path=args.directory)):
            net = nn.Sequential(nn.Linear(20480, 16384, bias=False))
        found["weight"] = 4 * sum(param.numel() for param in net.parameters())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        run = sw.shard(net, optimizer, stage=3, offload=offload, tiling=32 * MIB)
        found["building"], memory.peak_bytes = memory.peak_bytes, 0
        inputs = torch.randn(64, 20480)
        for _ in range(args.steps + 1):
            begin = time.perf_counter()
            loss = net(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found["steps"].append(time.perf_counter() - begin)
            found["losses"].append(loss.item())
    found |= {"ledger": run.ledger.peak(Tier.HOST), "training": memory.peak_bytes}
    Path(args.out).write_text(json.dumps(found))
    run.close()


# -- a whole model -----------------------------------------------------------------------------------------------------


def compare_models(args: argparse.Namespace) -> None:
    print(f"GPT-2 {args.shape}, one rank, everything on disk, batch 1, sequence {SEQUENCE}, {args.steps} steps after the first\n")
    print("| setting | peak GB | building GB | training GB | step s | forward and backward s | optimizer s | loss |")
    print("|---" * 8 + "|")
    with tempfile.TemporaryDirectory(prefix="shardwise-tiling-", dir=args.directory) as directory:
        for setting in args.settings.split(",") if args.settings else SETTINGS:
            found = launch(args, setting, directory)
            passes, steps = (statistics.median(found[key]) for key in ("passes", "steps"))
            print(
                f"| {setting} | {max(found['building'], found['training']) / 1e9:.2f} | {found['building'] / 1e9:.2f} | "
                f"{found['training'] / 1e9:.2f} | {passes + steps:.1f} | {passes:.1f} | {steps:.1f} | {found['loss']:.5f} |",
                flush=True,
            )


def model(args: argparse.Namespace) -> None:
    import torch

    import shardwise as sw
    from shardwise.observe import MemorySampler
    from shardwise.testing.models import GPT, GPTConfig

    class Chunked(GPT):
        """The same model, whose loss needs a few logits at a time."""

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            assert targets is not None
            return sw.linear_cross_entropy(self.ln_f(x), self.head.weight, targets, chunk_bytes=8 * MIB)

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    setting = SETTINGS[args.worker]
    torch.manual_seed(0)
    path = args.directory
    step = {"step_bytes": setting["step"]} if "step" in setting else {}
    offload = sw.Offload(params="disk", grads="disk", optimizer="disk", path=path, **step)
    keeps = setting.get("keeps", "device")
    activations = sw.Activations(offload=keeps, **({"path": path, "bytes": 8 * MIB} if keeps == "disk" else {}))
    more = {name: setting[key] for name, key in (("prefetch_bytes", "ahead"), ("exchange_bytes", "exchange")) if key in setting}
    with MemorySampler() as memory:
        with sw.sharded_init(offload=offload):
            net = (Chunked if "chunked" in setting else GPT)(GPTConfig(vocabulary=VOCABULARY, context=1024, **SHAPES[args.shape]))
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-5, fused=True)
        run = sw.shard(net, optimizer, stage=3, offload=offload, activations=activations, tiling=setting.get("tile"), **more)
        building, memory.peak_bytes = memory.peak_bytes, 0
        tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
        found: dict[str, Any] = {"building": building, "passes": [], "steps": []}
        for number in range(args.steps + 1):
            marks = [time.perf_counter()]
            loss = net(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            marks.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.perf_counter())
            if number:
                found["passes"].append(marks[1] - marks[0])
                found["steps"].append(marks[2] - marks[1])
    found |= {"training": memory.peak_bytes, "loss": loss.item()}
    if args.report:
        print(run.report(), file=sys.stderr)
    Path(args.out).write_text(json.dumps(found))
    run.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layer", "weight", "model"))
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="xl")
    parser.add_argument("--settings", default="", help="names, separated by commas; default: all")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--report", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
