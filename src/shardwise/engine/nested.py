"""Tensors inside whatever a forward pass takes and returns: containers, mappings, dataclasses."""

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
    """A copy of `value` with every tensor replaced by `function(tensor)`; types are kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):  # also mappings that mirror their items in attributes, as transformers' outputs do
        mapped = copy.copy(value)
        for key in list(value):
            mapped[key] = map_tensors(function, value[key])
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, map_tensors(function, getattr(value, field.name)))
        return changed
    return value
