"""Several hosts: network namespaces joined by a switch; hybrid sharding; one host's link is cut in the middle of a step.

    python benchmarks/hosts.py [--hosts 3] [--ranks-per-host 2] [--timeout-s 10] [--steps 40]

Needs root and iproute2. Stage 3, sharded inside every host and replicated across hosts, a checkpoint after every step. When some
steps are done the last host's link is cut. Prints, for every rank, when it failed after that and what its error says; then starts
the hosts that are left from the last checkpoint, and prints the losses before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

BATCH, WIDTH, LAYERS = 12, 256, 6
CUT_AFTER = 6  # steps


# -- one rank ----------------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Train; write every step's loss, or the error, with the time."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out = Path(args.place) / f"{args.worker}-rank-{rank}"
    mesh = init_device_mesh("cpu", (ranks // args.ranks_per_host, args.ranks_per_host), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = sw.shard(model, optimizer, stage=3, mesh=mesh, timeout_s=args.timeout_s, min_unit_bytes=0)
    checkpoints = sw.Checkpoints(Path(args.place) / "checkpoints", keep=2)
    found = checkpoints.resume(run)
    try:
        for step in range(0 if found is None else found.num_steps, args.steps):
            batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
            mine = batch[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
            loss = (model(mine) - mine).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(run, step + 1)
            note(out, {"time": time.time(), "step": step + 1, "loss": loss.item(), "transport": run.transport.name})
    except (sw.ShardwiseError, RuntimeError) as error:
        note(out, {"time": time.time(), "error": f"{type(error).__name__}: {error}"})
        os._exit(3)
    run.close()
    os._exit(0)


def note(path: Path, entry: dict[str, object]) -> None:
    """Append a line."""
    with open(path, "a") as file:
        file.write(json.dumps(entry) + "\n")


def notes(path: Path) -> list[dict[str, object]]:
    """The whole lines of a file."""
    return (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    )


# -- hosts -------------------------------------------------------------------------------------------------------------


def ip(*arguments: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def hosts_on_a_switch(number: int) -> Iterator[tuple[str, list[str], list[str]]]:
    """The namespace of the switch, those of the hosts (10.213.8.1 and so on), and the hosts' links, by name."""
    tag = uuid.uuid4().hex[:6]
    switch, spaces = f"sws{tag}", [f"swh{tag}{host}" for host in range(number)]
    links = [f"sl{tag}{host}" for host in range(number)]
    try:
        for space in (switch, *spaces):
            ip("netns", "add", space)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host, (space, link) in enumerate(zip(spaces, links, strict=True)):
            ip("link", "add", link, "netns", space, "type", "veth", "peer", "name", f"port{host}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{host}", "master", "bridge")
            ip("-n", switch, "link", "set", f"port{host}", "up")
            ip("-n", space, "addr", "add", f"10.213.8.{host + 1}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield switch, spaces, links
    finally:
        for space in (*spaces, switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def start(
    args: argparse.Namespace, which: str, place: Path, spaces: list[str], links: list[str]
) -> list[subprocess.Popen[bytes]]:
    """All ranks of these hosts."""
    running = []
    for rank in range(len(spaces) * args.ranks_per_host):
        host, local = divmod(rank, args.ranks_per_host)
        env = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": links[host],
            "MASTER_ADDR": "10.213.8.1",
            "MASTER_PORT": "29511",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(len(spaces) * args.ranks_per_host),
            "LOCAL_WORLD_SIZE": str(args.ranks_per_host),
        }
        options = [f"--worker={which}", f"--place={place}", f"--timeout-s={args.timeout_s}", f"--steps={args.steps}"]
        options.append(f"--ranks-per-host={args.ranks_per_host}")
        command = ["ip", "netns", "exec", spaces[host], sys.executable, __file__, *options]
        with open(place / "log", "ab") as log:
            running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    return running


def end(running: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Wait for processes, and end what is left."""
    deadline = time.monotonic() + timeout_s
    try:
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        return [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
    with (
        tempfile.TemporaryDirectory(prefix="shardwise-hosts-") as directory,
        hosts_on_a_switch(args.hosts) as (switch, spaces, links),
    ):
        place = Path(directory)
        ranks = args.hosts * args.ranks_per_host
        running = start(args, "first", place, spaces, links)
        first = [place / f"first-rank-{rank}" for rank in range(ranks)]
        deadline = time.monotonic() + 300
        while len(notes(first[0])) < CUT_AFTER:
            if time.monotonic() > deadline or any(process.poll() is not None for process in running):
                end(running, 0)
                sys.exit(f"the ranks did not train:\n{(place / 'log').read_text()}")
            time.sleep(0.02)
        ip("-n", switch, "link", "set", f"port{args.hosts - 1}", "down")
        cut = time.time()
        codes = end(running, 60 + 4 * args.timeout_s)
        print(
            f"{args.hosts} hosts of {args.ranks_per_host} ranks, {notes(first[0])[0]['transport']}, timeout_s {args.timeout_s:g}"
        )
        print(f"the link of host {args.hosts - 1} was cut after {len(notes(first[0])) - 1} steps\n")
        print("| rank | host | failed after s | exit code | ranks that it names | error |")
        print("|---|---|---|---|---|---|")
        for rank, path in enumerate(first):
            last = notes(path)[-1]
            text = str(last.get("error", "none"))
            after = f"{float(last['time']) - cut:.1f}" if "error" in last else "-"  # type: ignore[arg-type]
            told = re.findall(r"for rank (\d+)|heard of ranks? ([\d, ]+)", text)
            named = sorted({int(number) for found in told for part in found for number in re.findall(r"\d+", part)})
            shown = f"{named} | {text[:160]}"
            print(f"| {rank} | {rank // args.ranks_per_host} | {after} | {codes[rank]} | {shown} |")
        before = [entry for entry in notes(first[0]) if "loss" in entry]
        running = start(args, "second", place, spaces[:-1], links[:-1])
        codes = end(running, 300)
        after_restart = [entry for entry in notes(place / "second-rank-0") if "loss" in entry]
        if any(codes) or not after_restart:
            sys.exit(f"the restart failed ({codes}):\n{(place / 'log').read_text()[-4000:]}")
        print(
            "\nthe first of these errors in full:\n"
            + str(next(n["error"] for path in first[1:] for n in notes(path) if "error" in n))
        )
        begin, last_step = after_restart[0]["step"], after_restart[-1]["step"]
        print(f"\nrestarted with {args.hosts - 1} hosts: goes on with step {begin}, ends with {last_step}")
        shown_losses = [*before[-3:], *after_restart[:2], after_restart[-1]]
        print("losses of rank 0: " + ", ".join(f"step {entry['step']} {entry['loss']:.5f}" for entry in shown_losses))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--worker", choices=("first", "second"), help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
