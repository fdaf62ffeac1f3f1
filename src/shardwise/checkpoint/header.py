"""The header of a safetensors file, checked before any of its numbers is trusted. For our own files and for those of others."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.plain import DTYPES, dtype_name, dumps, loads
from shardwise.errors import CheckpointError

CHUNK_BYTES = 4 << 20
"""How many bytes of an entry one checksum of ours covers, and how many are written or read at a time."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODE_OF = {name: code for code, name in _CODES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file, row-major: its dtype, its shape, and where its bytes begin behind the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def num_chunks(self) -> int:
        """How many checksums it has in a file of ours."""
        return -(-self.num_bytes // CHUNK_BYTES)

    def chunk_bytes(self, number: int) -> int:
        """Length of what one checksum covers; the last may be shorter than the others."""
        return min(CHUNK_BYTES, self.num_bytes - number * CHUNK_BYTES)


class Header(NamedTuple):
    """What a header says."""

    data_start: int
    """Where the data begins in the file."""
    metadata: dict[str, str]
    entries: dict[str, Entry]


def header_text(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    """The JSON text of a header."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    for key, entry in entries.items():
        fields[key] = {
            "dtype": _CODE_OF[dtype_name(entry.dtype)],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.start + entry.num_bytes],
        }
    return dumps(fields).encode()


def framed(text: bytes, align_bytes: int) -> bytes:
    """A header's text with its length in front, padded with spaces so that the data begins aligned."""
    padded = text.ljust(-(-(len(text) + 8) // align_bytes) * align_bytes - 8)
    return len(padded).to_bytes(8, "little") + padded


def read_header(descriptor: int, path: str) -> Header:
    """Read and check the header of an open file; `path` is for messages."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise damaged(path, f"its header would have {length} bytes, the file has {size}")
    text = b""
    while len(text) < length and (more := os.pread(descriptor, length - len(text), 8 + len(text))):
        text += more
    fields = loads(text, f"the header of {path}")
    if not isinstance(fields, dict):
        raise damaged(path, "its header is not an object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, "the metadata in its header is not made of texts")
    entries = {key: _entry(path, key, value) for key, value in fields.items()}
    at = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != at:
            raise damaged(path, f"entry {key!r} begins at byte {entry.start}, {at} was expected")
        at += entry.num_bytes
    if at != size - 8 - length:
        raise damaged(path, f"it has {size - 8 - length} bytes of data, its header says {at}: it was truncated or extended")
    return Header(8 + length, metadata, entries)


def _entry(path: str, key: str, value: Any) -> Entry:
    try:
        code, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        counts = [*shape, start, end]
    except (KeyError, TypeError, ValueError):
        raise damaged(path, f"entry {key!r} does not say its dtype, shape and place") from None
    if not isinstance(code, str) or code not in _CODES:
        raise damaged(path, f"entry {key!r} has dtype {code!r}, which is not one of {', '.join(_CODES)}")
    entry = Entry(DTYPES[_CODES[code]], tuple(shape), start)
    if not all(type(count) is int and count >= 0 for count in counts) or end != start + entry.num_bytes:
        raise damaged(path, f"entry {key!r} has a shape and a place that contradict each other")
    return entry


def damaged(path: str, why: str) -> CheckpointError:
    """The error for a file that cannot be used."""
    return CheckpointError(f"{path} cannot be used: {why}. Use another checkpoint, or copy this one again.")


def open_regular(path: Path) -> int:
    """Open a file of a checkpoint for reading. Links and devices are refused: they may lead out of the checkpoint."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened: {os.strerror(error.errno or 0)}. The checkpoint is incomplete."
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file.")
    return descriptor
