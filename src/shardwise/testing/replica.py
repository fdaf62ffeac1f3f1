"""Makes an ordinary copy of a sharded model and its optimizer, to compare their training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm import World
from shardwise.optim import clone_optimizer
from shardwise.partition import Unit, is_dtensor, retype, set_values


def group_names(optimizer: torch.optim.Optimizer, units: Sequence[Unit], world: World) -> list[list[str]]:
    """Names of the parameters in every group of an optimizer whose pieces are spread over ranks, in the model's order."""
    order = list(dict.fromkeys(slot.name for unit in units for slot in unit.layout.slots))
    names = {id(update.master): unit.layout.slots[update.slot].name for unit in units for update in unit.pieces}
    mine = [{names[id(piece)] for piece in group["params"]} for group in optimizer.param_groups]
    found = [set().union(*theirs) for theirs in zip(*world.gather_objects(mine), strict=True)]
    return [[name for name in order if name in group] for group in found]


def fill_replica(
    replica: nn.Module, values: Iterable[tuple[str, Any]], optimizer: torch.optim.Optimizer, groups: list[list[str]]
) -> torch.optim.Optimizer:
    """Give a copy of the model its full values and a fresh optimizer of the same class, settings and groups."""
    params = dict(replica.named_parameters())
    with torch.no_grad():
        for name, value in values:
            if name in params:
                param = params[name]
                if is_dtensor(param):
                    retype(param, value.dtype)
                    set_values(param, value)
                else:
                    param.data = param.data.to(value.dtype)
                    param.copy_(value)
    return clone_optimizer(optimizer, [[params[name] for name in names] for names in groups])
