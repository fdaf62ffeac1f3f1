"""Gradients that cannot be used: what is wrong with them, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.errors import ModelError
from shardwise.partition import Unit


def check_expected(unit: Unit, slots: Sequence[int]) -> None:
    """Raise if the gradients of these parameters, which have arrived, cannot be used."""
    with torch._C.DisableTorchFunctionSubclass():
        hooked = [slot for slot in slots if unit.params[slot]._post_accumulate_grad_hooks]
    for slot in hooked:
        raise ModelError(
            f"parameter {unit.layout.slots[slot].name!r} has a hook from register_post_accumulate_grad_hook(), which runs "
            "before gradients are averaged over ranks and finds none in .grad. Use register_hook() to change a gradient "
            "on its way, or run.grad(name) after backward()."
        )
    if slots and not unit.is_trainable:
        raise ModelError(
            f"parameter {unit.layout.slots[slots[0]].name!r} was frozen when the model was sharded and was unfrozen after "
            "this backward's forward pass had begun. Unfreeze it before the forward pass."
        )


def check_unchanged(name: str, grad: torch.Tensor, version: int) -> None:
    """Raise if a parameter's gradient was changed in place since it had this version."""
    if grad._version != version:
        raise ModelError(
            f"the gradient of parameter {name!r} was changed in place after autograd had handed it over: a custom Function's "
            "backward, or a hook, changes a gradient that it shares with this parameter. Return a new tensor there instead "
            "(`grad * 2`, not `grad.mul_(2)`)."
        )
