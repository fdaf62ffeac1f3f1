"""What waiting costs on this machine: a nap, waking another thread or process, a small message.

    python benchmarks/waiting.py [--rounds 300]

Microseconds, means over all rounds. A nap is `time.sleep(20e-6)`; a process is woken through a futex in shared memory as ranks
of one host are, a thread through a queue as Lanes are; a message is one exchange over gloo, as pairwise agreements are.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.comm import World, make_transport
from shardwise.testing import RankPool


def mean_us(action: Callable[[], object], rounds: int) -> float:
    for _ in range(20):
        action()
    begin = time.perf_counter()
    for _ in range(rounds):
        action()
    return 1e6 * (time.perf_counter() - begin) / rounds


def between_ranks(transport_name: str, rounds: int) -> float:
    """An agreement of two ranks on 100 bytes."""
    transport, _ = make_transport(transport_name, World.of(None, torch.device("cpu")), [], 1 << 20, 60.0)
    values = torch.zeros(100, dtype=torch.uint8)
    found = mean_us(lambda: transport.all_reduce(values, dist.ReduceOp.MAX), rounds)
    transport.close()
    return found


def between_threads(rounds: int) -> float:
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    answered: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def answer() -> None:
        while asked.get():
            answered.put(True)

    thread = threading.Thread(target=answer)
    thread.start()

    def ask() -> None:
        asked.put(True)
        answered.get()

    found = mean_us(ask, rounds)
    asked.put(False)
    thread.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    print("| what | us |\n|---|---|")
    print(f"| a nap of 20 us | {mean_us(lambda: time.sleep(20e-6), rounds):.0f} |")
    print(f"| another thread and back | {between_threads(rounds):.0f} |")
    with RankPool(2) as ranks:
        for name in ("shared", "pairwise"):
            print(f"| two ranks agree, {name} | {max(ranks.run(between_ranks, name, rounds)):.0f} |")


if __name__ == "__main__":
    main()
