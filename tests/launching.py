"""Programs that tests start: bounded in time, and ended with everything that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

TIMEOUT_S = 240.0
"""Generous: several processes import torch at once, and other tests run beside them."""
_PATIENCE_S = 20.0


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Wait for a program of its own session; when time is up, end it and what it has started."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_program(
    command: Sequence[str], *, env: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    return finish(process, timeout_s)
