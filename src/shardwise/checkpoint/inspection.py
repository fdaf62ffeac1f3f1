"""Looks into checkpoints without a model: what is inside, whether it is intact, and in what two of them differ."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.header import CHUNK_BYTES
from shardwise.checkpoint.manifest import FILE_NAME
from shardwise.checkpoint.plain import decode
from shardwise.checkpoint.saved_files import SavedFiles
from shardwise.checkpoint.subject import Subject
from shardwise.checkpoint.weights import Weights, open_weights
from shardwise.engine import LONG, MASTER, VALUE
from shardwise.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Contents:
    """What is inside a checkpoint."""

    num_steps: int
    world_size: int
    num_params: int
    """Elements of all parameters."""
    num_trainable: int
    num_tensors: int
    dtypes: tuple[str, ...]
    bytes_by_kind: dict[str, int]
    """Bytes of values, masters, each optimizer state, random generators and others, padding of vectors included."""
    file_bytes: dict[str, int]
    optimizer: str | None
    groups: tuple[dict[str, Any], ...]
    buffers: dict[str, torch.Tensor]
    extra: dict[str, Any]
    """What was given to `run.save(extra=...)`."""
    has_scheduler: bool


def inspect(path: str | os.PathLike[str]) -> Contents:
    """What is inside the checkpoint at `path`. Reads the manifest, the files' headers, and what is not a parameter."""
    with _Opened(path) as opened:
        files = opened.files
        others = _others(files)
        params = files.manifest.params
        sizes = {name: math.prod(param.shape) for name, param in params.items()}
        by_kind: dict[str, int] = {}
        for rank in range(files.manifest.world_size):
            for key, entry in files.reader(rank).entries.items():
                kind = _kind_of(key)
                by_kind[kind] = by_kind.get(kind, 0) + entry.num_bytes
        names = [FILE_NAME, *(files.manifest.file_name(rank) for rank in range(files.manifest.world_size))]
        return Contents(
            num_steps=files.manifest.num_steps,
            world_size=files.manifest.world_size,
            num_params=sum(sizes.values()),
            num_trainable=sum(size for name, size in sizes.items() if params[name].is_trainable),
            num_tensors=len(params),
            dtypes=tuple(sorted({param.dtype for param in params.values()})),
            bytes_by_kind=by_kind,
            file_bytes={name: (files.path / name).stat().st_size for name in names},
            optimizer=others["optimizer"],
            groups=tuple(others["groups"] or ()),
            buffers=others["buffers"],
            extra=others["extra"],
            has_scheduler=others["scheduler"] is not None,
        )


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read everything and compare it with its checksums; returns what is wrong, one line per damaged entry or file."""
    problems: list[str] = []
    with _Opened(path) as opened:
        files = opened.files
        for rank in range(files.manifest.world_size):
            try:
                reader = files.reader(rank)
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                continue
            for key, entry in reader.entries.items():
                try:
                    reader.verify(key, 0, entry.numel)
                except (CheckpointError, OSError) as error:
                    problems.append(str(error))
    return problems


class Change(NamedTuple):
    """A parameter, buffer or optimizer state whose values differ."""

    name: str
    largest: float
    """The largest absolute difference; NaN if only one side is NaN or they are infinite."""
    num_differing: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """In what two checkpoints differ."""

    facts: tuple[str, ...]
    """Lines on names, shapes, dtypes, hyperparameters and counters."""
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.facts or self.changes)


def diff(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> Difference:
    """Compare two checkpoints: what they contain, and the values of parameters, buffers and optimizer states of one shape."""
    with _Opened(path) as one, _Opened(other) as two:
        facts = [*_differing_facts(one.files, two.files), *_differing_tensors(one.weights, two.weights)]
        common = [name for name in one.weights.tensors if name in two.weights.tensors]
        same_shape = [name for name in common if one.weights.tensors[name].shape == two.weights.tensors[name].shape]
        found = [_compare(*_reading(one.weights, two.weights, name)) for name in same_shape]
        found += _changed_states(one.files, two.files, same_shape, facts)
    return Difference(tuple(facts), tuple(change for change in found if change is not None))


def _differing_facts(one: SavedFiles, two: SavedFiles) -> Iterator[str]:
    mine, theirs = _others(one), _others(two)
    pairs: list[tuple[str, Any, Any]] = [
        ("steps", one.manifest.num_steps, two.manifest.num_steps),
        ("ranks", one.manifest.world_size, two.manifest.world_size),
        ("optimizer", mine["optimizer"], theirs["optimizer"]),
    ]
    groups = (mine["groups"] or [], theirs["groups"] or [])
    pairs.append(("parameter groups", len(groups[0]), len(groups[1])))
    for number, (a, b) in enumerate(zip(*groups, strict=False)):
        pairs += [(f"group {number}, {key}", a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys())]
    for what, a, b in pairs:
        if repr(a) != repr(b):
            yield f"{what}: {a} against {b}"
    for key in sorted(mine["extra"].keys() | theirs["extra"].keys()):
        if not _is_same(mine["extra"].get(key), theirs["extra"].get(key)):
            yield f"extra {key!r} differs"
    if not _is_same(mine["scheduler"], theirs["scheduler"]):
        yield "the scheduler's state differs"
    for name in sorted(one.manifest.params.keys() & two.manifest.params.keys()):
        flags = [files.manifest.params[name].is_trainable for files in (one, two)]
        if flags[0] != flags[1]:
            yield f"{name}: {' against '.join('trainable' if flag else 'frozen' for flag in flags)}"


def _differing_tensors(one: Weights, two: Weights) -> Iterator[str]:
    for name in sorted(one.tensors.keys() | two.tensors.keys()):
        mine, theirs = one.tensors.get(name), two.tensors.get(name)
        if mine is None or theirs is None:
            yield f"{name}: only in the {'second' if mine is None else 'first'}"
        elif mine.shape != theirs.shape:
            yield f"{name}: shape {list(mine.shape)} against {list(theirs.shape)}"
        elif mine.dtype != theirs.dtype:
            yield f"{name}: dtype {mine.dtype} against {theirs.dtype}"


def _is_same(one: Any, two: Any) -> bool:
    """Whether nested plain values and tensors are equal."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_is_same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(_is_same(a, b) for a, b in zip(one, two, strict=True))
    return repr(one) == repr(two)  # NaN is equal to NaN here


