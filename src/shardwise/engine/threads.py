"""Sets how many threads a rank computes with: the cores of its host divided by the ranks there, unless the user chose.

By default `torchrun` gives every rank one thread, and torch without it gives every rank all cores. Both are wrong for several
ranks on a host with more cores than ranks. Called by assembly.
"""

from __future__ import annotations

import os

import torch

from shardwise.comm import World, host_identity

_expected = torch.get_num_threads()  # what torch, torchrun or this module set: anything else was set by the user


def share_cores(world: World) -> str:
    """Set this process's thread count; returns what was done, for the report. All ranks must call."""
    global _expected
    if world.device.type != "cpu":
        return ""
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))
    mine = (host_identity(), cores)
    num_ranks = world.whole.gather_objects(mine).count(mine)
    share = max(len(cores) // num_ranks, 1)
    found = f"{len(cores)} cores for {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    if user_chose():
        return f"{torch.get_num_threads()}, as chosen ({found})"
    if torch.get_num_threads() != share:
        torch.set_num_threads(share)
        _expected = share
    return f"{share} ({found})"


def user_chose() -> bool:
    """Whether the user chose the thread count, by an environment variable or by torch.set_num_threads."""
    if "MKL_NUM_THREADS" in os.environ:
        return True
    if "OMP_NUM_THREADS" in os.environ:
        return not _is_torchruns_default() or torch.get_num_threads() != _expected
    return torch.get_num_threads() != _expected


def _is_torchruns_default() -> bool:
    """Whether torchrun set OMP_NUM_THREADS=1, which it does for its workers if the variable was not set when it started."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["OMP_NUM_THREADS"] != "1":
        return False
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as environ:
            return not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in environ.read().split(b"\0"))
    except OSError:
        return False
