"""Peak memory and time of building a transformers GPT-2 under sharded_init and sharding it.

    python benchmarks/construction.py [--layers 12 --hidden 768 --vocabulary 50257 --ranks 2 --rounds 3]

Each rank runs in a process of its own; memory is private pages plus the proportional share of shared ones, above what
the process held before, and is compared with the bound shards + 3 x the largest Unit. Values are compared with plain
construction by checksum. Then the same and plain construction, each with sharding, are timed in turn.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import free_port, rank_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of timing; 0 measures memory only")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        work(args)
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for rank in range(args.ranks):
            env = rank_environment(rank, args.ranks, port)
            out = Path(directory) / f"{rank}.json"
            processes.append((subprocess.Popen([sys.executable, *sys.argv, "--out", str(out)], env=env), out))
        codes = [process.wait(timeout=600) for process, _ in processes]
        if any(codes):
            sys.exit(f"a rank failed: exit codes {codes}")
        for rank, (_, out) in enumerate(processes):
            show(rank, json.loads(out.read_text()))
        if args.rounds:
            show_times(json.loads(processes[0][1].read_text())["times"], args.rounds)


def show(rank: int, found: dict) -> None:
    bound = found["shards"] + 3 * found["largest_unit"]
    print(
        f"rank {rank}: parameters {found['params'] / 1e6:.1f} MB, shards {found['shards'] / 1e6:.1f} MB, largest Unit "
        f"{found['largest_unit'] / 1e6:.1f} MB; peak while building {found['peak_build'] / 1e6:.1f} MB, while sharding "
        f"{found['peak_shard'] / 1e6:.1f} MB; bound {bound / 1e6:.1f} MB; "
        f"within the bound: {'yes' if max(found['peak_build'], found['peak_shard']) <= bound else 'NO'}; "
        f"bit-identical: {'yes' if found['identical'] else 'NO'}"
    )


def show_times(times: dict[str, list[list[float]]], rounds: int) -> None:
    """Rank 0's seconds: building, sharding and both, wall and CPU, as medians."""
    print(f"\nmedians of {rounds} rounds\n\n| construction | build (s) | shard (s) | both, wall (s) | both, CPU (s) |")
    print("|---" * 5 + "|")
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    for name, (build, shard, cpu) in medians.items():
        print(f"| {name} | {build:.2f} | {shard:.2f} | {build + shard:.2f} | {cpu:.2f} |")
    plain, sharded = medians["plain"], medians["sharded_init"]
    print(
        f"\nsharded_init / plain: {(sharded[0] + sharded[1]) / (plain[0] + plain[1]):.2f} x wall, "
        f"{sharded[2] / plain[2]:.2f} x CPU"
    )


def timed(build: Callable[[], Any], shard: Callable[[Any], Any]) -> list[float]:
    """Seconds of building and of sharding, and CPU seconds of both."""
    import torch

    torch.manual_seed(0)
    torch.distributed.barrier()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    model = build()
    built = time.perf_counter()
    run = shard(model)
    found = [built - begin, time.perf_counter() - built, time.process_time() - begin_cpu]
    run.close()
    return found


def work(args: argparse.Namespace) -> None:
    import torch
    import transformers

    import shardwise as sw
    from shardwise.observe import MemorySampler, process_memory
    from shardwise.tiers import checksum

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    config = transformers.GPT2Config(
        n_layer=args.layers, n_embd=args.hidden, n_head=args.hidden // 64, vocab_size=args.vocabulary
    )
    warm = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=64, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    with sw.sharded_init():  # import everything that is imported lazily, before memory is measured
        warm_model = transformers.GPT2LMHeadModel(warm)
    sw.shard(warm_model, stage=3).close()
    before = process_memory().total
    torch.manual_seed(0)
    with MemorySampler(period_s=0.002) as building, sw.sharded_init():
        model = transformers.GPT2LMHeadModel(config)
    with MemorySampler(period_s=0.002) as sharding:
        run = sw.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    units = run._runtime.units
    digests = {name: checksum(value) for name, value in run.iter_full_state()}
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    expected = {name: checksum(value) for name, value in plain.state_dict().items()}
    del plain

    def build_sharded() -> Any:
        with sw.sharded_init():
            return transformers.GPT2LMHeadModel(config)

    def shard(model: Any) -> Any:
        return sw.shard(model, torch.optim.AdamW(model.parameters()), stage=3)

    times: dict[str, list[list[float]]] = {"plain": [], "sharded_init": []}
    for _ in range(args.rounds):
        times["plain"].append(timed(lambda: transformers.GPT2LMHeadModel(config), shard))
        times["sharded_init"].append(timed(build_sharded, shard))
    Path(args.out).write_text(
        json.dumps(
            dict(
                params=sum(p.numel() * 4 for p in model.parameters()),
                shards=sum(u.layout.shard_numel * 4 for u in units),
                largest_unit=max(u.layout.numel * 4 for u in units),
                peak_build=building.peak_bytes - before,
                peak_shard=sharding.peak_bytes - before,
                times=times,
                identical=all(digests[name] == expected[name] for name in expected) and len(expected) > 10,
            )
        )
    )
    run.close()
    os._exit(0)


if __name__ == "__main__":
    main()
