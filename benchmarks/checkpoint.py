"""Saving and loading beside fio, torch's distributed checkpoint with FSDP2, and DeepSpeed, in one interleaved run.

    python benchmarks/checkpoint.py [--shape large] [--ranks 2] [--rounds 2] [--directory DIR] [--systems memory,disk,...]
    python benchmarks/checkpoint.py --manifest          # size and time of the manifest for 4,096 ranks and 1,000 Units

Every system trains the same model at stage 3 (fp32, fused AdamW, batch 1, sequence 128) and saves and loads everything that
training needs, in every round, in an order that changes. fio runs right before every save and load of ours. Times are the slowest
rank's, with the fsync of the system (DCP and DeepSpeed leave their files in the page cache). Extra memory is the peak of a rank's
private and shared pages above what it had before or has after, page cache excluded. The delay of a save in the background is the
call and the next step, less a step without it. Ours loads into a run that has just been made; `reload` is a load into a run that
has trained, as the others always do. Files are dropped from the page cache first. `new memory s` is how long the ranks take, in
place of a load, to write once to as much new memory as a load takes: that is slow where a hypervisor takes free memory back.
`memory`: states in memory; `native`: the same, updated by the native Adam; `disk`: parameters, gradients and optimizer states on
disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fio
from offload import LEARNING_RATE, SHAPES, VOCABULARY, build
from ranks import run_ranks

SEQUENCE = 128
OURS = {
    "memory": {},
    "native": dict(optimizer="host"),
    "disk": dict(params="disk", grads="disk", optimizer="disk"),
}


def main() -> None:
    args = parse()
    if args.worker:
        {"DCP": dcp, "DeepSpeed": deepspeed}.get(args.worker, ours)(args)
        return
    if args.manifest:
        manifest()
        return
    fio.set_up()
    systems = args.systems.split(",")
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory(prefix="shardwise-checkpoint-", dir=args.directory) as name:
        directory = Path(name)
        args.fio_engines = fio.best_engines(directory, args.fio_mib << 20)
        for number in range(args.rounds):
            for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
                print(f"round {number + 1}: {system}", file=sys.stderr, flush=True)
                try:
                    found[system].append(launch(system, args, directory))
                except SystemExit as failed:  # another system's failure is shown, not the end of the run
                    if system in OURS:
                        raise
                    print(f"{failed.code}: left out", file=sys.stderr)
                    shutil.rmtree(directory / system.lower(), ignore_errors=True)
            measured = {system: runs for system, runs in found.items() if runs}
            if measured:
                show(args, measured)
                print("", flush=True)
        fio.clean_up(directory)


def launch(system: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One process per rank; what they measured, the slowest or largest of all ranks."""
    outs = [directory / f"{system}-{rank}.json" for rank in range(args.ranks)]
    command = [sys.executable, __file__, f"--worker={system}", f"--shape={args.shape}", f"--directory={directory}"]
    command += [f"--fio-mib={args.fio_mib}", f"--fio-engines={json.dumps(args.fio_engines)}", f"--repeats={args.repeats}"]
    run_ranks([[*command, f"--out={out}"] for out in outs], args.timeout_s, system)
    ranks = [json.loads(out.read_text()) for out in outs]
    return {key: [max(rank[key][n] for rank in ranks) for n in range(len(ranks[0][key]))] for key in ranks[0]}


