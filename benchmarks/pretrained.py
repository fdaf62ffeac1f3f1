"""Peak memory of loading a Hugging Face directory on several ranks, and of exporting a checkpoint on one process.

    python benchmarks/pretrained.py [--load 36x1280 --export 48x1600 --ranks 2 --directory /tmp]

Both models are GPT-2s of the given layers x hidden size; the directories are made here, with random values, and removed.
Loading is `sharded_init(weights=...)` and `shard` at stage 3; the bound is shards + 3 x the largest Unit, and memory is private
pages plus the proportional share of shared ones, above what the process held before. Exporting is `shardwise export` of a
checkpoint of the second model; memory is the largest resident set of the whole process. What was exported is compared with what
was loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks import free_port, rank_environment

_BLOCK = 1 << 22  # random numbers that are drawn once and written again and again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", default="36x1280", help="layers x hidden size of the model that is loaded")
    parser.add_argument("--export", default="48x1600", help="the same of the model that is exported")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", help="where to write (default: the system's, for temporary files)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        load(args.work[0], Path(args.work[1]), args.save)
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as found:
        place = Path(found)
        write_directory(place / "loaded", args.load, args.vocabulary)
        measure_load(args, place / "loaded", None)
    with tempfile.TemporaryDirectory(dir=args.directory) as found:
        place = Path(found)
        write_directory(place / "original", args.export, args.vocabulary)
        measure_load(args, place / "original", place / "checkpoint")
        measure_export(place / "checkpoint", place / "exported", place / "original")


def config_of(shape: str, vocabulary: int) -> Any:
    import transformers

    layers, hidden = map(int, shape.split("x"))
    return transformers.GPT2Config(n_layer=layers, n_embd=hidden, n_head=hidden // 64, vocab_size=vocabulary)


def write_directory(path: Path, shape: str, vocabulary: int) -> None:
    """A Hugging Face directory with random values, streamed."""
    import torch
    import transformers

    from shardwise.checkpoint.hub_files import MAX_FILE_BYTES, HubPlan, HubWriter

    config = config_of(shape, vocabulary)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    tensors = {name: (p.dtype, tuple(p.shape)) for name, p in model.named_parameters()}
    path.mkdir()
    plan = HubPlan(tensors, MAX_FILE_BYTES)
    plan.create(path, {"config.json": config.to_json_string().encode()})
    writer = HubWriter(path, plan)
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for number, (name, entry) in enumerate(plan.entries.items()):
        turned = block.roll(number)  # tensors differ
        for start in range(0, entry.numel, _BLOCK):
            writer.write(name, start, turned[: min(_BLOCK, entry.numel - start)])
    writer.finish()
    writer.close()


def measure_load(args: argparse.Namespace, path: Path, save: Path | None) -> None:
    port = free_port()
    outs = [path.parent / f"{rank}.json" for rank in range(args.ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", str(path), str(out), *(["--save", str(save)] if save else [])],
            env=rank_environment(rank, args.ranks, port),
        )
        for rank, out in enumerate(outs)
    ]
    codes = [process.wait(timeout=1800) for process in processes]
    if any(codes):
        sys.exit(f"a rank failed: exit codes {codes}")
    for rank, out in enumerate(outs):
        found = json.loads(out.read_text())
        bound = found["shards"] + 3 * found["largest_unit"]
        peak = max(found["peak_build"], found["peak_shard"])
        print(
            f"load, rank {rank} of {args.ranks}: {found['numel'] / 1e6:.0f}M parameters, shards {found['shards'] / 1e6:.0f} MB, "
            f"largest Unit {found['largest_unit'] / 1e6:.0f} MB; peak while building {found['peak_build'] / 1e6:.0f} MB, "
            f"while sharding {found['peak_shard'] / 1e6:.0f} MB; bound {bound / 1e6:.0f} MB; "
            f"within the bound: {'yes' if peak <= bound else 'NO'}; {found['seconds']:.1f} s",
            flush=True,
        )


def load(path: str, out: Path, save: str | None) -> None:
    """On one rank."""
    import torch
    import transformers

    import shardwise as sw
    from shardwise.observe import MemorySampler, process_memory

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    warm = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=64, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    with sw.sharded_init():  # import everything that is imported lazily, before memory is measured
        warm_model = transformers.GPT2LMHeadModel(warm)
    sw.shard(warm_model, stage=3).close()
    config = transformers.AutoConfig.from_pretrained(path)
    before = process_memory().total
    torch.distributed.barrier()
    begin = time.perf_counter()
    with MemorySampler(period_s=0.002) as building, sw.sharded_init(weights=path):
        model = transformers.GPT2LMHeadModel(config)
    with MemorySampler(period_s=0.002) as sharding:
        run = sw.shard(model, stage=3)
    seconds = time.perf_counter() - begin
    units = run._runtime.units
    if save:
        run.save(save)
    out.write_text(
        json.dumps(
            dict(
                numel=sum(p.numel() for p in model.parameters()),
                shards=sum(u.layout.shard_numel * 4 for u in units),
                largest_unit=max(u.layout.numel * 4 for u in units),
                peak_build=building.peak_bytes - before,
                peak_shard=sharding.peak_bytes - before,
                seconds=seconds,
            )
        )
    )
    run.close()
    os._exit(0)


def measure_export(checkpoint: Path, target: Path, original: Path) -> None:
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "shardwise.cli", "export", str(checkpoint), str(target)])
    peak = 0
    while process.poll() is None:
        peak = max(peak, largest_resident_kb(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    if process.returncode:
        sys.exit("the export failed")
    print(f"export: peak resident memory {peak * 1.024 / 1e3:.0f} MB, {seconds:.1f} s; {compared(target, original)}")


def largest_resident_kb(pid: int) -> int:
    """The largest resident set of a process so far. What `wait4` returns would include that of the process that started it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def compared(target: Path, original: Path) -> str:
    import torch

    from shardwise.checkpoint.weights import open_weights

    one, two = open_weights(target), open_weights(original)
    numel = differing = 0
    for name, stored in two.tensors.items():
        length = torch.Size(stored.shape).numel()
        numel += length
        for start in range(0, length, 1 << 20):
            size = min(1 << 20, length - start)
            a, b = torch.empty(size), torch.empty(size)
            one.read(name, stored.stride, start, a, a.dtype)
            two.read(name, stored.stride, start, b, b.dtype)
            differing += int((a != b).sum())
    same_names = one.tensors.keys() == two.tensors.keys()
    return (
        f"{numel / 1e6:.0f}M parameters, {differing} differ from what was loaded, the same names: {'yes' if same_names else 'NO'}"
    )


if __name__ == "__main__":
    main()
