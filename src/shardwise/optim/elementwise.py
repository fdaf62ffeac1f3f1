"""May this optimizer update flat pieces of parameters? Decided by trying it on small ones.

An element-wise optimizer gives every element the same value whether its parameter is updated whole or in pieces. The
trial runs a few steps both ways and compares; names are consulted only to give a better reason.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from shardwise.errors import OptimizerError

_REASONS = {
    "LBFGS": "it keeps a history of whole-model directions and re-evaluates the loss",
    "Adafactor": "it keeps row and column statistics of each matrix",
    "SparseAdam": "it needs sparse gradients",
    "Muon": "it orthogonalises whole matrices",
    "LAMB": "it scales by the norm of each whole parameter",
    "LARS": "it scales by the norm of each whole parameter",
}
_STEPS = 3


def clone_optimizer(optimizer: torch.optim.Optimizer, groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """The same optimizer class and hyperparameters over other parameters, with empty state and no hooks."""
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key.startswith("_optimizer_") or key in ("step", "zero_grad", "state", "param_groups"):
            continue  # hooks and instance-level wrappers belong to the original
        setattr(clone, key, copy.copy(value))
    for name in vars(optimizer):
        if name.startswith("_optimizer_"):
            setattr(clone, name, type(vars(optimizer)[name])())
    clone.state = defaultdict(dict)
    # Some optimizers make their states when they are built; those of a stepped one are not fresh any more, but
    # Adagrad's, the only one of torch's that does this, are known from its hyperparameters.
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        for param in params:
            if optimizer.state and not has_stepped(optimizer):
                clone.state[param] = fresh_state(*next(iter(optimizer.state.items())), param)
            elif isinstance(optimizer, torch.optim.Adagrad):
                sums = torch.full_like(param, group["initial_accumulator_value"])
                clone.state[param] = {"step": torch.zeros(()), "sum": sums}
    clone.param_groups = [
        {**{k: _copied(v) for k, v in group.items() if k != "params"}, "params": params}
        for group, params in zip(optimizer.param_groups, groups, strict=True)
    ]
    return clone


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any state is more than what some optimizers make when they are built (a step count of zero beside it)."""
    return any("step" not in state or float(state["step"]) > 0 for state in optimizer.state.values())


def fresh_state(param: torch.Tensor, state: dict[str, Any], new: torch.Tensor) -> dict[str, Any]:
    """The state an optimizer that has not stepped would have for another parameter."""
    return {
        key: torch.full_like(new, float(value.flatten()[0]))
        if isinstance(value, torch.Tensor) and value.shape == param.shape and value.numel()
        else _copied(value)
        for key, value in state.items()
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError with the reason unless updating pieces equals updating whole parameters."""
    name = type(optimizer).__name__
    known = next((reason for key, reason in _REASONS.items() if key.lower() in name.lower()), None)
    if known is not None:
        raise _refused(name, known)
    try:
        difference = _largest_difference(optimizer)
    except Exception as error:
        raise _refused(name, f"a trial step on a small parameter raised {type(error).__name__}: {error}") from error
    if difference is not None:
        raise _refused(name, f"updating a parameter in pieces differed from updating it whole by {difference:.3g} in a trial")


def _refused(name: str, reason: str) -> OptimizerError:
    return OptimizerError(
        f"{name} cannot be sharded: {reason}. Shards are flat pieces, so the update of an element may depend only on that "
        "element. Use an element-wise optimizer (Adam, AdamW, SGD, Adagrad, RMSprop, Lion, ...)."
    )


def _largest_difference(optimizer: torch.optim.Optimizer) -> float | None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 8, generator=generator)
    grads = [torch.randn(6, 8, generator=generator) * 10.0**exponent for exponent in (0, 1, -1)[:_STEPS]]
    cuts = (0, 5, 16, 48)
    whole = nn.Parameter(start.clone())
    parts = [nn.Parameter(start.reshape(-1)[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    num_groups = len(optimizer.param_groups)
    on_whole = clone_optimizer(optimizer, [[whole]] + [[] for _ in range(num_groups - 1)])
    on_parts = clone_optimizer(optimizer, [list(parts)] + [[] for _ in range(num_groups - 1)])
    for group in (*on_whole.param_groups, *on_parts.param_groups):
        if "lr" in group:
            group["lr"] = 0.1  # the user's may be too small for a difference to show
    for grad in grads:
        whole.grad = grad.clone()
        for part, (a, b) in zip(parts, itertools.pairwise(cuts), strict=True):
            part.grad = grad.reshape(-1)[a:b].clone()
        on_whole.step()
        on_parts.step()
    joined = torch.cat([part.detach() for part in parts]).reshape(6, 8)
    # Vector and scalar code paths may round differently by a few units in the last place, never by more.
    if torch.allclose(whole.detach(), joined, rtol=1e-5, atol=1e-7):
        return None
    return float((whole.detach() - joined).abs().max())
