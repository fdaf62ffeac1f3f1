"""The files of one checkpoint, opened as they are needed. Used by loading and by the offline tools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.boxes import Box, whole_box
from shardwise.checkpoint.chunks import Chunks
from shardwise.checkpoint.header import open_regular
from shardwise.checkpoint.manifest import FILE_NAME, MAX_BYTES, Manifest, Segment, entry_key
from shardwise.checkpoint.plain import decode, loads
from shardwise.checkpoint.tensor_file import Reader
from shardwise.engine import LONG, MASTER, VALUE
from shardwise.errors import CheckpointError

_MOST_OPEN = 64  # files at once
_BLOCK_NUMEL = 1 << 20  # elements that are put together at a time, where they do not lie together


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`."""
    target = Path(os.path.abspath(path))
    if not target.is_dir():
        raise CheckpointError(f"there is no checkpoint at {target}: it is not a directory.")
    if not (target / FILE_NAME).exists():
        raise CheckpointError(f"{target} has no {FILE_NAME}: it is not a checkpoint, or is incomplete.{_hint(target)}")
    descriptor = open_regular(target / FILE_NAME)
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"{target / FILE_NAME} has more than {MAX_BYTES} bytes: it is not a manifest.")
    return Manifest.from_bytes(text, str(target / FILE_NAME))


def _hint(target: Path) -> str:
    """What a directory is instead of a checkpoint, if that can be told."""
    inside = sorted(path.parent.name for path in target.glob(f"*/{FILE_NAME}"))
    if inside:
        return f" The directory has checkpoints: name one of them, the last is {inside[-1]}."
    if any(target.glob("*.safetensors")):
        return " The directory has weights only: load them with sw.load_pretrained(model, path)."
    return ""


class SavedFiles:
    """One checkpoint's manifest and data files."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.manifest = read_manifest(self.path)
        self._chunks = Chunks()
        self._readers: dict[int, Reader] = {}
        self._states: dict[int, dict[str, dict[str, Any]]] = {}

    def reader(self, rank: int) -> Reader:
        """A rank's file. It may be closed when others are asked for."""
        if rank not in self._readers:
            path = self.path / self.manifest.file_name(rank)
            while len(self._readers) >= _MOST_OPEN:
                self._readers.pop(next(iter(self._readers))).close()
            reader = self._readers[rank] = Reader(path, self._chunks)
            if reader.metadata.get("save_id") != self.manifest.save_id or reader.metadata.get("rank") != str(rank):
                raise CheckpointError(f"{path} belongs to another checkpoint than the manifest beside it.")
            self._states[rank] = _parse_states(reader.metadata.get("states", ""), str(path))
        return self._readers[rank]

    def states_in(self, rank: int) -> dict[str, dict[str, Any]]:
        """Optimizer states that a rank's file names, by parameter; LONG stands for a long one."""
        self.reader(rank)
        return self._states[rank]

    def value_kind(self, name: str) -> str:
        """The kind of the entries with a parameter's value."""
        return MASTER if self.manifest.params[name].is_trainable else VALUE

    def parts(self, name: str, kind: str, start: int, numel: int, box: Box | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of elements [start, start + numel) of a parameter, or of a box of it, in storage order.

        Each is valid until the next one. What lies together in files is read chunk by chunk; else a few rows are put together.
        """
        first = 0 if box is None else box.first
        if first is None or self.manifest.is_divided(name):
            saved = self.manifest.params[name]
            yield from self._put_together(name, kind, box or whole_box(saved.shape, saved.stride), start, numel)
            return
        for segment in self.manifest.locate(name, first + start, numel):
            key = entry_key(segment.number, kind)
            for at, values in self.reader(segment.rank).read(key, segment.start, segment.numel):
                yield start + segment.at + at - segment.start, values

    def segments(self, name: str, start: int, numel: int, box: Box | None = None) -> Iterator[Segment]:
        """What `parts` reads."""
        first = 0 if box is None else box.first
        if first is not None and not self.manifest.is_divided(name):
            yield from self.manifest.locate(name, first + start, numel)
            return
        saved = self.manifest.params[name]
        box = box or whole_box(saved.shape, saved.stride)
        for block in self.manifest.blocks(name, box, start, numel, _BLOCK_NUMEL):
            for _, segments in block.found:
                yield from segments

    def _put_together(self, name: str, kind: str, box: Box, start: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        for block in self.manifest.blocks(name, box, start, numel, _BLOCK_NUMEL):
            rows: torch.Tensor | None = None
            for overlap, segments in block.found:
                whole: torch.Tensor | None = None
                for segment in segments:
                    reader, key = self.reader(segment.rank), entry_key(segment.number, kind)
                    if whole is None:
                        whole = torch.empty(overlap.numel, dtype=reader.entries[key].dtype)
                    for at, values in reader.read(key, segment.start, segment.numel):
                        begin = segment.at + at - segment.start
                        whole[begin : begin + values.numel()] = values
                if whole is not None:
                    if rows is None:
                        rows = torch.empty(block.high - block.low, *box.shape[1:], dtype=whole.dtype)
                    rows[overlap.target] = whole.view(overlap.shape)[overlap.source]
            if rows is None:
                continue
            low = block.low * box.row_numel
            begin, end = max(start, low), min(start + numel, low + rows.numel())
            yield begin, rows.view(-1)[begin - low : end - low]

    def stored(self, key: str) -> torch.Tensor:
        """A tensor of the user's or a buffer, from rank 0's file."""
        reader = self.reader(0)
        if not key.startswith("extra.") or key not in reader.entries:
            raise CheckpointError(f"{self.path} has no entry {key!r}.")
        return self.whole(0, key)

    def whole(self, rank: int, key: str) -> torch.Tensor:
        """A whole entry of a rank's file."""
        reader = self.reader(rank)
        entry = reader.entries[key]
        found = torch.empty(entry.numel, dtype=entry.dtype)
        for start, values in reader.read(key, 0, entry.numel):
            found[start : start + values.numel()] = values
        return found

    def close(self) -> None:
        """Close all files."""
        while self._readers:
            self._readers.popitem()[1].close()
        self._chunks.close()


def _parse_states(text: str, path: str) -> dict[str, dict[str, Any]]:
    fields = loads(text.encode(), f"the optimizer states named by {path}")
    try:
        return {
            name: {kind: decode(value[0], path) if value else LONG for kind, *value in pairs} for name, pairs in fields.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} names optimizer states that cannot be understood ({error}).") from None
