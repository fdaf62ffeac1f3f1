"""One rank's data file: a safetensors file whose entries begin at multiples of ALIGNMENT, with a checksum of every chunk.

The header is planned before any byte is written, because all sizes are known; checksums have a fixed width and are filled in at
the end. Anybody's safetensors reader opens the file. Reading checks the header before it trusts any of its numbers.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.plain import DTYPES, dtype_name, dumps, loads
from shardwise.errors import CheckpointError
from shardwise.tiers import ALIGNMENT, checksum
from shardwise.tiers.io import File, IoEngine

Progress = Callable[[int, int], None]
"""Called with the bytes that this rank has moved so far, and with all that it will move."""
CHUNK_BYTES = 4 << 20
"""How many bytes of an entry one checksum covers, and how many are written or read at a time."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODE_OF = {name: code for code, name in _CODES.items()}
_PADDING = "padding."  # prefix of entries without meaning: the format allows no gaps


@dataclasses.dataclass(frozen=True)
class Entry:
    """A flat vector in a file: its dtype, its length, and where its bytes begin behind the header."""

    dtype: torch.dtype
    numel: int
    start: int

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def num_chunks(self) -> int:
        """How many checksums it has."""
        return -(-self.num_bytes // CHUNK_BYTES)


class Plan:
    """Where everything in a file will be, from the lengths of its entries and the text of its metadata."""

    def __init__(self, entries: Mapping[str, tuple[torch.dtype, int]], metadata: Mapping[str, str]) -> None:
        self.entries: dict[str, Entry] = {}
        self._metadata = metadata
        self._padding: dict[str, Entry] = {}
        at = 0
        for key, (dtype, numel) in entries.items():
            entry = self.entries[key] = Entry(dtype, numel, at)
            at += entry.num_bytes
            gap = -at % ALIGNMENT
            if gap:
                self._padding[f"{_PADDING}{len(self._padding)}"] = Entry(torch.uint8, gap, at)
                at += gap
        self.data_bytes = at
        self.header_bytes = len(self.header({key: [0] * entry.num_chunks for key, entry in self.entries.items()}))

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return self.header_bytes + self.data_bytes

    def header(self, checksums: Mapping[str, Sequence[int]]) -> bytes:
        """The header, padded so that the data begins aligned; always of the same length."""
        sums = dumps({key: "".join(f"{value:016x}" for value in found) for key, found in checksums.items()})
        metadata = {**self._metadata, "checksums": sums, "header": "0" * 16}
        text = _header_text(metadata, {**self.entries, **self._padding})
        mark = checksum(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        text = _header_text({**metadata, "header": f"{mark:016x}"}, {**self.entries, **self._padding})
        padded = text.ljust(-(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8)
        return len(padded).to_bytes(8, "little") + padded


def _header_text(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    for key, entry in entries.items():
        fields[key] = {
            "dtype": _CODE_OF[dtype_name(entry.dtype)],
            "shape": [entry.numel],
            "data_offsets": [entry.start, entry.start + entry.num_bytes],
        }
    return dumps(fields).encode()


class Reader:
    """Reads one file. Its header is checked when it is opened, and every chunk when it is read."""

    def __init__(self, path: Path, engine: IoEngine, memory: torch.Tensor) -> None:
        """`memory`: CHUNK_BYTES, which Readers that are used in turn may share."""
        self._engine = engine
        self._memory = memory
        self._file = File(open_regular(path), str(path))
        try:
            size = os.fstat(self._file.descriptor).st_size
            self._data_start, text = self._read_header(size)
            self.metadata, self.entries, self._sums = self._parse(text, size - self._data_start)
        except BaseException:
            os.close(self._file.descriptor)
            raise

    def _read_header(self, size: int) -> tuple[int, bytes]:
        length = int.from_bytes(os.pread(self._file.descriptor, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise self._damaged(f"its header would have {length} bytes, the file has {size}")
        text = b""
        while len(text) < length and (more := os.pread(self._file.descriptor, length - len(text), 8 + len(text))):
            text += more
        return 8 + length, text

    def _parse(self, text: bytes, data_bytes: int) -> tuple[dict[str, str], dict[str, Entry], dict[str, list[int]]]:
        fields = loads(text, f"the header of {self._file.path}")
        metadata = fields.pop("__metadata__", None) if isinstance(fields, dict) else None
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._damaged("its header has no metadata of a checkpoint")
        entries = {key: self._entry(key, value) for key, value in fields.items()}
        at = 0
        for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if entry.start != at:
                raise self._damaged(f"entry {key!r} begins at byte {entry.start}, {at} was expected")
            at += entry.num_bytes
        if at != data_bytes:
            raise self._damaged(f"it has {data_bytes} bytes of data, its header says {at}: it was truncated or extended")
        mark = metadata.get("header", "")
        same = _header_text({**metadata, "header": "0" * 16}, entries)
        if f"{checksum(torch.frombuffer(bytearray(same), dtype=torch.uint8)):016x}" != mark:
            raise self._damaged("its header does not have the checksum that it names")
        named = {key: entry for key, entry in entries.items() if not key.startswith(_PADDING)}
        sums = loads(metadata.get("checksums", "").encode(), f"the checksums of {self._file.path}")
        found: dict[str, list[int]] = {}
        for key, entry in named.items():
            digits = sums.get(key) if isinstance(sums, dict) else None
            if not isinstance(digits, str) or len(digits) != 16 * entry.num_chunks:
                raise self._damaged(f"entry {key!r} has no checksums")
            found[key] = [int(digits[at : at + 16], 16) for at in range(0, len(digits), 16)]
        return metadata, named, found

    def _entry(self, key: str, value: Any) -> Entry:
        try:
            dtype = DTYPES[_CODES[value["dtype"]]]
            (numel,), (start, end) = value["shape"], value["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"entry {key!r} is not a flat vector of a known dtype") from None
        if not (type(numel) is type(start) is int and numel >= 0 and start >= 0 and end == start + numel * dtype.itemsize):
            raise self._damaged(f"entry {key!r} has a shape and a place that contradict each other")
        return Entry(dtype, numel, start)

    def read(self, key: str, start: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of the parts of elements [start, start + numel); each is valid until the next one is asked for.

        Whole chunks are read and compared with their checksums.
        """
        entry = self.entries[key]
        if start < 0 or start + numel > entry.numel:
            raise self._damaged(f"elements {start} to {start + numel} of entry {key!r} are needed, it has {entry.numel}")
        size = entry.dtype.itemsize
        for number in range(start * size // CHUNK_BYTES, -(-(start + numel) * size // CHUNK_BYTES)):
            at = number * CHUNK_BYTES
            memory = self._memory[: min(CHUNK_BYTES, entry.num_bytes - at)]
            self._engine.start(self._file, memory, self._data_start + entry.start + at, writes=False).wait()
            if checksum(memory) != self._sums[key][number]:
                raise self._damaged(f"bytes {at} to {at + len(memory)} of entry {key!r} do not have the checksum that was saved")
            first = at // size
            low, high = max(start, first), min(start + numel, first + len(memory) // size)
            if low < high:
                yield low, memory.view(entry.dtype)[low - first : high - first]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file.descriptor)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path} cannot be used: {why}. Use another checkpoint, or copy this one again.")


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
