"""Lets failing ranks on different hosts exchange error messages, through the key-value store of torch.distributed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import torch.distributed.distributed_c10d as c10d

_LIMIT_S = 3.0


def exchange_notices(run: object, rank: int, ranks: Sequence[int], text: str) -> list[str]:
    """Publish `text`; return what the other `ranks` say, and which say nothing: these have ended or cannot be reached.

    Never raises, and returns within 3 s, also without a store. Ranks fail at nearly the same time: their limits are equal.
    """
    heard: dict[int, str] = {}
    is_there = False

    def ask() -> None:
        nonlocal is_there
        with contextlib.suppress(Exception):
            store = c10d.PrefixStore(f"shardwise-notices-{run}", c10d._get_default_store())
            store.set(str(rank), text)
            is_there = True
            deadline = time.monotonic() + 0.67 * _LIMIT_S
            missing = [other for other in ranks if other != rank]
            while missing and time.monotonic() < deadline:
                for other in [other for other in missing if store.check([str(other)])]:
                    missing.remove(other)
                    heard[other] = store.get(str(other)).decode()
                time.sleep(0.05)

    thread = threading.Thread(target=ask, name="shardwise-notices", daemon=True)
    thread.start()
    thread.join(timeout=_LIMIT_S)
    said = [f"Rank {other} says: {what}" for other, what in sorted(heard.copy().items())]
    silent = [str(other) for other in ranks if other != rank and other not in heard]
    if is_there and silent and heard:
        said.append(f"Nothing was heard of rank{'s' if len(silent) > 1 else ''} {', '.join(silent)}.")
    return said
