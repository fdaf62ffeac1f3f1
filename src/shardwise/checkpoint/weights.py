"""Named tensors in files, of which any range can be read: a Hugging Face directory, a safetensors file, or a checkpoint of ours.

Nothing in such a directory is trusted: file names that an index gives must be plain ones, and links are refused, except those by
which a Hugging Face cache leads from a snapshot to its blobs.
"""

from __future__ import annotations

import ctypes
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.header import CHUNK_BYTES, Header, damaged, open_regular, read_header
from shardwise.checkpoint.manifest import FILE_NAME
from shardwise.checkpoint.plain import DTYPES, decode, loads
from shardwise.checkpoint.saved_files import SavedFiles
from shardwise.errors import CheckpointError
from shardwise.partition import Slot, row_major, same_order
from shardwise.tiers import aligned_memory, checksum
from shardwise.tiers.io import File

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 28
_MOST_OPEN = 64  # files at once


class Stored(NamedTuple):
    """A tensor in a file; its elements lie in the order of `stride`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Weights(ABC):
    """Named tensors in files."""

    path: Path
    tensors: dict[str, Stored]

    @abstractmethod
    def parts(self, name: str, start: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of elements [start, start + numel), in storage order; each is valid until the next one."""

    @abstractmethod
    def verify(self, name: str, stride: tuple[int, ...], start: int, numel: int) -> None:
        """Compare elements, in the order of `stride`, with their checksums, if there are any."""

    @abstractmethod
    def mark(self, name: str) -> int:
        """A number that is the same on ranks that see the same file."""

    @abstractmethod
    def close(self) -> None:
        """Close all files."""

    def read(self, name: str, stride: tuple[int, ...], start: int, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Read elements from `start` on, in the order of `stride`, into the flat vector `out`, rounded to `dtype` on the way.

        Chunk by chunk; if the file has another order, the whole tensor is read and permuted.
        """
        stored = self.tensors[name]
        if same_order(stored.shape, stored.stride, stride):
            for at, values in self.parts(name, start, out.numel()):
                out[at - start : at - start + values.numel()].copy_(values.to(dtype))
            return
        whole = self.whole(name).to(dtype)
        flat = torch.empty_strided(stored.shape, stride, dtype=dtype).copy_(whole).as_strided((whole.numel(),), (1,))
        out.copy_(flat[start : start + out.numel()])

    def read_part(self, name: str, slot: Slot, start: int, out: torch.Tensor, dtype: torch.dtype) -> None:
        """As `read`, elements of a Slot in its storage order; tensor parallelism may have divided its parameter."""
        if slot.part is None:
            self.read(name, slot.stride, start, out, dtype)
            return
        for at, values in self._of_part(name, slot, start, out.numel()):
            out[at - start : at - start + values.numel()].copy_(values.to(dtype))

    def verify_part(self, name: str, slot: Slot, start: int, numel: int) -> None:
        """Compare what `read_part` would read with its checksums, if there are any."""
        box = Box.of(slot)
        if slot.part is None or box is None:
            self.verify(name, slot.stride, start, numel)
        else:
            row, (low, high) = math.prod(box.whole[1:]), box.rows_with(start, numel)
            self.verify(name, slot.part.stride, (box.origin[0] + low) * row, (high - low) * row)

    def _of_part(self, name: str, slot: Slot, start: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of elements [start, start + numel) of a Slot that has a part of its parameter."""
        stored, box, part = self.tensors[name], Box.of(slot), slot.part
        assert box is not None and part is not None
        if not same_order(stored.shape, stored.stride, part.stride):
            region = self.whole(name)[tuple(slice(o, o + n) for o, n in zip(part.origin, slot.shape, strict=True))]
            flat = torch.empty_strided(slot.shape, slot.stride, dtype=region.dtype).copy_(region).as_strided((slot.numel,), (1,))
            yield start, flat[start : start + numel]
        elif box.first is not None:
            yield from ((at - box.first, values) for at, values in self.parts(name, box.first + start, numel))
        else:  # whole rows are read, of which the box has a part
            row = math.prod(box.whole[1:])
            columns = tuple(slice(o, o + n) for o, n in zip(box.origin[1:], box.shape[1:], strict=True))
            first, last = box.rows_with(start, numel)
            step = max(CHUNK_BYTES // (row * stored.dtype.itemsize), 1)
            for low in range(first, last, step):
                high = min(low + step, last)
                rows = torch.empty((high - low) * row, dtype=stored.dtype)
                begin = (box.origin[0] + low) * row
                for at, values in self.parts(name, begin, rows.numel()):
                    rows[at - begin : at - begin + values.numel()] = values
                mine = rows.view(high - low, *box.whole[1:])[(slice(None), *columns)].reshape(-1)
                at = low * box.row_numel
                yield max(at, start), mine[max(start - at, 0) : start + numel - at]

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor, with its shape."""
        stored = self.tensors[name]
        found = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype)
        flat = found.as_strided((found.numel(),), (1,))
        for at, values in self.parts(name, 0, found.numel()):
            flat[at : at + values.numel()] = values
        return found


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """Open a directory with `model.safetensors`, or with an index and its files; a single `.safetensors` file; a checkpoint."""
    target = Path(os.path.abspath(path))
    if target.is_dir() and (target / FILE_NAME).exists():
        return _SavedWeights(target)
    return _Files(target)


class _SavedWeights(Weights):
    """The parameters and buffers in a checkpoint of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = SavedFiles(path)
        self.tensors = {
            name: Stored(param.shape, param.stride, DTYPES[param.dtype]) for name, param in self._files.manifest.params.items()
        }
        try:
            buffers = decode(self._files.manifest.others.get("buffers", {}), "the manifest", self._files.stored)
            self._buffers: dict[str, torch.Tensor] = {name: buffer.contiguous() for name, buffer in buffers.items()}
        except AttributeError:
            self.close()
            raise CheckpointError(f"{path / FILE_NAME} contradicts itself: 'buffers' has something else than tensors.") from None
        except BaseException:
            self.close()
            raise
        for name, buffer in self._buffers.items():
            self.tensors[name] = Stored(tuple(buffer.shape), tuple(buffer.stride()), buffer.dtype)

    def parts(self, name: str, start: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Compared with their checksums as they are read."""
        if name in self._buffers:
            yield start, self._buffers[name].view(-1)[start : start + numel]
        else:
            yield from self._files.parts(name, self._files.value_kind(name), start, numel)

    def verify(self, name: str, stride: tuple[int, ...], start: int, numel: int) -> None:
        """Read it; every chunk is compared with its checksum."""
        stored = self.tensors[name]
        is_whole = not same_order(stored.shape, stored.stride, stride)
        for _ in self.parts(name, 0, math.prod(stored.shape)) if is_whole else self.parts(name, start, numel):
            pass

    def mark(self, name: str) -> int:
        """From the id that the files of one save share."""
        return _number(f"{self._files.manifest.save_id} {name}")

    def close(self) -> None:
        """Close all files."""
        self._files.close()


class _Files(Weights):
    """Safetensors files of anybody."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory = aligned_memory(CHUNK_BYTES)
        self._open: dict[Path, File] = {}
        self._headers: dict[Path, Header] = {}
        self._places: dict[str, Path] = {}
        self.tensors = {}
        try:
            for file, names in _list_files(path).items():
                self._add(file, names)
        except BaseException:
            self._close_files()
            raise

    def _add(self, path: Path, names: list[str] | None) -> None:
        """Read a file's header. `names`: what an index says is in it."""
        self._headers[path] = header = read_header(self._file(path).descriptor, str(path))
        for name in header.entries if names is None else names:
            if name not in header.entries:
                raise damaged(str(path), f"the index beside it says that it has {name!r}, and it has not")
            entry = header.entries[name]
            self.tensors[name] = Stored(entry.shape, row_major(entry.shape), entry.dtype)
            self._places[name] = path

    def _file(self, path: Path) -> File:
        if path not in self._open:
            while len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))).descriptor)
            self._open[path] = File(_open_file(path), str(path))
        return self._open[path]

    def parts(self, name: str, start: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Read through one buffer."""
        path = self._places[name]
        header = self._headers[path]
        entry = header.entries[name]
        size = entry.dtype.itemsize
        for at in range(start, start + numel, CHUNK_BYTES // size):
            memory = self._memory[: min(CHUNK_BYTES, (start + numel - at) * size)]
            place = header.data_start + entry.start + at * size
            _read_all(self._file(path), memory, place)
            yield at, memory.view(entry.dtype)

    def verify(self, name: str, stride: tuple[int, ...], start: int, numel: int) -> None:
        """Nothing to compare with: such files have no checksums. Their length was checked with the header."""

    def mark(self, name: str) -> int:
        """From the file's header; such files have no checksums of their data."""
        entry = self._headers[self._places[name]].entries[name]
        return _number(f"{self._places[name].name} {name} {entry}")

    def close(self) -> None:
        """Close all files."""
        self._close_files()

    def _close_files(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1].descriptor)


