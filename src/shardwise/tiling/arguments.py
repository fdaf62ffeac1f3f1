"""What `linear_cross_entropy` accepts: every mistake is named before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from shardwise.errors import ConfigError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = (*_FLOATS, torch.float64)
REDUCTIONS = ("mean", "sum", "none")
_WHO = "linear_cross_entropy"


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    *,
    label_smoothing: float,
    reduction: str,
    logit_scale: float,
    soft_cap: float | None,
    chunk_bytes: int,
) -> None:
    """Raise ConfigError unless shapes, dtypes, devices and options fit together."""
    needed = {"hidden": hidden, "weight": weight, "labels": labels}
    tensors = needed | {name: value for name, value in (("bias", bias), ("class_weight", class_weight)) if value is not None}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{_WHO}: {name} is a {type(value).__name__}; a tensor was expected.")
    _check_shapes(tensors)
    _check_dtypes(tensors)
    devices = {name: str(value.device) for name, value in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ConfigError(f"{_WHO}: tensors are on different devices ({_listed(devices)}). Move them to one.")
    if class_weight is not None and class_weight.requires_grad:
        raise ConfigError(f"{_WHO}: class_weight requires grad, but its gradient is not computed. Pass class_weight.detach().")
    if reduction not in REDUCTIONS:
        raise ConfigError(f"{_WHO}: reduction={reduction!r} is not known; use 'mean', 'sum' or 'none'.")
    if not _is_number(label_smoothing) or not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"{_WHO}: label_smoothing={label_smoothing!r} must be a number from 0 to 1.")
    if not _is_number(logit_scale):
        raise ConfigError(f"{_WHO}: logit_scale={logit_scale!r} must be a finite number. Scale hidden by one that is trained.")
    if soft_cap is not None and (not _is_number(soft_cap) or soft_cap <= 0.0):
        raise ConfigError(f"{_WHO}: soft_cap={soft_cap!r} must be a positive number, or None for no cap.")
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ConfigError(f"{_WHO}: chunk_bytes={chunk_bytes!r} must be a whole number of at least 1 byte.")


def _check_shapes(tensors: Mapping[str, torch.Tensor]) -> None:
    hidden, weight, labels = tensors["hidden"], tensors["weight"], tensors["labels"]
    shapes = _listed({name: str(list(value.shape)) for name, value in tensors.items()})
    if weight.dim() != 2 or weight.shape[0] < 1:
        raise ConfigError(f"{_WHO}: weight must be [classes, features] with at least one class; found {shapes}.")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(f"{_WHO}: the last dimension of hidden must be the weight's number of features; found {shapes}.")
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(f"{_WHO}: labels must have the shape of hidden without its last dimension; found {shapes}.")
    for name in ("bias", "class_weight"):
        if name in tensors and tensors[name].shape != weight.shape[:1]:
            raise ConfigError(f"{_WHO}: {name} must have one element per class; found {shapes}.")


def _check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    dtypes = {name: value.dtype for name, value in tensors.items()}
    shown = _listed({name: str(dtype) for name, dtype in dtypes.items()})
    if dtypes["labels"] != torch.int64:
        raise ConfigError(f"{_WHO}: labels must be classes in int64 (probabilities are not supported); found {shown}.")
    products = [dtypes[name] for name in ("hidden", "weight", "bias") if name in dtypes]
    floats = [dtype for name, dtype in dtypes.items() if name != "labels"]
    if not all(dtype in _DTYPES for dtype in floats):
        raise ConfigError(f"{_WHO}: fp32, bf16, fp16 or fp64 was expected; found {shown}.")
    device = tensors["hidden"].device.type
    is_casting = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if len(set(products)) > 1 and not (is_casting and all(dtype in _FLOATS for dtype in products)):
        raise ConfigError(f"{_WHO}: hidden, weight and bias must have one dtype, unless autocast is on; found {shown}.")


def check_labels(targets: torch.Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise ConfigError if a label that is not ignored is not a class."""
    if targets.numel():
        least, most = (int(value) for value in torch.aminmax(targets))
        if least < 0 or most >= num_classes:
            wrong = least if least < 0 else most
            raise ConfigError(
                f"{_WHO}: label {wrong} is out of range: there are {num_classes} classes, and ignore_index is {ignore_index}."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
