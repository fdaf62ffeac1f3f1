"""What test_transports.py starts under torchrun: one rank."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from shardwise.engine import threads


def main() -> None:
    what = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    from cases import CASES, ByHost, build
    from shardwise.testing import compare_with_plain

    say(f"rank {rank} user chose: {threads.user_chose()}")
    run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=3)
    if what == "threads":
        found = next(line for line in run.report().splitlines() if line.startswith("threads"))
        say(f"rank {rank} {found}")
        assert torch.get_num_threads() == int(found.split()[1].strip(","))
        return
    report = compare_with_plain(
        run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=4, accumulate=2, max_norm=0.5, add_up=ByHost(2)
    )
    say(f"rank {rank}: {run.transport.name}")
    say(f"rank {rank}: {str(report).partition('compared: ')[2]}")
    run.close()


def say(text: str) -> None:
    """Whole lines, even if ranks write at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
