"""Training from disk beside its two limits: the computation alone, and the bytes moved at fio's bandwidth.

    python benchmarks/offload.py [--shape xl] [--place all] [--ranks 1] [--steps 3] [--directory DIR]

Prints, for the two phases of a step (forward and backward; optimizer), the time, the time of the computation alone, the bytes
moved and the time fio would need for them, and the peak memory of each rank from construction on (private and shared pages, page
cache excluded). Batch 1, sequence 128, checkpointed activations, fp32. Disks and hosts change their speed: fio runs between the
phases of every step, the computation alone before and after the training. That of the optimizer is the native Adam on a part of
the states, scaled up; that of forward and backward is the plain model in memory, if it fits (`--no-alone` leaves it out).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fio
from ranks import run_ranks

SHAPES = {
    "124m": dict(layers=12, heads=12, hidden=768),
    "355m": dict(layers=24, heads=16, hidden=1024),
    "large": dict(layers=36, heads=20, hidden=1280),
    "xl": dict(layers=48, heads=25, hidden=1600),
}
PLACES = {
    "all": dict(params="disk", grads="disk", optimizer="disk"),
    "optimizer": dict(optimizer="disk"),
}
VOCABULARY, CONTEXT, SEQUENCE = 50257, 1024, 128
ALONE_NUMEL = 1 << 26
LEARNING_RATE = 3e-5


def main() -> None:
    args = parse()
    if args.worker:
        {"train": train, "alone": alone, "infinity": infinity}[args.worker](args)
        return
    fio.set_up()
    with tempfile.TemporaryDirectory(prefix="shardwise-offload-", dir=args.directory) as name:
        directory = Path(name)
        args.fio_engine = fio.best_engines(directory, args.fio_mib << 20)["both"]
        limits = launch("alone", args, args.ranks, directory) if args.alone else []
        ranks = launch("train", args, args.ranks, directory)
        limits += launch("alone", args, args.ranks, directory) if args.alone else []
        theirs = launch("infinity", args, args.ranks, directory) if args.deepspeed else []
    rates = ranks[0]["fio"]
    rate = statistics.median(rates)
    print(f"{args.shape}, {args.place} on disk, {args.ranks} ranks, sequence {SEQUENCE}; medians of {args.steps} steps")
    print(
        f"fio ({args.fio_engine}), both directions, {len(rates)} times between the phases: {rate / 1e9:.2f} GB/s "
        f"({min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f})"
    )
    print(f"losses {', '.join(f'{loss:.3f}' for loss in ranks[0]['losses'])}\n")
    print(
        "| phase | step s | computation alone s | read GB | written GB | at fio's bandwidth s | x larger of both | GB/s / fio |"
    )
    print("|---" * 8 + "|")
    total = bound = 0.0
    for phase in ("forward and backward", "optimizer"):
        taken = max(statistics.median(r[phase]["seconds"]) for r in ranks)
        read, written = (sum(statistics.median(r[phase][key]) for r in ranks) for key in ("read", "written"))
        moving = (read + written) / rate
        by_rank = [[s for limit in limits[rank :: args.ranks] for s in limit[phase]] for rank in range(args.ranks)]
        compute = max(statistics.median(seconds) for seconds in by_rank) if limits else 0.0
        shown = f"{compute:.2f}" if limits else "-"
        share = f"{(read + written) / taken / rate:.2f}"
        limit = max(compute, moving, 1e-9)
        print(
            f"| {phase} | {taken:.2f} | {shown} | {read / 1e9:.2f} | {written / 1e9:.2f} | {moving:.2f} | "
            f"{taken / limit:.2f} | {share} |"
        )
        total, bound = total + taken, bound + limit
    print(f"| step | {total:.2f} | | | | | {total / bound:.2f} | |\n")
    for rank, found in enumerate(ranks):
        print(
            f"rank {rank}: peak {found['peak'] / 1e9:.2f} GB, of which while building {found['building'] / 1e9:.2f}; buffers "
            f"{found['buffers'] / 1e6:.0f} MB with gathered Units, "
            f"{found['step_buffers'] / 1e6:.0f} MB of the streamed step; {found['parameters'] / 1e6:.0f} million parameters, "
            f"{16 * found['parameters'] / 1e9:.1f} GB of states; read per step {found['read'] / 1e9:.3f} GB, "
            f"of {found['all'] / 1e9:.3f} GB that all ranks read"
        )

    for rank, found in enumerate(theirs):
        phases = ", ".join(f"{phase} {statistics.median(found[phase]):.2f} s" for phase in ("forward and backward", "optimizer"))
        print(
            f"DeepSpeed ZeRO-Infinity, rank {rank}: {phases}; peak {found['peak'] / 1e9:.2f} GB, "
            f"{found['building'] / 1e9:.2f} before (built whole, without zero.Init); prefetch off; "
            f"losses {found['losses']}; parameters in {', '.join(found['dtypes'])}"
        )


def launch(worker: str, args: argparse.Namespace, ranks: int, directory: Path) -> list[dict]:
    outs = [directory / f"{worker}-{rank}.json" for rank in range(ranks)]
    command = [sys.executable, __file__, f"--worker={worker}", f"--shape={args.shape}", f"--place={args.place}"]
    command += [f"--steps={args.steps}", f"--fio-mib={args.fio_mib}", f"--fio-engine={args.fio_engine}"]
    command += [f"--directory={directory}", *(["--deepspeed-bf16"] if args.deepspeed_bf16 else [])]
    run_ranks([[*command, f"--out={out}"] for out in outs], args.timeout_s, worker)
    return [json.loads(out.read_text()) for out in outs]


def build(args: argparse.Namespace) -> Any:
    from torch.utils.checkpoint import checkpoint

    from shardwise.testing.models import GPT, GPTConfig

    model = GPT(GPTConfig(vocabulary=VOCABULARY, context=CONTEXT, **SHAPES[args.shape]))
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def train(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import shardwise as sw
    from shardwise.observe import MemorySampler
    from shardwise.tiers import Kind, Tier

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    offload = sw.Offload(**PLACES[args.place], path=args.directory)
    with MemorySampler() as memory:
        with sw.sharded_init(offload=offload):
            model = build(args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        run = sw.shard(model, optimizer, stage=3, offload=offload)
        building = memory.peak_bytes
        disk = run._runtime.offload.disk
        assert disk is not None
        tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
        phases = {name: dict(seconds=[], read=[], written=[]) for name in ("forward and backward", "optimizer")}
        losses = []
        rates = []

        def measure_disk() -> None:
            if dist.get_rank() == 0:
                rates.append(fio.bandwidth(Path(args.directory), "both", args.fio_engine, args.fio_mib << 20))
            dist.barrier()

        for number in range(args.steps + 1):
            measure_disk()
            marks = [(time.perf_counter(), disk.bytes_read, disk.bytes_written)]
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            dist.barrier()
            marks.append((time.perf_counter(), disk.bytes_read, disk.bytes_written))
            measure_disk()
            marks.append((time.perf_counter(), disk.bytes_read, disk.bytes_written))
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            marks.append((time.perf_counter(), disk.bytes_read, disk.bytes_written))
            losses.append(loss.item())
            for name, before, after in zip(phases, marks[::2], marks[1::2], strict=True):
                if number:  # the first step makes the moments and records the trace
                    for key, a, b in zip(("seconds", "read", "written"), before, after, strict=True):
                        phases[name][key].append(b - a)
    read = sum(statistics.median(phase["read"]) for phase in phases.values())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, read)
    found = dict(
        **phases,
        losses=losses,
        fio=rates,
        peak=memory.peak_bytes,
        building=building,
        buffers=run.ledger.peak(Tier.HOST, Kind.BUFFER),
        step_buffers=run._runtime.offload.step.buffer_bytes,
        parameters=sum(p.numel() for p in model.parameters()),
        read=read,
        all=sum(everyone),
    )
    Path(args.out).write_text(json.dumps(found))
    if dist.get_rank() == 0:
        print(run.report(), file=sys.stderr)
    run.close()
    dist.barrier()
    os._exit(0)


def infinity(args: argparse.Namespace) -> None:
    """DeepSpeed's stage 3 with parameters and optimizer states on NVMe; its asynchronous engine needs libaio's headers."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch

    from shardwise.observe import MemorySampler

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    nvme = {"device": "nvme", "nvme_path": args.directory, "pin_memory": False}
    largest = VOCABULARY * SHAPES[args.shape]["hidden"]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "buffer_count": 5, "buffer_size": largest + (1 << 20), "max_in_cpu": 0},
            "offload_optimizer": {**nvme, "buffer_count": 5},
            "sub_group_size": largest,
            # With its defaults it keeps more parameters in reach than it has buffers for: "Not enough buffers 0 for swapping 1".
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 16,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "fp16": {"enabled": False},
        "bf16": {"enabled": args.deepspeed_bf16},
    }
    with MemorySampler() as memory:
        model = build(args)
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        building, memory.peak_bytes = memory.peak_bytes, 0
        tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(engine.global_rank))
        found: dict[str, list[float]] = {"forward and backward": [], "optimizer": [], "losses": []}
        for number in range(args.steps + 1):
            begin = time.perf_counter()
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            middle = time.perf_counter()
            engine.step()
            end = time.perf_counter()
            found["losses"].append(round(loss.item(), 3))
            if number:
                found["forward and backward"].append(middle - begin)
                found["optimizer"].append(end - middle)
    dtypes = sorted({str(p.dtype) for p in engine.module.parameters()})
    Path(args.out).write_text(json.dumps({**found, "peak": memory.peak_bytes, "building": building, "dtypes": dtypes}))
    os._exit(0)


