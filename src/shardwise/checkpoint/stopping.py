"""Notes SIGTERM, the signal by which a cluster takes a machine back, so that a training loop can save first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from shardwise.errors import ConfigError


@contextlib.contextmanager
def noting_sigterm() -> Iterator[Callable[[], bool]]:
    """Inside the context SIGTERM does not end this process; the function that it yields says whether it has come to this rank."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("SIGTERM can be caught in a process's main thread only: enter the context there.")
    came: list[int] = []  # appending is all that a handler may do: it can interrupt itself
    before: Any = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
