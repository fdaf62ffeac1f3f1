"""May this optimizer update flat pieces of parameters? Decided by trying it on small ones.

An element-wise optimizer gives every element the same value whether one optimizer updates all parameters or every rank's own
optimizer updates its pieces. The trial runs a few steps both ways, with all groups, and compares. The optimizer's name is used
only for a better error message.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from shardwise.errors import OptimizerError
from shardwise.partition import local_of

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
    # Some optimizers make their states when they are built. After a step these are no longer fresh and cannot be copied.
    # Of torch's optimizers only Adagrad does this, and its fresh states follow from its hyperparameters.
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        for param in params:
            if any(optimizer.state.values()) and not has_stepped(optimizer):
                clone.state[param] = fresh_state(*next((p, state) for p, state in optimizer.state.items() if state), param)
            elif isinstance(optimizer, torch.optim.Adagrad):
                sums = torch.full_like(param, group["initial_accumulator_value"])
                clone.state[param] = {"step": torch.zeros(()), "sum": sums}
    clone.param_groups = [
        {**{k: _copied(v) for k, v in group.items() if k != "params"}, "params": params}
        for group, params in zip(optimizer.param_groups, groups, strict=True)
    ]
    return clone


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has stepped. Some make states when they are built; those have a step count of zero.

    Reading the state of a parameter makes an empty one, which does not count.
    """
    return any("step" not in state or float(state["step"]) > 0 for state in optimizer.state.values() if state)


def fresh_state(param: torch.Tensor, state: dict[str, Any], new: torch.Tensor) -> dict[str, Any]:
    """The state that an optimizer which has not stepped would have for parameter `new`, from its `state` for `param`.

    States with the parameter's shape take the shape of `new`. A scalar's step count has that shape too, but is a count.
    """
    return {
        key: torch.full_like(new, float(local_of(value).flatten()[0]))
        if isinstance(value, torch.Tensor)
        and value.shape == param.shape
        and local_of(value).numel()
        and (param.dim() or key != "step")
        else _copied(value)
        for key, value in state.items()
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError with the reason unless updating pieces equals updating whole parameters."""
    name = type(optimizer).__name__
    known = next((reason for key, reason in _REASONS.items() if key.lower() in name.lower()), None)
    try:
        difference = _largest_difference(optimizer)
    except Exception as error:
        reason = known or f"a trial step on small parameters raised {type(error).__name__}: {error}"
        raise _refused(name, reason) from error
    if difference is not None:
        raise _refused(
            name,
            known or f"two ranks that update their own pieces differed from one that updates all by {difference:.3g} in a trial",
        )


def _refused(name: str, reason: str) -> OptimizerError:
    return OptimizerError(
        f"{name} cannot be sharded: {reason}. Every rank updates flat pieces of its own, so the update of an element may "
        "depend only on that element. Use an element-wise optimizer (Adam, AdamW, SGD, Adagrad, RMSprop, Lion, ...)."
    )


_SHAPES = ((6, 8), (5,), (4, 3))
"""Shapes of the trial's parameters, in every group."""


def _largest_difference(optimizer: torch.optim.Optimizer) -> float | None:
    """Train small parameters by one optimizer and, split over two ranks, by two; return the largest difference or None."""
    generator = torch.Generator().manual_seed(0)
    num_groups = len(optimizer.param_groups)
    starts = [[torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(num_groups)]
    whole = [[nn.Parameter(start.clone()) for start in group] for group in starts]
    # As in a Unit: the parameters end to end, the first half of the elements on rank 0, the rest on rank 1.
    halves = [[_cut(start, rank) for start in group] for rank in range(2) for group in starts]
    ranks = [halves[:num_groups], halves[num_groups:]]
    optimizers = [clone_optimizer(optimizer, whole)]
    optimizers += [clone_optimizer(optimizer, [[p for p in group if p.numel()] for group in groups]) for groups in ranks]
    for clone in optimizers:
        for group in clone.param_groups:
            if "lr" in group:
                group["lr"] = 0.1  # the user's may be too small to show a difference
    for exponent in (0, 4, -1)[:_STEPS]:  # large gradients show optimizers that clip above a limit
        for number, params in enumerate(whole):
            for position, param in enumerate(params):
                # Groups have gradients of different sizes, so that a norm over all groups differs from one over some.
                grad = torch.randn(param.shape, generator=generator) * 10.0 ** (exponent - number % 3)
                param.grad = grad
                for groups in ranks:
                    piece = groups[number][position]
                    start = 0 if groups is ranks[0] else grad.numel() - piece.numel()
                    piece.grad = grad.reshape(-1)[start : start + piece.numel()].clone()
        for clone in optimizers:
            clone.step()
    largest = 0.0
    for number, params in enumerate(whole):
        for position, param in enumerate(params):
            joined = torch.cat([groups[number][position].detach() for groups in ranks]).reshape(param.shape)
            # Vector and scalar code paths may round differently by a few units in the last place, never by more.
            if not torch.allclose(param.detach(), joined, rtol=1e-5, atol=1e-7, equal_nan=True):
                largest = max(largest, float((param.detach() - joined).abs().max()))
    return largest or None


def _cut(start: torch.Tensor, rank: int) -> nn.Parameter:
    """A rank's part of a parameter: the first shape is split, the second is all on rank 0, the third all on rank 1."""
    middle = {48: 21, 5: 5, 12: 0}[start.numel()]
    flat = start.reshape(-1)
    return nn.Parameter((flat[:middle] if rank == 0 else flat[middle:]).clone())
