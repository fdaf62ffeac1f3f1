"""Outside a step the optimizer's groups hold this rank's pieces, and user code must not treat these as whole parameters.

A norm, a clipped gradient or a written value would concern this rank only, and ranks would diverge. During a step the pieces are
ordinary parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.errors import OptimizerError
from shardwise.partition import METADATA, name_of, own_grad, set_own_grad


class GuardedPiece(nn.Parameter):
    """A piece of a parameter between two steps: shape, dtype and flags can be read, anything else raises."""

    @property
    def grad(self) -> torch.Tensor | None:
        """None if there is no gradient; else raises, because it is only a piece of the reduced gradient."""
        if own_grad(self) is not None:
            raise _refusal(".grad")
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise _refusal("setting .grad")
        set_own_grad(self, None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Allow reading metadata; raise for anything else."""
        name = name_of(func)
        if name not in METADATA:
            raise _refusal(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _refusal(what: str) -> OptimizerError:
    return OptimizerError(
        f"{what} on parameters of optimizer.param_groups: they are this rank's pieces, so the result would be this rank's alone. "
        "Use run.clip_grad_norm_() to clip, run.grad(name) and run.master(name) to read, model.parameters() to change values, "
        "and run.scaler instead of torch.amp.GradScaler."
    )
