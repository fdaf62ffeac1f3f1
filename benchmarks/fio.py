"""Runs fio, the reference for what a disk can do; installs it first where that is possible."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ENGINES = {
    "io_uring": ["--ioengine=io_uring", "--iodepth=16"],
    "libaio": ["--ioengine=libaio", "--iodepth=16"],
    "psync": ["--ioengine=psync", "--numjobs=8", "--group_reporting", "--thread"],
}
MODES = {"read": "read", "write": "write", "both": "readwrite"}


def set_up() -> None:
    """Make sure that there is a fio."""
    if shutil.which("fio"):
        return
    if shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "fio"], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    if not shutil.which("fio"):
        sys.exit("fio is not installed and could not be: install it with the system's package manager.")


def bandwidth(directory: Path, mode: str, engine: str, size: int, block: int = 1 << 20) -> float:
    """Bytes per second, both directions together, on a file that is written beforehand."""
    jobs = 8 if engine == "psync" else 1
    command = ["fio", "--name=x", f"--filename={directory / 'fio.dat'}", f"--rw={MODES[mode]}", f"--bs={block}", "--direct=1"]
    command += [*ENGINES[engine], "--overwrite=1", "--fallocate=none", "--output-format=json", "--invalidate=0"]
    command += [f"--size={size // jobs}", *([f"--offset_increment={size // jobs}"] if jobs > 1 else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise subprocess.SubprocessError(f"fio with {engine} failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def best_engines(directory: Path, size: int) -> dict[str, str]:
    """The fastest engine for each mode; the first run of all lays the file out."""
    bandwidth(directory, "write", "psync", size)
    found: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
    for mode in MODES:
        for engine in ENGINES:
            with contextlib.suppress(subprocess.SubprocessError):  # not every engine works everywhere
                found[mode][engine] = bandwidth(directory, mode, engine, size)
    return {mode: max(rates, key=lambda engine: rates[engine]) for mode, rates in found.items()}


def clean_up(directory: Path) -> None:
    """Remove fio's file."""
    (directory / "fio.dat").unlink(missing_ok=True)
