"""What is in a checkpoint, and where? The manifest names every parameter and says in which ranks' files its elements lie.

It describes layouts, not ranges: rank r's part of a flat vector follows from the vector's length and the number of ranks. So one
rank makes it without asking the others, and its size does not depend on their number. Pure: no files, no communication.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.plain import DTYPES, dumps, loads
from shardwise.errors import CheckpointError
from shardwise.partition import storage_stride
from shardwise.tiers.checksum import checksum

FORMAT = "shardwise checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"
MAX_BYTES = 1 << 28
"""A larger manifest is refused before it is parsed."""


class SavedParam(NamedTuple):
    """One parameter of the model that was saved."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    is_trainable: bool


@dataclasses.dataclass(frozen=True)
class SavedVector:
    """One flat vector, divided among ranks: which parameters lie in it, and where."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    tile: tuple[int, int] | None = None
    """If it holds one tile of one parameter: its first element there, and its length."""


class Segment(NamedTuple):
    """Elements that lie together in one rank's file: of vector `number` from `start` on; `at` counts from the range's begin."""

    rank: int
    number: int
    start: int
    numel: int
    at: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    save_id: str
    """Shared by the files of one checkpoint."""
    world_size: int
    num_steps: int
    params: Mapping[str, SavedParam]
    vectors: Sequence[SavedVector]
    others: Mapping[str, Any]
    """Values encoded by `plain.encode`: the optimizer's groups, loss scale, scheduler, the user's own."""

    def file_name(self, rank: int) -> str:
        """The name of a rank's data file."""
        return data_file_name(rank, self.world_size)

    def locate(self, name: str, start: int, numel: int) -> Iterator[Segment]:
        """Where elements [start, start + numel) of a parameter lie."""
        for number, offset, first, length in self._places[name]:
            shard = self.vectors[number].shard_numel
            low, end = offset + max(start - first, 0), offset + min(start + numel - first, length)
            while low < end:
                rank = low // shard
                high = min(end, (rank + 1) * shard)
                yield Segment(rank, number, low - rank * shard, high - low, low - offset + first - start)
                low = high

    @functools.cached_property
    def _places(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """For every parameter, and every tile of one: the vector, the offset there, its first element, its length."""
        found: dict[str, list[tuple[int, int, int, int]]] = {}
        for number, vector in enumerate(self.vectors):
            for name, offset in zip(vector.names, vector.offsets, strict=True):
                first, length = vector.tile or (0, math.prod(self.params[name].shape))
                found.setdefault(name, []).append((number, offset, first, length))
        return found

    # -- text -------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The file's content: JSON, with a checksum of its own."""
        content = {
            "save_id": self.save_id,
            "world_size": self.world_size,
            "num_steps": self.num_steps,
            "params": {name: [list(p.shape), list(p.stride), p.dtype, p.is_trainable] for name, p in self.params.items()},
            "vectors": [
                [list(v.names), list(v.offsets), v.shard_numel, *([] if v.tile is None else [list(v.tile)])] for v in self.vectors
            ],
            "others": self.others,
        }
        return dumps({"format": FORMAT, "version": VERSION, "checksum": _mark(content), "content": content}).encode()

    @staticmethod
    def from_bytes(text: bytes, path: str) -> Manifest:
        """Parse and check a manifest; `path` is for messages."""
        fields = loads(text, path)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the manifest of a shardwise checkpoint.")
        if fields.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has format version {fields.get('version')!r}; this version of shardwise reads version {VERSION}."
            )
        content = fields.get("content")
        if not isinstance(content, dict) or fields.get("checksum") != _mark(content):
            raise CheckpointError(f"{path} does not have the checksum that it names: it was changed or damaged.")
        try:
            found = _parse(content)
            _check(found)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} contradicts itself: {error}.") from None
        return found


def data_file_name(rank: int, world_size: int) -> str:
    """The name of a rank's data file."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def entry_key(number: int, kind: str) -> str:
    """The key of a vector's entry in a data file."""
    return f"{number:05d}.{kind}"


def _mark(content: dict[str, Any]) -> str:
    return f"{checksum(torch.frombuffer(bytearray(dumps(content).encode()), dtype=torch.uint8)):016x}"


def _parse(content: dict[str, Any]) -> Manifest:
    params = {
        name: SavedParam(_counts(shape), _counts(stride), _one_of(DTYPES, dtype), _is(bool, is_trainable))
        for name, (shape, stride, dtype, is_trainable) in _is(dict, content["params"]).items()
    }
    vectors = [
        SavedVector(tuple(_is(str, name) for name in names), _counts(offsets), _is(int, shard), *map(_tile, tile))
        for names, offsets, shard, *tile in _is(list, content["vectors"])
    ]
    return Manifest(
        _is(str, content["save_id"]),
        _is(int, content["world_size"]),
        _is(int, content["num_steps"]),
        params,
        vectors,
        _is(dict, content["others"]),
    )


def _tile(values: Any) -> tuple[int, int]:
    first, length = _counts(values)
    return first, length


def _check(found: Manifest) -> None:
    """Every parameter lies in exactly one vector, inside it, and beside the others; a tiled one in several, end to end."""
    if found.world_size < 1 or found.num_steps < 0:
        raise ValueError(f"world size {found.world_size}, {found.num_steps} steps")
    seen: set[str] = set()
    tiled: dict[str, int] = {}  # how much of a tiled parameter the vectors so far have
    for number, vector in enumerate(found.vectors):
        if len(vector.names) != len(vector.offsets) or vector.shard_numel < 0:
            raise ValueError(f"vector {number} has {len(vector.names)} names and {len(vector.offsets)} offsets")
        at = 0
        for name, offset in sorted(zip(vector.names, vector.offsets, strict=True), key=lambda pair: pair[1]):
            if (name in seen and vector.tile is None) or name not in found.params:
                raise ValueError(f"parameter {name!r} is {'in two vectors' if name in seen else 'not described'}")
            shape, stride, *_ = found.params[name]
            if len(shape) != len(stride) or storage_stride(shape, stride) != stride:
                raise ValueError(f"parameter {name!r} of shape {shape} has strides {stride}")
            numel = math.prod(shape)
            if vector.tile is not None:
                if len(vector.names) != 1 or vector.tile[0] != tiled.get(name, 0) or (name in seen and name not in tiled):
                    raise ValueError(f"the tiles of parameter {name!r} do not follow each other")
                tiled[name], numel = sum(vector.tile), vector.tile[1]
            seen.add(name)
            if offset < at:
                raise ValueError(f"parameter {name!r} overlaps with another one in vector {number}")
            at = offset + numel
        if at > vector.shard_numel * found.world_size:
            raise ValueError(f"vector {number} is shorter than its parameters")
    for name, numel in tiled.items():
        if numel != math.prod(found.params[name].shape):
            raise ValueError(f"the tiles of parameter {name!r} have {numel} elements")
    if seen != found.params.keys():
        raise ValueError(f"parameter {sorted(found.params.keys() - seen)[0]!r} is in no vector")


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _one_of(known: Mapping[str, Any], value: Any) -> str:
    if value not in known:
        raise ValueError(f"{value!r} is not one of {', '.join(known)}")
    return str(value)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} is not a list of sizes")
    return tuple(values)