def show(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    """The tables."""

    def middle(system: str, key: str) -> float:
        return statistics.median(value for launched in found[system] for value in launched[key])

    rounds = max(map(len, found.values()))
    print(f"{args.shape}, {args.ranks} ranks, sequence {SEQUENCE}, {rounds} rounds of {args.repeats}; medians\n")
    print("| system | save s | load s | reload s | GB on disk | files | extra MB save | extra MB load |")
    print("|---" * 8 + "|")
    for system in found:
        again = "reload" if system in OURS else "load"  # the others always load into a run that has trained
        cells = [f"{middle(system, key):.2f}" for key in ("save", "load", again)] + [f"{middle(system, 'bytes') / 1e9:.2f}"]
        cells += [f"{middle(system, 'files'):.0f}", *(f"{middle(system, key) / 1e6:.0f}" for key in ("save_extra", "load_extra"))]
        print(f"| {system} | {' | '.join(cells)} |")
    print("\n| system | save GB/s | fio GB/s | x fio | load GB/s | fio GB/s | x fio | new memory s | step s | delay s | x save |")
    print("|---" * 11 + "|")
    for system in (name for name in found if name in OURS):
        moved = middle(system, "bytes")
        ways = 2 if system == "disk" else 1  # a save reads what it writes, a load writes what it reads
        cells = []
        for what, key in (("save", "fio_save"), ("load", "fio_load")):
            rates = [
                (ways * moved / seconds, rate)
                for launched in found[system]
                for seconds, rate in zip(launched[what], launched[key], strict=True)
            ]
            ratio = statistics.median(rate / limit for rate, limit in rates)
            cells += [f"{statistics.median(rate for rate, _ in rates) / 1e9:.2f}"]
            cells += [f"{statistics.median(limit for _, limit in rates) / 1e9:.2f}", f"{ratio:.2f}"]
        delay = statistics.median(value for launched in found[system] for value in launched["delay"])
        cells += [
            f"{middle(system, 'touch'):.2f}",
            f"{middle(system, 'step'):.2f}",
            f"{delay:.2f}",
            f"{delay / middle(system, 'save'):.2f}",
        ]
        print(f"| {system} | {' | '.join(cells)} |")


class Measured:
    """What one rank measures."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self.is_weighing = True  # the first save and load: sampling memory takes time

    def note(self, **values: float) -> None:
        """Append values to their lists."""
        for key, value in values.items():
            self.found.setdefault(key, []).append(value)

    def timed(self, what: str, action: Callable[[], Any]) -> float:
        """Run it between two barriers; note seconds, or (when weighing) extra memory."""
        import torch.distributed as dist

        from shardwise.observe import MemorySampler

        dist.barrier()
        if self.is_weighing:
            with MemorySampler() as memory:
                before = memory.peak_bytes
                action()
                after = memory.sample()
            self.note(**{f"{what}_extra": memory.peak_bytes - max(before, after)})
            return 0.0
        begin = time.perf_counter()
        action()
        seconds = time.perf_counter() - begin
        self.note(**{what: seconds})
        dist.barrier()
        return seconds

    def write(self, args: argparse.Namespace) -> None:
        """Write what was measured to the file that the launcher reads."""
        Path(args.out).write_text(json.dumps(self.found))


def tree(path: Path) -> tuple[int, int]:
    """Bytes and number of the files below a directory."""
    files = [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files), len(files)


def start(args: argparse.Namespace) -> Any:
    """Join the group; returns this rank's batch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    return torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(dist.get_rank()))


def remove(path: Path) -> None:
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def ours(args: argparse.Namespace) -> None:
    """This library, with states in memory or on disk."""
    import torch
    import torch.distributed as dist

    import shardwise as sw
    from shardwise.observe import process_memory
    from shardwise.tiers import aligned_memory

    tokens = start(args)
    asked = OURS[args.worker]
    where = {"path": args.directory} if "disk" in asked.values() else {}
    offload = sw.Offload(**asked, **where) if asked else None
    measured = Measured()
    path = Path(args.directory) / "checkpoint"
    saving, loading = ("both", "both") if args.worker == "disk" else ("write", "read")

    def make() -> tuple[Any, Any, Any]:
        with sw.sharded_init(offload=offload):
            model = build(args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        return model, optimizer, sw.shard(model, optimizer, stage=3, offload=offload)

    def limit(mode: str) -> float:
        dist.barrier()
        rate = torch.zeros(1, dtype=torch.float64)
        if dist.get_rank() == 0:
            rate += fio.bandwidth(Path(args.directory), mode, json.loads(args.fio_engines)[mode], args.fio_mib << 20)
        dist.broadcast(rate, 0)
        return rate.item()

    def train() -> None:
        model, optimizer, run = make()

        def step() -> None:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

        def begin() -> None:
            tickets.append(run.save(path, wait=False))
            step()

        tickets: list[Any] = []
        step()
        measured.is_weighing = True
        measured.timed("save", lambda: run.save(path))
        measured.is_weighing = False
        for _ in range(args.repeats):
            remove(path)
            seconds = [measured.timed("step", step) for _ in range(2)]
            measured.timed("beside", begin)
            tickets.pop().wait()
            remove(path)
            seconds.append(measured.timed("step", step))
            measured.note(delay=measured.found["beside"][-1] - statistics.median(seconds))
            measured.note(fio_save=limit(saving))
            measured.timed("save", lambda: run.save(path))
            num_bytes, num_files = tree(path)
            measured.note(bytes=num_bytes, files=num_files)
        measured.timed("reload", lambda: run.load(path))
        run.close()

    train()
    for number in range(args.repeats + 1):  # a job that starts again
        gc.collect()
        evict(path)
        run = make()[-1]
        measured.is_weighing = number == 0
        if number:
            measured.note(fio_load=limit(loading))
        before = process_memory().total
        measured.timed("load", lambda run=run: run.load(path))
        grown = max(process_memory().total - before, 0)
        run.close()
        del run
    gc.collect()
    made = make()  # as before a load: what earlier runs have freed may belong to a hypervisor by now
    limit(loading)
    measured.timed("touch", lambda: aligned_memory(grown).fill_(1))
    made[-1].close()
    remove(path)
    measured.write(args)
    dist.barrier()
    os._exit(0)


def evict(path: Path) -> None:
    """Drop the files from the page cache."""
    for file in (found for found in path.rglob("*") if found.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def dcp(args: argparse.Namespace) -> None:
    """torch.distributed.checkpoint with FSDP2."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    tokens = start(args)
    model = build(args)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
    measured = Measured()
    path = Path(args.directory) / "dcp"

    def save() -> None:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.save(states, checkpoint_id=path)

    def load() -> None:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(states, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])

    for number in range(args.repeats + 1):
        measured.is_weighing = number == 0
        measured.timed("save", save)
        num_bytes, num_files = tree(path)
        measured.note(bytes=num_bytes, files=num_files)
        evict(path)
        measured.timed("load", load)
        remove(path)
    measured.write(args)
    dist.barrier()
    os._exit(0)


def deepspeed(args: argparse.Namespace) -> None:
    """DeepSpeed stage 3."""
    import torch
    import torch.distributed as dist

    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    ds.init_distributed(dist_backend="gloo", verbose=False)
    tokens = start(args)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        # Smaller buckets than its own 500 million elements; 774M parameters still do not fit into 24 GB here.
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_max_live_parameters": 100_000_000,
            "sub_group_size": 100_000_000,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
    }
    with ds.zero.Init(config_dict_or_path=config):
        model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    engine, _, _, _ = ds.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()
    measured = Measured()
    path = Path(args.directory) / "deepspeed"
    for number in range(args.repeats + 1):
        measured.is_weighing = number == 0
        measured.timed("save", lambda: engine.save_checkpoint(str(path)))
        num_bytes, num_files = tree(path)
        measured.note(bytes=num_bytes, files=num_files)
        evict(path)
        measured.timed("load", lambda: engine.load_checkpoint(str(path)))
        remove(path)
    measured.write(args)
    dist.barrier()
    os._exit(0)


def manifest() -> None:
    """The real function on a layout of 1,000 Units for growing numbers of ranks."""
    import torch

    from shardwise.checkpoint import Manifest, make_manifest
    from shardwise.partition import make_layout

    print("| ranks | Units | parameters | manifest MB | to make ms | to read ms |")
    print("|---" * 6 + "|")
    for ranks in (2, 64, 4096):
        units = []
        for number in range(1000):
            names = [f"model.layers.{number}.{part}.weight" for part in ("norm", "q", "k", "v", "o", "up", "gate", "down")]
            shapes = [(8192,), *[(8192, 8192)] * 4, *[(28672, 8192)] * 2, (8192, 28672)]
            params = [
                (name, shape, torch.empty(shape, device="meta").stride()) for name, shape in zip(names, shapes, strict=True)
            ]
            units.append((make_layout(params, 2, ranks), torch.bfloat16, True))
        begin = time.perf_counter()
        text = make_manifest(units, "0" * 32, ranks, 1000, {}).to_bytes()
        made = time.perf_counter()
        Manifest.from_bytes(text, "it")
        read = time.perf_counter()
        print(
            f"| {ranks} | {len(units)} | {8 * len(units)} | {len(text) / 1e6:.2f} | {1e3 * (made - begin):.0f} | "
            f"{1e3 * (read - made):.0f} |"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--systems", default="memory,native,disk,DCP,DeepSpeed")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--fio-mib", type=int, default=2048)
    parser.add_argument("--fio-engines", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--timeout-s", type=float, default=3000.0)
    parser.add_argument("--manifest", action="store_true")
    parser.add_argument("--worker", choices=[*OURS, "DCP", "DeepSpeed"], help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
