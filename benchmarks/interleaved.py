"""Runs settings as process groups of their own, several rounds in changing order; shared by benchmarks that compare systems."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ranks import run_ranks

Found = dict[str, list[dict[str, Any]]]
"""What each round of each setting gave: figures, or an error."""


def run_rounds(settings: Sequence[str], rounds: int, launch: Callable[[str, Path], dict[str, Any]], directory: str) -> Found:
    """Launch every setting once per round."""
    found: Found = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory(prefix="shardwise-benchmark-", dir=directory) as place:
        for number in range(rounds):
            at = number % len(settings)
            for setting in [*settings[at:], *settings[:at]]:
                found[setting].append(launch(setting, Path(place)))
                print(f"round {number + 1} {setting}: {found[setting][-1]}", file=sys.stderr, flush=True)
    return found


def launch_ranks(
    script: str, setting: str, passed_on: Mapping[str, object], ranks: int, timeout_s: float, place: Path
) -> dict[str, Any]:
    """All ranks of a setting once: what the slowest one took, CPU seconds and memory per rank; or the first rank's error."""
    out = place / "out"
    options = [f"--{name}={value}" for name, value in passed_on.items()]
    command = [sys.executable, script, f"--worker={setting}", f"--out={out}", *options]
    with open(place / "log", "w+") as log:
        try:
            run_ranks([command] * ranks, timeout_s, setting, log)
        except (SystemExit, subprocess.TimeoutExpired) as error:
            log.seek(0)
            return {"error": f"{error}; the last line printed: {(log.read().strip().splitlines() or [''])[-1]}"}
    told = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    for rank in told:
        if "error" in rank:
            return {"error": rank["error"]}
    return {
        "wall_s": [max(times) for times in zip(*(rank["wall_s"] for rank in told), strict=True)],
        "cpu_s": [sum(times) / ranks for times in zip(*(rank["cpu_s"] for rank in told), strict=True)],
        "peak_bytes": max(rank["peak_bytes"] for rank in told),
        **{key: told[0][key] for key in ("loss", "sent") if key in told[0]},
    }


def tell(out: str, train: Callable[[], dict[str, Any]]) -> None:
    """One rank: train, write what was measured, or the error, and end the process: some systems hang in their own clean-up."""
    try:
        found = train()
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(found))
    sys.stderr.flush()
    os._exit(0)


def middle(found: Found, setting: str, key: str) -> float:
    """The median over rounds and steps of one figure; NaN if the setting never ran."""
    values = [
        value
        for run in found.get(setting, ())
        if key in run
        for value in (run[key] if isinstance(run[key], list) else [run[key]])
    ]
    return statistics.median(values) if values else math.nan


def figures(found: Found, setting: str, base: str, *, cpu: bool) -> list[str]:
    """The cells of one setting: wall and CPU seconds with their ratios to `base`, peak memory, loss."""
    done = [run for run in found[setting] if "wall_s" in run]
    if not done:
        return ["did not run", *["-"] * (5 if cpu else 4)]
    cells = []
    for key in ("wall_s", "cpu_s"):
        value = middle(found, setting, key)
        cells.append(f"{value:.2f}")
        if key == "wall_s" or cpu:
            cells.append(f"{value / middle(found, base, key):.2f}")
    return [*cells, f"{middle(found, setting, 'peak_bytes') / 1e9:.2f}", f"{done[0]['loss']:.6f}"]


def print_errors(found: Found, name: Callable[[str], str] = str) -> None:
    """What went wrong, below the table."""
    for setting, runs in found.items():
        for error in sorted({run["error"] for run in runs if "error" in run}):
            print(f"\n{name(setting)}: {error}")
