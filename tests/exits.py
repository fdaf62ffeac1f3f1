"""Two-rank runs that end in every way a script can, with delays at the end; prints how each process ended.

    python tests/exits.py 500 [seed]

Every run is a pair of processes forked from this one, so that 500 of them take minutes. A process that ends by its own script
runs the interpreter's whole finalization; one that was ended by a signal of its own (an abort, a segmentation fault) is counted.
"""

from __future__ import annotations

import collections
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, not in every rank
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.observe import delays
from shardwise.testing.models import GPT, GPTConfig

WAYS = ("falls off the end", "closes", "raises in backward", "raises in forward", "exits in backward", "drops the run")
TRANSPORTS = ("shared", "pairwise")
OFFLOADS: tuple[Any, ...] = (None, "disk")
EXPECTED = {0, 1, 3}
"""Exit codes of a script that ended, raised, or called sys.exit(3)."""


class _Stop:
    """A tensor hook that ends the script in the middle of a backward."""

    def __init__(self, way: str) -> None:
        self._way = way

    def __call__(self, grad: torch.Tensor) -> None:
        if self._way == "exits in backward":
            raise SystemExit(3)
        raise RuntimeError("a mistake in user code")


def script(number: int, seed: int, rank: int, directory: str) -> None:
    """What one rank of one run does; returns, raises or exits."""
    rng = random.Random(f"{seed} {number} {rank}")
    shared = random.Random(f"{seed} {number}")
    way, transport, offload = shared.choice(WAYS), shared.choice(TRANSPORTS), shared.choice(OFFLOADS)
    ending_rank = shared.choice((0, 1, None))  # one rank ends so, or both
    stage, min_unit_bytes = 3 if offload else shared.choice((1, 2, 3)), shared.choice((0, 1 << 20))
    if ending_rank not in (None, rank):
        way = "falls off the end"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store-{number}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=67, context=16, layers=3, heads=2, hidden=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"transport": transport, "offload": offload, "min_unit_bytes": min_unit_bytes, "timeout_s": 3.0}
    run = sw.shard(model, optimizer, stage=stage, **options)
    tokens = torch.randint(0, 67, (2, 10), generator=torch.Generator().manual_seed(number + rank))
    with delays(lambda edge: time.sleep(rng.random() * 0.02) if rng.random() < 0.3 else None):
        for step in range(2):
            if step == 1 and way == "raises in forward":
                raise RuntimeError("a mistake in user code")
            loss = model(tokens[:, :-1], tokens[:, 1:])
            if step == 1 and "backward" in way:
                first: nn.Parameter = next(model.blocks[1].parameters())
                first.register_hook(_Stop(way))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:])  # gathers may be under way when the script ends
        if way == "closes":
            run.close()
        if way == "drops the run":
            del run, model, optimizer, loss
        time.sleep(rng.random() * 0.02)
        if shared.random() < 0.5 and way != "closes":
            dist.destroy_process_group()


def start(number: int, seed: int, rank: int, directory: str) -> int | None:
    """Fork a rank; None in the child, which goes on to end as a script does."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(f"{directory}/log-{number}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    script(number, seed, rank, directory)
    return None


def wait_for(pid: int, limit_s: float) -> int | None:
    """Exit code, minus a signal, or None if it had to be killed."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> int | None:
    """Start the runs one after the other; None in a rank, which ends now."""
    runs, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    directory = tempfile.mkdtemp(prefix="shardwise-exits-")  # no context: ranks that leave this function must not remove it
    ends: collections.Counter[str] = collections.Counter()
    bad: list[str] = []
    for number in range(runs):
        pids = []
        for rank in range(2):
            pid = start(number, seed, rank, directory)
            if pid is None:
                return None
            pids.append(pid)
        for rank, pid in enumerate(pids):
            code = wait_for(pid, 60.0)
            ends["killed after 60 s" if code is None else f"exit code {code}"] += 1
            if code not in EXPECTED:
                text = Path(f"{directory}/log-{number}-{rank}").read_text(errors="replace")
                bad.append(f"run {number}, rank {rank}: {code}\n{text[-6000:]}")
    shutil.rmtree(directory)
    for text in bad[:5]:
        print(text)
    print(f"{runs} runs of two ranks: {dict(sorted(ends.items()))}")
    print(f"{len(bad)} processes ended otherwise than by their script")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
