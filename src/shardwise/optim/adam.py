"""The native Adam: one pass over masters, moments and gradients.

It does the operations of torch's default Adam in the same order and with the same rounding, except for the square root: torch
uses a library that does not always round correctly (`docs/numerics.md`). It is used only with `fused=True`; without it torch's
own step runs, so results are bitwise torch's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from shardwise import native

_DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_WIDEST = 2


def can_update(optimizer: torch.optim.Optimizer, dtypes: set[torch.dtype]) -> bool:
    """Whether the native kernel can be used: for Adam and AdamW (not subclasses), fused, on fp32 masters."""
    if native.library() is None or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or dtypes - {torch.float32}:
        return False
    asks_for_more = any(group.get(key) for group in optimizer.param_groups for key in ("amsgrad", "capturable", "differentiable"))
    return not asks_for_more and all(group.get("fused") for group in optimizer.param_groups)


def update(
    group: dict[str, Any],
    step: int,
    master: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    grad: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    grad_scale: float = 1.0,
    most_width: int = _WIDEST,
    num_threads: int | None = None,
) -> None:
    """Update flat vectors in memory, in place. `step` counts from one; `out` receives the rounded masters.

    Hyperparameters are read from `group`, as torch's own step does.
    """
    library = native.library()
    assert library is not None
    arrays = native.AdamArrays(
        master.data_ptr(),
        mean.data_ptr(),
        square.data_ptr(),
        grad.data_ptr(),
        None if out is None else out.data_ptr(),
        _DTYPES[grad.dtype],
        _DTYPES[None if out is None else out.dtype],
    )
    settings = _settings(group, step, grad_scale)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    library.sw_adam(ctypes.byref(arrays), ctypes.byref(settings), master.numel(), threads, most_width)


def _settings(group: dict[str, Any], step: int, grad_scale: float) -> native.AdamSettings:
    rate, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    is_decoupled = bool(group.get("decoupled_weight_decay"))
    return native.AdamSettings(
        grad_scale,
        1 - rate * decay,
        decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        eps,
        -(rate / (1 - beta1**step)),
        0 if decay == 0 else 1 if is_decoupled else 2,
        int(bool(group.get("maximize"))),
    )
