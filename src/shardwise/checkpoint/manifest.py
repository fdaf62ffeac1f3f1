"""What is in a checkpoint, and where? The manifest names every parameter and says in which ranks' files its elements lie.

It describes layouts, not ranges: rank r's part of a flat vector follows from the vector's length and the number of ranks. So one
rank makes it without asking the others, and its size does not depend on their number. Pure: no files, no communication.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.boxes import Box, Overlap, whole_box
from shardwise.checkpoint.plain import DTYPES, dumps, loads
from shardwise.errors import CheckpointError
from shardwise.partition import storage_stride
from shardwise.tiers.checksum import checksum

FORMAT = "shardwise checkpoint"
VERSION = 2
"""Version 1 knows no parts of the model; a checkpoint without them is written as version 1."""
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
    part: int = 0
    """Which part of the model it belongs to: its shards are in the files of these ranks."""
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...] = ()
    """For each name, if tensor parallelism has divided any: the origin and the shape of what this vector has, or None for all."""


class Place(NamedTuple):
    """Where a vector has a parameter, or a box of it."""

    number: int
    offset: int
    box: Box


class Block(NamedTuple):
    """Rows [low, high) of a box, and what the saved boxes have of them."""

    low: int
    high: int
    found: tuple[tuple[Overlap, tuple[Segment, ...]], ...]


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
    num_parts: int = 1
    """Parts of the model (tensor and pipeline parallelism). Part p is in the files from p * `num_shards` on."""

    @property
    def num_shards(self) -> int:
        """Ranks that divided each vector among them."""
        return self.world_size // self.num_parts

    def file_name(self, rank: int) -> str:
        """The name of a rank's data file."""
        return data_file_name(rank, self.world_size)

    def place(self, name: str, number: int) -> Place | None:
        """Where a vector has a parameter; None if the same elements are taken from another one."""
        return next((place for place in self._places[name] if place.number == number), None)

    def is_divided(self, name: str) -> bool:
        """Whether elements of the whole parameter that lie together may lie apart here."""
        return any(place.box.first is None for place in self._places[name])

    def locate(self, name: str, start: int, numel: int) -> Iterator[Segment]:
        """Where elements [start, start + numel) of a parameter that is not divided lie."""
        for number, offset, box in self._places[name]:
            first = box.first
            assert first is not None
            low = offset + max(start - first, 0)
            high = offset + min(start + numel - first, box.numel)
            yield from self._segments(number, low, high, first - offset - start)

    def blocks(self, name: str, box: Box, start: int, numel: int, most_numel: int) -> Iterator[Block]:
        """Where the rows lie that have elements [start, start + numel) of a box, a few rows at a time."""
        first, last = box.rows_with(start, numel)
        step = max(most_numel // max(box.row_numel, 1), 1)
        for low in range(first, last, step):
            high = min(low + step, last)
            found = []
            for number, offset, saved in self._places[name]:
                overlap = box.overlap(low, high, saved)
                if overlap is not None:
                    begin = offset + overlap.start
                    found.append((overlap, tuple(self._segments(number, begin, begin + overlap.numel, -begin))))
            yield Block(low, high, tuple(found))

    def _segments(self, number: int, low: int, high: int, shift: int) -> Iterator[Segment]:
        """Elements [low, high) of a vector, rank by rank; each counts from its place in the vector plus `shift`."""
        vector = self.vectors[number]
        while low < high:
            rank = low // vector.shard_numel
            end = min(high, (rank + 1) * vector.shard_numel)
            owner = vector.part * self.num_shards + rank
            yield Segment(owner, number, low - rank * vector.shard_numel, end - low, low + shift)
            low = end

    @functools.cached_property
    def _places(self) -> dict[str, list[Place]]:
        """For every parameter the vectors that have it; of vectors that have the same box of it the first."""
        found: dict[str, dict[Box, Place]] = {}
        for number, vector in enumerate(self.vectors):
            for name, offset, part in itertools.zip_longest(vector.names, vector.offsets, vector.boxes):
                shape, stride, *_ = self.params[name]
                box = whole_box(shape, stride) if part is None else Box.along(stride, part[0], part[1], shape)
                if vector.tile is not None:
                    row = max(box.row_numel, 1)
                    box = Box((vector.tile[0] // row, *box.origin[1:]), (vector.tile[1] // row, *box.shape[1:]), box.whole)
                found.setdefault(name, {}).setdefault(box, Place(number, offset, box))
        return {name: list(places.values()) for name, places in found.items()}

    def check_covered(self, name: str) -> None:
        """Raise ValueError unless the boxes of a parameter have all of its elements; boxes that overlap are refused too."""
        boxes = [place.box for place in self._places[name]]
        numel = math.prod(self.params[name].shape)
        if sum(box.numel for box in boxes) != numel:
            raise ValueError(f"the parts of parameter {name!r} do not have its {numel} elements")
        in_order = sorted(boxes)
        pairs = itertools.combinations(boxes, 2) if self.is_divided(name) else itertools.pairwise(in_order)
        for one, other in pairs:
            if one.shape and one.overlap(0, one.shape[0], other) is not None:
                raise ValueError(f"two parts of parameter {name!r} overlap")

    # -- text -------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The file's content: JSON, with a checksum of its own."""
        content = {
            "save_id": self.save_id,
            "world_size": self.world_size,
            "num_steps": self.num_steps,
            "params": {name: [list(p.shape), list(p.stride), p.dtype, p.is_trainable] for name, p in self.params.items()},
            "vectors": [_listed(vector) for vector in self.vectors],
            "others": self.others,
            **({} if self.num_parts == 1 else {"num_parts": self.num_parts}),
        }
        version = VERSION if self.num_parts > 1 else 1
        return dumps({"format": FORMAT, "version": version, "checksum": _mark(content), "content": content}).encode()

    @staticmethod
    def from_bytes(text: bytes, path: str) -> Manifest:
        """Parse and check a manifest; `path` is for messages."""
        fields = loads(text, path)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the manifest of a shardwise checkpoint.")
        if fields.get("version") not in range(1, VERSION + 1):
            raise CheckpointError(
                f"{path} has format version {fields.get('version')!r}; this version of shardwise reads versions up to {VERSION}."
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
    vectors = [_parse_vector(*_is(list, fields)) for fields in _is(list, content["vectors"])]
    return Manifest(
        _is(str, content["save_id"]),
        _is(int, content["world_size"]),
        _is(int, content["num_steps"]),
        params,
        vectors,
        _is(dict, content["others"]),
        _is(int, content.get("num_parts", 1)),
    )


def _listed(vector: SavedVector) -> list[Any]:
    """A vector as JSON has it: what is not there is left out at the end."""
    fields: list[Any] = [list(vector.names), list(vector.offsets), vector.shard_numel]
    if vector.tile is not None or vector.part or vector.boxes:
        fields.append([] if vector.tile is None else list(vector.tile))
    if vector.part or vector.boxes:
        fields += [vector.part, [None if box is None else [list(values) for values in box] for box in vector.boxes]]
    return fields


def _parse_vector(names: Any, offsets: Any, shard: Any, tile: Any = (), part: Any = 0, boxes: Any = ()) -> SavedVector:
    return SavedVector(
        tuple(_is(str, name) for name in names),
        _counts(offsets),
        _is(int, shard),
        _tile(tile) if tile else None,
        _is(int, part),
        tuple(None if box is None else _box(*box) for box in boxes),
    )


def _tile(values: Any) -> tuple[int, int]:
    first, length = _counts(values)
    return first, length


def _box(origin: Any, shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _counts(origin), _counts(shape)


def _check(found: Manifest) -> None:
    """Every element of every parameter is in some vector; vectors are long enough, and nothing in them overlaps."""
    if found.world_size < 1 or found.num_steps < 0 or found.num_parts < 1 or found.world_size % found.num_parts:
        raise ValueError(f"world size {found.world_size}, {found.num_parts} parts, {found.num_steps} steps")
    for name, (shape, stride, *_) in found.params.items():
        if len(shape) != len(stride) or storage_stride(shape, stride) != stride:
            raise ValueError(f"parameter {name!r} of shape {shape} has strides {stride}")
    seen: set[tuple[int, str]] = set()  # (part of the model, name)
    tiled: dict[str, int] = {}  # how much of a tiled parameter the vectors so far have
    for number, vector in enumerate(found.vectors):
        if len(vector.names) != len(vector.offsets) or vector.shard_numel < 0 or len(vector.boxes) not in (0, len(vector.names)):
            raise ValueError(f"vector {number} has {len(vector.names)} names and {len(vector.offsets)} offsets")
        if not 0 <= vector.part < found.num_parts:
            raise ValueError(f"vector {number} is of part {vector.part} of {found.num_parts}")
        at = 0
        entries = itertools.zip_longest(vector.names, vector.offsets, vector.boxes)
        for name, offset, box in sorted(entries, key=lambda entry: entry[1]):
            was_seen = (vector.part, name) in seen
            if (was_seen and vector.tile is None) or name not in found.params:
                raise ValueError(f"parameter {name!r} is {'in two vectors' if was_seen else 'not described'}")
            shape = found.params[name].shape
            numel = math.prod(shape if box is None else box[1])
            if box is not None:
                _check_box(name, shape, *box)
            if vector.tile is not None:
                row = math.prod(shape[1:])
                follows = len(vector.names) == 1 and vector.tile[0] == tiled.get(name, 0) and not (was_seen and name not in tiled)
                if not follows or box is not None or vector.tile[0] % max(row, 1) or vector.tile[1] % max(row, 1):
                    raise ValueError(f"the tiles of parameter {name!r} do not follow each other")
                tiled[name], numel = sum(vector.tile), vector.tile[1]
            seen.add((vector.part, name))
            if offset < at:
                raise ValueError(f"parameter {name!r} overlaps with another one in vector {number}")
            at = offset + numel
        if at > vector.shard_numel * found.num_shards:
            raise ValueError(f"vector {number} is shorter than its parameters")
    for name, numel in tiled.items():
        if numel != math.prod(found.params[name].shape):
            raise ValueError(f"the tiles of parameter {name!r} have {numel} elements")
    missing = sorted(found.params.keys() - {name for _, name in seen})
    if missing:
        raise ValueError(f"parameter {missing[0]!r} is in no vector")
    for name in found.params:
        found.check_covered(name)


def _check_box(name: str, whole: tuple[int, ...], origin: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if not len(whole) == len(origin) == len(shape) or any(o + n > w for o, n, w in zip(origin, shape, whole, strict=True)):
        raise ValueError(f"parameter {name!r} of shape {whole} has a box of shape {shape} from {origin} on")


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