def alone(args: argparse.Namespace) -> None:
    import torch

    from shardwise.optim import adam

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = build(args)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(rank))
    times = []
    for _ in range(args.steps + 1):
        begin = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        times.append(time.perf_counter() - begin)
        model.zero_grad(set_to_none=True)
    del model
    group = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True).param_groups[0]
    vectors = [torch.zeros(ALONE_NUMEL) for _ in range(4)]
    updates = []
    for step in range(1, 6):
        begin = time.perf_counter()
        adam.update(group, step, *vectors)
        updates.append(time.perf_counter() - begin)
    scaled = [seconds * parameters / ranks / ALONE_NUMEL for seconds in updates]
    Path(args.out).write_text(json.dumps({"forward and backward": times[1:], "optimizer": scaled}))
    os._exit(0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="xl")
    parser.add_argument("--place", choices=PLACES, default="all")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--fio-mib", type=int, default=2048)
    parser.add_argument("--timeout-s", type=float, default=1800)
    parser.add_argument("--deepspeed", action="store_true", help="also run DeepSpeed ZeRO-Infinity (needs libaio-dev)")
    parser.add_argument("--deepspeed-bf16", action="store_true", help="... with 16-bit parameters")
    parser.add_argument("--no-alone", dest="alone", action="store_false")
    parser.add_argument("--fio-engine", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
