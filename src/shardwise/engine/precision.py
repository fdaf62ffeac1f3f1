"""Resolves the requested precision into dtypes per Unit, and finds out whether this CPU emulates 16-bit matrix products."""

from __future__ import annotations

import contextlib
import functools
import time

import torch

from shardwise.config import Precision
from shardwise.partition import UnitDtypes

EMULATED_RATIO = 1.5
"""If the CPU's flags are unknown: a product slower than in fp32 by this is emulated. Measured: 5 (AVX-512), 100 (AVX2)."""
_PRODUCT_FLAGS = {torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"}, torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Flags in /proc/cpuinfo for products in a dtype, on x86-64 and on Arm."""
_PROBE_SIZE = 128
_PROBE_REPEATS = 8  # the fastest one counts


def resolve_dtypes(own: torch.dtype, precision: Precision, emulates: bool) -> UnitDtypes:
    """The dtypes of a Unit whose parameters were created in `own`."""
    stored = precision.param or own
    compute = precision.compute
    if compute is None:
        # By default only an fp32 model is computed in fp32: the inputs of a 16-bit model would be 16-bit.
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
    """Whether this CPU emulates matrix products in `dtype`; False on other devices.

    Measured only if the CPU's flags are unknown, because the compute dtype must not depend on how busy the machine is.
    """
    if device_type != "cpu" or dtype.itemsize != 2:
        return False
    flags = _cpu_flags()
    if flags:
        return not flags & _PRODUCT_FLAGS[dtype]
    return _product_s(dtype) > EMULATED_RATIO * _product_s(torch.float32)


def _cpu_flags() -> frozenset[str]:
    """The flags of this CPU in /proc/cpuinfo; empty if there is no such file."""
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
