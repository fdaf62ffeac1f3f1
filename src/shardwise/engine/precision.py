"""Resolves the precision asked for into dtypes per Unit, and knows whether this CPU only emulates 16-bit products."""

from __future__ import annotations

import functools
import time

import torch

from shardwise.config import Precision
from shardwise.partition import UnitDtypes

EMULATED_RATIO = 1.5
"""A 16-bit product this many times slower than fp32 is emulated: nothing is gained by it. Seen: 5 (AVX-512), 100 (AVX2)."""
_PROBE_SIZE = 128
_PROBE_REPEATS = 8  # the fastest counts: a busy moment must not decide which dtype a run computes in


def resolve_dtypes(own: torch.dtype, precision: Precision, device: torch.device, emulates: bool) -> UnitDtypes:
    """The dtypes of a Unit whose parameters were made in `own`."""
    stored = precision.param or own
    compute = precision.compute
    if compute is None:
        # Only a model written in fp32 can be computed in fp32 unasked; a 16-bit model would meet 16-bit inputs.
        compute = own if own == torch.float32 and stored.itemsize == 2 and emulates else stored
    wide = torch.promote_types(torch.float32, own)
    return UnitDtypes(
        original=own,
        stored=stored,
        compute=compute,
        reduce=precision.reduce or wide,
        master=torch.promote_types(precision.master or wide, wide),
    )


@functools.cache
def emulates_16_bit(device_type: str, dtype: torch.dtype) -> bool:
    """Whether matrix products in `dtype` are emulated here: measured once, on CPU only."""
    if device_type != "cpu" or dtype.itemsize != 2:
        return False
    return _product_s(dtype) > EMULATED_RATIO * _product_s(torch.float32)


def _product_s(dtype: torch.dtype) -> float:
    a = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)
    best = float("inf")
    for _ in range(_PROBE_REPEATS):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return best
