"""Resolves the precision asked for into dtypes per Unit, and knows whether this CPU only emulates 16-bit products."""

from __future__ import annotations

import contextlib
import functools
import time

import torch

from shardwise.config import Precision
from shardwise.partition import UnitDtypes

EMULATED_RATIO = 1.5
"""Where a CPU does not say: a product this many times slower than in fp32 is emulated. Seen: 5 (AVX-512), 100 (AVX2)."""
_PRODUCT_FLAGS = {torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"}, torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""What the kernel calls instructions for products in a dtype, on x86-64 and on Arm."""
_PROBE_SIZE = 128
_PROBE_REPEATS = 8  # the fastest counts


def resolve_dtypes(own: torch.dtype, precision: Precision, emulates: bool) -> UnitDtypes:
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
    """Whether matrix products in `dtype` are emulated here, on CPU only: read off the CPU, or measured where it does not say.

    Which dtype a run computes in must not depend on how busy the machine is.
    """
    if device_type != "cpu" or dtype.itemsize != 2:
        return False
    flags = _cpu_flags()
    if flags:
        return not flags & _PRODUCT_FLAGS[dtype]
    return _product_s(dtype) > EMULATED_RATIO * _product_s(torch.float32)


def _cpu_flags() -> frozenset[str]:
    """What Linux says this CPU can do; empty elsewhere."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, words = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(words.split())
    return frozenset()


def _product_s(dtype: torch.dtype) -> float:
    a = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)
    best = float("inf")
    for _ in range(_PROBE_REPEATS):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return best