def _changed_states(one: SavedFiles, two: SavedFiles, names: Sequence[str], facts: list[str]) -> Iterator[Change | None]:
    """Compare the optimizer states of parameters; what only one of them has, and small ones, become facts."""
    mine, theirs = _states(one), _states(two)
    for name in names:
        a, b = mine.get(name, {}), theirs.get(name, {})
        for kind in dict.fromkeys((*a, *b)):
            what = f"{name}, {kind}"
            params = one.manifest.params[name], two.manifest.params[name]
            if a.get(kind) is LONG and b.get(kind) is LONG and params[0].stride == params[1].stride:
                numel = math.prod(params[0].shape)
                yield _compare(what, numel, *(_state_reader(files, name, kind) for files in (one, two)))
            elif not _is_same(a.get(kind), b.get(kind)):
                facts.append(f"{what}: {_shown(a, kind)} against {_shown(b, kind)}")


def _shown(states: Mapping[str, Any], kind: str) -> str:
    if kind not in states:
        return "none"
    return "one value per element" if states[kind] is LONG else str(states[kind])


def _states(files: SavedFiles) -> dict[str, dict[str, Any]]:
    """The optimizer states of every parameter, LONG for long ones."""
    found: dict[str, dict[str, Any]] = {}
    for rank in range(files.manifest.world_size):
        found |= files.states_in(rank)
    return found


_Read = Callable[[int, torch.Tensor], None]
"""Reads elements from a number on into a vector."""


def _state_reader(files: SavedFiles, name: str, kind: str) -> _Read:
    def read(at: int, out: torch.Tensor) -> None:
        for start, values in files.parts(name, kind, at, out.numel()):
            out[start - at : start - at + values.numel()].copy_(values)

    return read


def _reading(one: Weights, two: Weights, name: str) -> tuple[str, int, _Read, _Read]:
    """What `_compare` needs for a parameter or buffer."""
    stored = one.tensors[name]

    def reader(weights: Weights) -> _Read:
        return lambda at, out: weights.read(name, stored.stride, at, out, torch.float64)

    return name, math.prod(stored.shape), reader(one), reader(two)


def _compare(name: str, numel_all: int, one: _Read, two: _Read) -> Change | None:
    """Compare a tensor chunk by chunk."""
    largest, num_differing = 0.0, 0
    step = CHUNK_BYTES // 4
    for at in range(0, numel_all, step):
        numel = min(step, numel_all - at)
        a, b = torch.empty(numel, dtype=torch.float64), torch.empty(numel, dtype=torch.float64)
        one(at, a)
        two(at, b)
        differs = ~((a == b) | (a.isnan() & b.isnan()))
        if bool(differs.any()):
            num_differing += int(differs.sum())
            gap = (a - b).abs()[differs].max().item()
            largest = largest if largest >= gap or math.isnan(largest) else gap
    return Change(name, largest, num_differing) if num_differing else None


def _others(files: SavedFiles) -> dict[str, Any]:
    others: dict[str, Any] = decode(dict(files.manifest.others), "the manifest", files.stored)
    problem = Subject.malformed(others)
    if problem:
        raise CheckpointError(f"{files.path / FILE_NAME} contradicts itself: {problem}.")
    return others


def _kind_of(key: str) -> str:
    """What an entry of a data file is, in words."""
    first, _, kind = key.partition(".")
    if not first.isdigit():
        return {"rng": "random generators"}.get(first, "buffers and others")
    return {MASTER: "values (trained)", VALUE: "values (frozen)"}.get(kind, f"optimizer: {kind}")


class _Opened:
    """A checkpoint, as files and as weights."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._weights: Weights | None = None
        self.files = SavedFiles(path)

    @property
    def weights(self) -> Weights:
        """The parameters and buffers."""
        if self._weights is None:
            self._weights = open_weights(self._path)
        return self._weights

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._weights is not None:
            self._weights.close()
        self.files.close()
