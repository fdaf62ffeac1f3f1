"""Caches of keys and values, which blocks of transformers fill: a call that is computed again must find them as they were.

Only containers are copied; the tensors in them are shared. A copy keeps what was in the cache before the call, so
`use_cache=False` saves memory in training.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def with_own_caches(inputs: Any) -> Any:
    """`inputs` with a copy of every cache among them; the same object if there is none."""
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        parts = tuple(with_own_caches(item) for item in inputs)
        return inputs if all(new is old for new, old in zip(parts, inputs, strict=True)) else parts
    if type(inputs) is dict:
        items = {key: with_own_caches(item) for key, item in inputs.items()}
        return inputs if all(items[key] is inputs[key] for key in items) else items
    return _copied(inputs) if _is_cache(inputs) else inputs


def _is_cache(value: Any) -> bool:
    kind = type(value)
    return callable(getattr(kind, "update", None)) and callable(getattr(kind, "get_seq_length", None))


def _copied(value: Any) -> Any:
    """The same containers and objects anew, over the same tensors."""
    if isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if not hasattr(value, "__dict__"):
        return value
    new = copy.copy(value)
    new.__dict__ = {key: _copied(item) for key, item in vars(value).items()}
    return new
