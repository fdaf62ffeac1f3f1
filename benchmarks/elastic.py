"""Three torchrun agents train with one rank each; one is killed with its rank; the other two go on from the last checkpoint.

    python benchmarks/elastic.py [--steps 40]

Prints the loss curve with the number of ranks at every step, how soon the others noticed, and when training went on.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "elastic.py"
RENDEZVOUS = "join_timeout=120,last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=5"
"""torchrun waits 30 s for latecomers, and 15 s for signs of life, unless told otherwise."""


def start_agent(number: int, port: int, directory: Path, steps: int) -> subprocess.Popen[str]:
    """Start one torchrun agent, as on a host of its own. The first one has the rendezvous."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic", "--local-addr=127.0.0.1"),
        *("--monitor-interval=0.1", f"--rdzv-conf={RENDEZVOUS},is_host={int(number == 0)}"),
        *(str(EXAMPLE), "--checkpoints", str(directory / "all"), "--steps", str(steps), "--pause-s", "0.2"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    with open(directory / f"out-{number}", "w") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, text=True, start_new_session=True)


def shown(directory: Path) -> str:
    return "".join((directory / f"out-{number}").read_text() for number in range(3))


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def wait_for(pattern: str, directory: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not re.search(pattern, shown(directory)):
        if time.monotonic() > deadline:
            raise SystemExit(f"{pattern!r} was not printed within {limit_s:g} s:\n{shown(directory)}")
        time.sleep(0.05)


def end(agents: list[subprocess.Popen[str]]) -> None:
    """End what is left: agents end their ranks when they are terminated."""
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()
    for agent in agents:
        try:
            agent.wait(40)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def main() -> int:
    """Run it once; 0 if the curve is whole and the two survivors finished it."""
    parser = argparse.ArgumentParser(description="Lose one rank of three and go on with two.")
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="shardwise-elastic-") as name:
        directory = Path(name)
        agents = [start_agent(number, port, directory, asked.steps) for number in range(3)]
        try:
            wait_for(r"step 10  ranks 3 ", directory, 120)
            victims = (agents[2].pid, child_of(agents[2].pid))
            killed = time.time()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            codes = [agent.wait(200) for agent in agents[:2]]
        finally:
            end(agents)
        text = shown(directory)
    rows = re.findall(r"^(\S+) step (\d+)  ranks (\d)  loss (\S+)$", text, re.MULTILINE)
    for _, step, ranks, loss in rows:
        print(f"step {int(step):>3}  {ranks} ranks  loss {loss}")
    fails = re.findall(r"^(\S+) rank (\d) fails: (.*)$", text, re.MULTILINE)
    notices = sorted((float(at) - killed, rank, why) for at, rank, why in fails)
    for after_s, rank, why in notices:
        print(f"rank {rank} failed {after_s:.2f} s after the kill: {why[:160]} ...")
    again = [float(at) - killed for at, first in re.findall(r"^(\S+) 2 ranks begin after step (\d+)$", text, re.M)]
    print(f"training went on with 2 ranks {again[0] if again else float('nan'):.2f} s after the kill; agents ended with {codes}")
    steps = [int(step) for _, step, _, _ in rows]
    is_whole = sorted(set(steps)) == list(range(1, asked.steps + 1)) and rows[-1][2] == "2" and len(again) == 1
    if not is_whole or codes != [0, 0]:
        print(text)
    return 0 if is_whole and codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