def _number(text: str) -> int:
    return checksum(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


def _list_files(path: Path) -> dict[Path, list[str] | None]:
    """The files to read, and which tensors of each (None: all)."""
    if path.is_file() and path.suffix == ".safetensors":
        return {path: None}
    if not path.is_dir():
        raise CheckpointError(f"there are no weights at {path}: it is neither a directory nor a .safetensors file.")
    if os.path.lexists(path / SINGLE):
        return {path / SINGLE: None}
    if os.path.lexists(path / INDEX):
        return _read_index(path / INDEX)
    pickles = sorted(found.name for found in path.iterdir() if found.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise CheckpointError(
            f"{path} has its weights in {pickles[0]} only: that is a pickle, which can run any code when it is read. Convert it "
            "where you trust it: load it with transformers and call save_pretrained(), which writes model.safetensors."
        )
    raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX} nor {FILE_NAME}: there are no weights in it.")


def _read_index(path: Path) -> dict[Path, list[str] | None]:
    with os.fdopen(_open_file(path), "rb") as file:
        text = file.read(_MAX_INDEX_BYTES + 1)
    if len(text) > _MAX_INDEX_BYTES:
        raise damaged(str(path), f"it has more than {_MAX_INDEX_BYTES} bytes")
    fields: Any = loads(text, str(path), allows_floats=True)
    places = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(places, dict) or not places:
        raise damaged(str(path), "it has no 'weight_map'")
    found: dict[Path, list[str] | None] = {}
    for name, file_name in places.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise damaged(str(path), f"it says that {name!r} is in {file_name!r}, which is not the name of a file beside it")
        names = found.setdefault(path.parent / file_name, [])
        assert names is not None
        names.append(name)
    return found


def _open_file(path: Path) -> int:
    """Open a file for reading. A link is followed only inside a Hugging Face cache: from a snapshot to its blobs."""
    if path.is_symlink():
        real = Path(os.path.realpath(path))
        if real.parent != Path(os.path.realpath(path.parent.parent.parent / "blobs")):
            raise CheckpointError(
                f"{path} is a link, to {real}: it may lead anywhere. Name the directory with the files themselves."
            )
        return open_regular(real)
    return open_regular(path)


def _read_all(file: File, memory: torch.Tensor, place: int) -> None:
    """Read through the page cache, in order, so that the kernel reads ahead."""
    view = memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr())).cast("B")
    done = 0
    while done < len(view):
        count = os.preadv(file.descriptor, [view[done:]], place + done)
        if count == 0:
            raise damaged(file.path, f"it ends at byte {place + done}: it was truncated")
        done += count
