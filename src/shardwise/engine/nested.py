"""Finds and replaces tensors in the inputs and outputs of a forward: nested containers, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor inside nested containers, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, (list, tuple, set)):
        return [t for item in value for t in tensors_in(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for field in dataclasses.fields(value) for t in tensors_in(getattr(value, field.name, None))]
    return []


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor replaced by `function(tensor)`; a container in which nothing changes is returned as it is.

    A tensor that occurs twice is replaced by one and the same tensor.
    """
    return _map(function, value, {})


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any, done: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in done:
            done[id(value)] = function(value)
        return done[id(value)]
    if isinstance(value, dict):
        items = {key: _map(function, item, done) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        mapped = copy.copy(value)  # copied, because some mappings (transformers' outputs) mirror items in attributes
        for key, item in items.items():
            mapped[key] = item
        return mapped
    if isinstance(value, tuple) or type(value) is list:
        parts = [_map(function, item, done) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _map(function, getattr(value, field.name), done) for field in dataclasses.fields(value)}
        if all(item is getattr(value, name) for name, item in fields.items()):
            return value
        changed = copy.copy(value)
        for name, item in fields.items():
            object.__setattr__(changed, name, item)
        return changed
    return value
