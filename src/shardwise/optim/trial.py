"""What states does an optimizer make, and may its step be called for some parameters at a time? Found out on small ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.errors import OptimizerError
from shardwise.optim.elementwise import clone_optimizer


def long_states(optimizer: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    """Names and dtypes of the states that are as long as their parameter, found by a trial.

    Raises OptimizerError if updating two parameters in two calls of the step's body, as portions are, gives other values than
    updating them in one call. That happens if the optimizer counts its calls.
    """
    found: dict[str, torch.dtype] = {}
    for group in range(len(optimizer.param_groups)):
        together, apart = _trial(optimizer, group, [(0, 1)]), _trial(optimizer, group, [(0,), (1,)])
        found |= together[0]
        if not all(torch.equal(one, other) for one, other in zip(together[1], apart[1], strict=True)):
            raise OptimizerError(
                f"{type(optimizer).__name__} cannot stream: updating parameters in two calls of step() gave other values than in "
                "one. It may count its own calls; a count per parameter (optimizer.state) would do. Leave optimizer='device'."
            )
    return found


def long_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of the states that are as long as their parameter, found by a trial; also of an optimizer that cannot stream."""
    return {name for group in range(len(optimizer.param_groups)) for name in _trial(optimizer, group, [(0, 1)])[0]}


def _trial(
    optimizer: torch.optim.Optimizer, group: int, calls: Sequence[tuple[int, ...]]
) -> tuple[dict[str, torch.dtype], list[nn.Parameter]]:
    """Run three steps on two small parameters of a group; each step calls the optimizer once per entry of `calls`.

    Returns the dtypes of the first parameter's long states, and both parameters.
    """
    params = [nn.Parameter(torch.linspace(-1.0, 1.0, 7) + number) for number in range(2)]
    trial = clone_optimizer(optimizer, [list(params) if n == group else [] for n in range(len(optimizer.param_groups))])
    mine = trial.param_groups[group]
    if "lr" in mine:
        mine["lr"] = 0.1  # the user's may be zero now, during warm-up
    for step in range(3):
        for chosen in calls:
            mine["params"] = [params[number] for number in chosen]
            for number in chosen:
                params[number].grad = torch.linspace(0.5, 2.0, 7) * (step + 1)
            trial.step()
    state = trial.state.get(params[0], {})
    is_long = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == (7,)}
    return {name: value.dtype for name, value in is_long.items()}, params
