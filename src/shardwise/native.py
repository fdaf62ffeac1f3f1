"""Which kernels were built? Loads the compiled library of `native/`, if there is one, with ctypes.

Every caller must also work without it, through torch or Python, with the same results. Calls release the GIL, except brief ones.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from pathlib import Path


class AdamArrays(ctypes.Structure):
    """Addresses and dtypes of the vectors that one Adam update reads and writes."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("square", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("grad_dtype", ctypes.c_int),
        ("out_dtype", ctypes.c_int),
    )


class AdamSettings(ctypes.Structure):
    """Numbers that one Adam update uses, made from its hyperparameters, in the order of the struct in `native/adam.cpp`."""

    _fields_ = (
        ("grad_scale", ctypes.c_float),
        ("shrink", ctypes.c_float),
        ("l2", ctypes.c_float),
        ("mean_weight", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("square_weight", ctypes.c_float),
        ("root_correction", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("minus_step", ctypes.c_float),
        ("decays", ctypes.c_int),
        ("maximizes", ctypes.c_int),
    )


_SIGNATURES = {
    "sw_io_open": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
    "sw_io_close": (None, [ctypes.c_void_p]),
    "sw_io_submit": (
        ctypes.c_int64,
        [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64],
    ),
    "sw_io_wait": (
        ctypes.c_int,
        [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_double,
            ctypes.POINTER(ctypes.c_int),
            ctypes.POINTER(ctypes.c_int64),
            ctypes.POINTER(ctypes.c_int64),
        ],
    ),
    "sw_io_forget": (None, [ctypes.c_void_p, ctypes.c_int64]),
    "sw_io_drain": (None, [ctypes.c_void_p]),
    "sw_read_flat": (None, [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4, ctypes.c_void_p]),
    "sw_wait": (ctypes.c_int, [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3]),
    "sw_wake": (None, [ctypes.c_void_p]),
    "sw_block_checksum": (ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]),
    "sw_adam": (
        None,
        [ctypes.POINTER(AdamArrays), ctypes.POINTER(AdamSettings), ctypes.c_int64, ctypes.c_int, ctypes.c_int],
    ),
    "sw_adam_width": (ctypes.c_int, [ctypes.c_int]),
}
_BRIEF = ("sw_wake",)  # calls that keep the GIL: requesting it again would take longer than the call
_WIDTHS = ("scalar", "AVX2", "AVX-512")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library; None if it was not built, or if SHARDWISE_NATIVE=0 disables it."""
    path = Path(__file__).parent / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if os.environ.get("SHARDWISE_NATIVE") == "0" or not path.exists():
        return None
    try:
        found, brief = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for name in _BRIEF:
            setattr(found, name, getattr(brief, name))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):  # built for another machine, or by an older version
        return None
    return found


def description() -> str:
    """For the report: which kernels are used, and why if they are not the native ones."""
    found = library()
    if found is not None:
        return f"native ({_WIDTHS[found.sw_adam_width(len(_WIDTHS))]})"
    why = "SHARDWISE_NATIVE=0" if os.environ.get("SHARDWISE_NATIVE") == "0" else "not built: no C++ compiler at install time"
    return f"torch and Python ({why})"
