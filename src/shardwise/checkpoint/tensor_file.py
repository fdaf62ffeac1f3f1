"""One rank's data file: a safetensors file whose entries begin at multiples of ALIGNMENT, with a checksum of every chunk.

The header is planned before any byte is written, because all sizes are known; checksums have a fixed width and are filled in at
the end. Anybody's safetensors reader opens the file. Reading checks the header before it trusts any of its numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from shardwise.checkpoint.chunks import NUM_AHEAD, Chunks
from shardwise.checkpoint.header import CHUNK_BYTES, Entry, damaged, framed, header_text, open_regular, read_header
from shardwise.checkpoint.plain import dumps, loads
from shardwise.engine import MASTER, VALUE
from shardwise.errors import CheckpointError
from shardwise.ticket import Ticket
from shardwise.tiers import ALIGNMENT, checksum, reads_direct
from shardwise.tiers.io import File

Progress = Callable[[int, int], None]
"""Called with the bytes that this rank has moved so far, and with all that it will move."""
_REMEDY = "Use another checkpoint, or copy this one again."
_VALUES = (f".{MASTER}", f".{VALUE}")  # how the keys of entries with parameters' values end
_PADDING = "padding."  # prefix of entries without meaning: the format allows no gaps


class Plan:
    """Where everything in a file will be, from the lengths of its entries and the text of its metadata."""

    def __init__(self, entries: Mapping[str, tuple[torch.dtype, int]], metadata: Mapping[str, str]) -> None:
        self.entries: dict[str, Entry] = {}
        self._metadata = metadata
        self._padding: dict[str, Entry] = {}
        at = 0
        for key, (dtype, numel) in entries.items():
            entry = self.entries[key] = Entry(dtype, (numel,), at)
            at += entry.num_bytes
            gap = -at % ALIGNMENT
            if gap:
                self._padding[f"{_PADDING}{len(self._padding)}"] = Entry(torch.uint8, (gap,), at)
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
        entries = {**self.entries, **self._padding}
        mark = _mark(header_text(metadata, entries))
        return framed(header_text({**metadata, "header": mark}, entries), ALIGNMENT)


def _mark(text: bytes) -> str:
    return f"{checksum(torch.frombuffer(bytearray(text), dtype=torch.uint8)):016x}"


class Reader:
    """Reads one file. Its header is checked when it is opened, and every chunk when it is read."""

    def __init__(self, path: Path, chunks: Chunks) -> None:
        self._chunks = chunks
        self._file = File(open_regular(path), str(path), _REMEDY)
        self._direct: File | None = None
        self._next: dict[str, str] = {}  # which entry is usually read after an entry
        self._verified: set[tuple[str, int]] = set()  # chunks that are held and were compared with their checksums
        try:
            self._data_start, self.metadata, self.entries, self._sums = self._read_header()
            for is_value in (True, False):
                self._next |= itertools.pairwise(key for key in self.entries if key.endswith(_VALUES) == is_value)
            self._direct = self._open_direct()
        except BaseException:
            os.close(self._file.descriptor)
            raise

    def _open_direct(self) -> File | None:
        """The same file with O_DIRECT; None if its file system cannot."""
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/self/fd/{self._file.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            try:
                reads_direct(descriptor)
            except OSError:
                os.close(descriptor)
                raise
            return self._file._replace(descriptor=descriptor)
        return None

    def _read_header(self) -> tuple[int, dict[str, str], dict[str, Entry], dict[str, list[int]]]:
        data_start, metadata, entries = read_header(self._file.descriptor, self._file.path)
        if _mark(header_text({**metadata, "header": "0" * 16}, entries)) != metadata.get("header", ""):
            raise self._damaged("its header does not have the checksum that it names")
        named = {key: entry for key, entry in entries.items() if not key.startswith(_PADDING)}
        sums = loads(metadata.get("checksums", "").encode(), f"the checksums of {self._file.path}")
        found: dict[str, list[int]] = {}
        for key, entry in named.items():
            digits = sums.get(key) if isinstance(sums, dict) else None
            if not isinstance(digits, str) or len(digits) != 16 * entry.num_chunks:
                raise self._damaged(f"entry {key!r} has no checksums")
            if len(entry.shape) != 1:
                raise self._damaged(f"entry {key!r} is not a flat vector")
            found[key] = [int(digits[at : at + 16], 16) for at in range(0, len(digits), 16)]
        return data_start, metadata, named, found

    def read(self, key: str, start: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of the parts of elements [start, start + numel); each is valid until the next one is asked for.

        Whole chunks are read, the next ones meanwhile, and compared with their checksums.
        """
        for number in self._numbers(key, start, numel):
            for ahead, at in itertools.islice(self._from(key, number), 1 + NUM_AHEAD):
                self._start(ahead, at)
            yield self._part(key, number, start, numel)

    def read_into(self, key: str, start: int, out: torch.Tensor, advance: Callable[[int], None]) -> None:
        """Read elements from `start` on into the flat vector `out`, in its dtype; `advance` is called with numbers of bytes.

        Chunks that can be read to where they stay are, all at once, and are compared with their checksums there.
        """
        straight: dict[int, tuple[torch.Tensor, Ticket]] = {}
        numbers = self._numbers(key, start, out.numel())
        try:
            for number in numbers:
                file, place = self._place(key, number)
                memory = self._room(key, number, start, out, is_direct=file is self._direct)
                if memory is not None:
                    straight[number] = memory, self._chunks.read(file, memory, place, is_direct=file is self._direct)
            others = [number for number in numbers if number not in straight]
            if straight:  # the others are the first and the last at most
                for number in others:
                    self._start(key, number)
            for number, (memory, ticket) in straight.items():
                ticket.wait()
                self._verify(key, number, memory)
                advance(len(memory))
            parts = (self._part(key, number, start, out.numel()) for number in others)
            for at, values in parts if straight else self.read(key, start, out.numel()):
                out[at - start : at - start + values.numel()].copy_(values)
                advance(values.numel() * values.element_size())
        finally:
            for _, ticket in straight.values():
                with contextlib.suppress(OSError):  # raised where it was waited for
                    ticket.wait()

    def _numbers(self, key: str, start: int, numel: int) -> range:
        """The chunks in which elements [start, start + numel) lie."""
        entry = self.entries[key]
        if start < 0 or start + numel > entry.numel:
            raise self._damaged(f"elements {start} to {start + numel} of entry {key!r} are needed, it has {entry.numel}")
        size = entry.dtype.itemsize
        return range(start * size // CHUNK_BYTES, -(-(start + numel) * size // CHUNK_BYTES) if numel else 0)

    def _part(self, key: str, number: int, start: int, numel: int) -> tuple[int, torch.Tensor]:
        """(first element, values) of what a chunk that was started has of elements [start, start + numel)."""
        entry = self.entries[key]
        memory = self._chunks.get((self, key, number), entry.chunk_bytes(number))
        if (key, number) not in self._verified:
            self._verify(key, number, memory)
            self._verified.add((key, number))
        first = number * CHUNK_BYTES // entry.dtype.itemsize
        low, high = max(start - first, 0), start + numel - first
        return first + low, memory.view(entry.dtype)[low:high]

    def _room(self, key: str, number: int, start: int, out: torch.Tensor, *, is_direct: bool) -> torch.Tensor | None:
        """The bytes of `out` where a chunk belongs that is read from `start` on; None if it must go by way of a buffer."""
        entry = self.entries[key]
        if out.dtype != entry.dtype or out.device.type != "cpu":
            return None
        at, length = number * CHUNK_BYTES - start * entry.dtype.itemsize, entry.chunk_bytes(number)
        if at < 0 or at + length > out.numel() * entry.dtype.itemsize:
            return None
        memory = out.view(torch.uint8)[at : at + length]
        return None if is_direct and (memory.data_ptr() % ALIGNMENT or length % ALIGNMENT) else memory

    def _verify(self, key: str, number: int, memory: torch.Tensor) -> None:
        if checksum(memory) != self._sums[key][number]:
            at = number * CHUNK_BYTES
            raise self._damaged(f"bytes {at} to {at + len(memory)} of entry {key!r} do not have the checksum that was saved")

    def _from(self, key: str | None, number: int) -> Iterator[tuple[str, int]]:
        """The chunks from one on in the order in which they are usually read: values of all vectors, or their states."""
        while key is not None:
            for at in range(number, self.entries[key].num_chunks):
                yield key, at
            key, number = self._next.get(key), 0

    def _start(self, key: str, number: int) -> None:
        file, place = self._place(key, number)
        length = self.entries[key].chunk_bytes(number)
        if self._chunks.start((self, key, number), file, place, length, is_direct=file is self._direct):
            self._verified.discard((key, number))

    def _place(self, key: str, number: int) -> tuple[File, int]:
        """How a chunk is read, and where it begins."""
        place = self._data_start + self.entries[key].start + number * CHUNK_BYTES
        return (self._file if self._direct is None or place % ALIGNMENT else self._direct), place

    def verify(self, key: str, start: int, numel: int) -> None:
        """Read a range and compare it with its checksums."""
        for _ in self.read(key, start, numel):
            pass

    def close(self) -> None:
        """Close the file."""
        self._chunks.drop(self)
        if self._direct is not None:
            os.close(self._direct.descriptor)
        os.close(self._file.descriptor)

    def _damaged(self, why: str) -> CheckpointError:
        return damaged(self._file.path, why)
