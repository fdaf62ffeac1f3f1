"""Which tensor of a file belongs to which parameter or buffer of a model? Pure: it compares names, shapes and dtypes only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.partition import list_params

_SHOWN = 12  # differences that an error lists


@dataclasses.dataclass(frozen=True)
class Matching:
    """Where a model's values are in a file."""

    names: Mapping[str, str]
    """For each parameter, by its first name, and each buffer: the tensor's name in the file."""
    left_out: tuple[str, ...]
    """Names that are only in the model or only in the file."""


def match(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], what: str, *, strict: bool, elsewhere: Collection[str] = ()
) -> Matching:
    """Find every parameter and buffer of `model` among tensors with these names and shapes; `what` names them in errors.

    `elsewhere`: names that other parts of the model have, which `model` is one part of.

    Raises CheckpointError with a list of what does not fit. With `strict=False` what only one side has is left out; a different
    shape is an error always.
    """
    found: dict[str, str] = {}
    known: set[str] = set()
    missing: list[str] = []
    problems: list[str] = []
    for key, names, value in _wanted(model):
        candidates = [name for own in names for name in _spellings(model, own) if name in shapes]
        known.update(candidates)
        if not candidates:
            missing.append(key)
        elif shapes[candidates[0]] != tuple(value.shape):
            problems.append(f"{key!r} has shape {list(shapes[candidates[0]])} in the file, {list(value.shape)} in the model")
        else:
            found[key] = candidates[0]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    known.update(spelled for name in elsewhere for spelled in _spellings(model, name))
    unknown = [name for name in sorted(shapes.keys() - known) if not _matches(ignored, name)]
    if strict:
        problems += [f"{name!r} is not in the file" for name in missing]
        problems += [f"{name!r} is only in the file" for name in unknown]
    if problems:
        remedy = (
            " sw.load_pretrained(model, path, strict=False), into a model that is built, leaves out what only one of them has."
            if strict and (missing or unknown)
            else ""
        )
        raise CheckpointError(f"{what} does not fit {type(model).__name__}; nothing was changed. {listed(problems)}.{remedy}")
    return Matching(found, tuple([*missing, *unknown]))


def kept_name(model: nn.Module, names: Sequence[str]) -> str:
    """Under which of its names a tied tensor is written: the first that is not in the model's `_tied_weights_keys`."""
    tied = getattr(model, "_tied_weights_keys", None) or ()
    return next((name for name in names if not _matches(tied, name)), names[0])


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict contains, under all their names."""
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield name, buffer


def listed(problems: Sequence[str]) -> str:
    """The number of differences, and the first of them, for an error."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"{len(problems)} differences: {'; '.join(problems[:_SHOWN])}{more}"


def _wanted(model: nn.Module) -> Iterator[tuple[str, Sequence[str], torch.Tensor]]:
    """(first name, all names with the preferred one in front, value) of every parameter and buffer."""
    for info in list_params(model):
        kept = kept_name(model, info.names)
        yield info.name, [kept, *(name for name in info.names if name != kept)], info.param
    for name, buffer in persistent_buffers(model):
        yield name, [name], buffer


def _spellings(model: nn.Module, name: str) -> Iterator[str]:
    """How a file may spell a name: a model with a head and its base model differ by a prefix."""
    yield name
    prefix = getattr(model, "base_model_prefix", "")
    if isinstance(prefix, str) and prefix:
        if name.startswith(f"{prefix}."):
            yield name[len(prefix) + 1 :]
        elif not hasattr(model, prefix):
            yield f"{prefix}.{name}"


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
