"""Kill a two-rank job with SIGKILL again and again, at random moments and in the middle of saving, and let it go on.

    python benchmarks/kill_trials.py --trials 100 [--seed 0] [--limit-s 1800]

Trial k starts two ranks, which resume from what trial k - 1 left, train with a checkpoint every one or two steps, and are killed.
Every loss of every rank is compared, to the last bit, with a job that was never interrupted; after the first save of a trial
the directory must hold the two newest checkpoints and nothing else. Half of the trials have all states on disk, and half of
either kind save in the background. Ranks are forked from this process, so that a trial takes about a second.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # once, not in every rank
import torch.distributed as dist

import shardwise as sw
from shardwise.testing.models import GPT, GPTConfig

LAST = 300
"""Steps of the reference; a job that has come so far begins again."""
KEEP = 2
MOMENTS = ("any time", "after a save", "in a save")
DISK = sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)


def train(rank: int, place: Path, log: Path, *, is_on_disk: bool, every: int, is_asynchronous: bool, last: int) -> None:
    """What one rank does: resume, train, save. Losses and problems are appended to the log, a line each."""
    lines = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=67, context=16, layers=3, heads=2, hidden=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = sw.shard(model, optimizer, stage=3, offload=DISK if is_on_disk else None)
    checkpoints = sw.Checkpoints(place, keep=KEEP)
    found = checkpoints.resume(run)
    first = 0 if found is None else found.num_steps
    os.write(lines, f"resumed {rank} {first}\n".encode())
    num_saves, pending = 0, None
    for step in range(first, last):
        tokens = torch.randint(0, 67, (2, 10), generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(lines, f"loss {rank} {step} {loss.item().hex()}\n".encode())
        if every and (step + 1) % every == 0:
            if pending is not None:
                pending.wait()
                num_saves += 1
                if num_saves == 1 and rank == 0:
                    check_directory(place, lines)
            if is_asynchronous:
                pending = checkpoints.save(run, step + 1, wait=False)
            else:
                checkpoints.save(run, step + 1)
                num_saves += 1
                if num_saves == 1 and rank == 0:
                    check_directory(place, lines)
    if pending is not None:
        pending.wait()
    run.close()


def check_directory(place: Path, lines: int) -> None:
    names = sorted(os.listdir(place))
    is_clean = len(names) <= KEEP and all(
        name.startswith("step-") and (place / name / "manifest.json").is_file() for name in names
    )
    os.write(lines, f"{'clean' if is_clean else 'leftovers'} {' '.join(names)}\n".encode())


def start(number: int, directory: Path, **options: object) -> list[int]:
    """Fork two ranks; return their process ids."""
    pids = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            serve(rank, number, directory, **options)
        pids.append(pid)
    return pids


def serve(rank: int, number: int, directory: Path, **options: object) -> None:
    code = 1
    try:
        os.setsid()
        shown = os.open(directory / f"out-{number}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(shown, 1)
        os.dup2(shown, 2)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(directory / f"store-{number}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        train(rank, **options)  # type: ignore[arg-type]
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def committed(place: Path) -> list[str]:
    return [path.name for path in sw.Checkpoints(place, keep=KEEP).all()]


def is_saving(place: Path) -> bool:
    return place.is_dir() and any(".saving-" in name for name in os.listdir(place))


def wait_for_moment(moment: str, place: Path, pids: list[int], rng: random.Random) -> bool:
    """Wait until it is time to kill; False if a rank has ended by itself."""
    deadline = time.monotonic() + 60.0
    if moment == "any time":
        time.sleep(rng.uniform(0.0, 1.5))
        return not ended(pids)
    before = committed(place)[-1:]
    while committed(place)[-1:] == before:
        if ended(pids) or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.3))
    while moment == "in a save" and not is_saving(place):
        if ended(pids) or time.monotonic() > deadline:
            return False
    if moment == "in a save":
        time.sleep(rng.uniform(0.0, 0.02))
    return True


def ended(pids: list[int]) -> bool:
    """Whether a process has ended; it stays to be waited for."""
    return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None for pid in pids)


def kill(pids: list[int], rng: random.Random) -> None:
    """Kill all, in any order, and wait for their ends."""
    for pid in rng.sample(pids, len(pids)):
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


class Tally:
    """What was seen over all trials."""

    def __init__(self, reference: dict[tuple[int, int], str]) -> None:
        self.reference = reference
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def read(self, log: Path, newest: int, label: str) -> None:
        """Compare what a trial has logged with the reference and with what it had to resume from."""
        for line in log.read_text().splitlines() if log.is_file() else ():
            word, *rest = line.split(" ")
            if word == "loss":
                rank, step, value = int(rest[0]), int(rest[1]), rest[2]
                self.counts["losses compared"] += 1
                if self.reference[rank, step] != value:
                    self.counts["mismatches"] += 1
                    self.problems.append(f"{label}: step {step} of rank {rank} has another loss than the reference")
            elif word == "resumed" and rest[0] == "0":
                self.counts["resumed"] += newest > 0
                if int(rest[1]) != newest:
                    self.problems.append(f"{label}: resumed after step {rest[1]}, the newest checkpoint has {newest}")
            elif word in ("clean", "leftovers"):
                self.counts[f"{word} after the first save"] += 1
                if word == "leftovers":
                    self.problems.append(f"{label}: left {rest}")


def make_reference(directory: Path) -> dict[tuple[int, int], str]:
    """The losses of a job that nobody interrupts, by rank and step."""
    log = directory / "reference"
    options = {"is_on_disk": False, "every": 0, "is_asynchronous": False, "last": LAST}
    pids = start(-1, directory, place=directory / "none", log=log, **options)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if codes != [0, 0]:
        raise SystemExit(f"the reference failed:\n{(directory / 'out--1').read_text()}")
    losses = [line.split(" ")[1:] for line in log.read_text().splitlines() if line.startswith("loss ")]
    return {(int(rank), int(step)): value for rank, step, value in losses}


def trial(number: int, directory: Path, tally: Tally, rng: random.Random) -> None:
    """One job: start, wait for the moment, kill, look."""
    place, log = directory / "checkpoints", directory / f"log-{number}"
    options = {
        "is_on_disk": number % 2 == 1,
        "every": rng.choice((1, 2)),
        "is_asynchronous": number % 4 >= 2,
        "last": LAST,
    }
    moment = rng.choice(MOMENTS)
    label = f"trial {number} ({moment}, {options})"
    newest = int(committed(place)[-1].removeprefix("step-")) if committed(place) else 0
    pids = start(number, directory, place=place, log=log, **options)
    is_killed = wait_for_moment(moment, place, pids, rng) and not ended(pids)
    kill(pids, rng)
    how = "asynchronous" if options["is_asynchronous"] else "synchronous"
    tally.counts["killed" if is_killed else "ended by themselves"] += 1
    if is_killed and is_saving(place):
        tally.counts["killed during a save"] += 1
        tally.counts[f"killed during a save, {how}, states {'on disk' if options['is_on_disk'] else 'in memory'}"] += 1
    tally.counts[f"{how} trials"] += 1
    tally.counts["trials with states on disk"] += bool(options["is_on_disk"])
    tally.read(log, newest, label)
    shown = (directory / f"out-{number}").read_text() if (directory / f"out-{number}").is_file() else ""
    is_at_end = committed(place)[-1:] == [f"step-{LAST:08d}"] or newest >= LAST - 2
    if not is_killed and not is_at_end:
        tally.problems.append(f"{label}: ended by itself\n{shown[-3000:]}")
    elif "Error" in shown and is_killed:
        tally.counts["ranks that noticed the other's end"] += 1
    if is_at_end:
        shutil.rmtree(place)
        tally.counts["begun again"] += 1


def main() -> int:
    """Run the trials and print the summary; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description="Kill a job at random moments; it must go on to the last bit.")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=1800.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(asked.seed)
    begin = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="shardwise-kills-"))
    try:
        tally = Tally(make_reference(directory))
        done = 0
        while done < asked.trials and time.monotonic() - begin < asked.limit_s:
            trial(done, directory, tally, rng)
            done += 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for problem in tally.problems[:10]:
        print(problem)
    print(f"{done} of {asked.trials} trials in {time.monotonic() - begin:.0f} s, seed {asked.seed}")
    for what, count in sorted({"mismatches": 0, "leftovers after the first save": 0, **tally.counts}.items()):
        print(f"  {what}: {count}")
    print(f"  problems: {len(tally.problems)}")
    return 1 if tally.problems or done < asked.trials else 0


if __name__ == "__main__":
    sys.exit(main())
