"""Turns a checkpoint into a Hugging Face directory: one process, no model, no ranks, a few chunks in memory.

Every byte is read once, in the order of the files, compared with its checksum, and written to its place in the plan. A parameter
whose elements do not lie in row-major order is put together in memory first; there is never more than one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.claim import appear, claimed, place_of, require_room
from shardwise.checkpoint.header import open_regular
from shardwise.checkpoint.hub_files import MAX_FILE_BYTES, HubPlan, HubWriter
from shardwise.checkpoint.manifest import FILE_NAME, SavedVector, entry_key
from shardwise.checkpoint.plain import DTYPES, decode, dtype_name, loads
from shardwise.checkpoint.saved_files import SavedFiles
from shardwise.errors import CheckpointError, DiskError
from shardwise.partition import is_row_major

_MAX_CONFIG_BYTES = 16 << 20


def export_checkpoint(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    config: str | os.PathLike[str] | None = None,
) -> HubPlan:
    """Write the parameters and buffers of the checkpoint at `path` as a Hugging Face directory `target`, which must not exist.

    `config`: a `config.json`, or a directory with one, to copy. Raises CheckpointError, and leaves nothing, if anything is wrong.
    """
    goal = Path(os.path.abspath(target))
    place = place_of(goal, uuid.uuid4().hex)
    files: SavedFiles | None = None
    try:
        files = SavedFiles(path)
        plan = HubPlan(_tensors(files, dtype), max_file_bytes)
        documents = {} if config is None else _documents(Path(os.path.abspath(config)), dtype)
        with claimed(goal, place):
            require_room(place, plan.num_bytes)
            plan.create(place, documents)
            _copy(files, place, plan)
            appear(place, goal)
        return plan
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise CheckpointError(f"{goal} was not exported: {error}.") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if files is not None:
            files.close()


def _tensors(files: SavedFiles, dtype: torch.dtype | None) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of everything that is exported, in the order of the vectors."""

    def target_dtype(own: torch.dtype) -> torch.dtype:
        return dtype if dtype is not None and own.is_floating_point else own

    params = files.manifest.params
    names = [name for vector in files.manifest.vectors for name in vector.names]
    found = {name: (target_dtype(DTYPES[params[name].dtype]), params[name].shape) for name in names}
    for name, buffer in described_buffers(files).items():
        found[name] = (target_dtype(buffer.dtype), tuple(buffer.shape))
    return found


def described_buffers(files: SavedFiles) -> dict[str, torch.Tensor]:
    """The saved buffers as meta tensors: dtypes and shapes, nothing read."""

    def blank(key: str) -> torch.Tensor:
        entry = files.reader(0).entries.get(key)
        if entry is None:
            raise CheckpointError(f"{files.path} has no entry {key!r}.")
        return torch.empty(entry.numel, dtype=entry.dtype, device="meta")

    found: Any = decode(_encoded_buffers(files), "the manifest", blank)
    if not all(isinstance(buffer, torch.Tensor) for buffer in found.values()):
        raise CheckpointError(f"{files.path / FILE_NAME} contradicts itself: 'buffers' has something else than tensors.")
    return dict(found)


def _encoded_buffers(files: SavedFiles) -> Mapping[str, Any]:
    buffers = files.manifest.others.get("buffers")
    if not isinstance(buffers, dict) or "$" in buffers:
        raise CheckpointError(f"{files.path / FILE_NAME} contradicts itself: 'buffers' is missing or of another type.")
    return buffers


def _copy(files: SavedFiles, place: Path, plan: HubPlan) -> None:
    writer = HubWriter(place, plan)
    try:
        for number, vector in enumerate(files.manifest.vectors):
            if vector.names:
                _copy_vector(files, number, vector, writer)
        for name in files.manifest.params:
            if files.manifest.is_divided(name):
                _copy_divided(files, name, writer)
        for name, encoded in _encoded_buffers(files).items():
            writer.write(name, 0, decode(encoded, "the manifest", files.stored).reshape(-1))
        writer.finish()
    finally:
        writer.close()


def _copy_vector(files: SavedFiles, number: int, vector: SavedVector, writer: HubWriter) -> None:
    """Go through a vector from its begin to its end, and hand its values to the parameters that lie there."""
    params = files.manifest.params
    key = entry_key(number, files.value_kind(vector.names[0]))
    places = [(name, files.manifest.place(name, number)) for name in vector.names if not files.manifest.is_divided(name)]
    waiting = sorted((place.offset, name, place.box) for name, place in places if place is not None and place.box.numel)
    kept: torch.Tensor | None = None
    first_rank = vector.part * files.manifest.num_shards
    for shard in range(files.manifest.num_shards if waiting else 0):
        rank = first_rank + shard
        reader = files.reader(rank)
        if key not in reader.entries:
            raise CheckpointError(f"{files.path / files.manifest.file_name(rank)} has no entry {key!r}.")
        for start, values in reader.read(key, 0, vector.shard_numel):
            low = shard * vector.shard_numel + start
            for offset, name, box in list(waiting):
                param, begin = params[name], box.first
                assert begin is not None
                end = offset + box.numel
                if offset >= low + values.numel():
                    break
                first, last = max(offset, low), min(end, low + values.numel())
                part = values[first - low : last - low]
                if is_row_major(param.shape, param.stride):
                    writer.write(name, begin + first - offset, part)
                else:
                    kept = torch.empty(end - offset, dtype=values.dtype) if kept is None else kept
                    kept[first - offset : last - offset] = part
                    if last == end:
                        writer.write(name, 0, kept.as_strided(param.shape, param.stride).contiguous().view(-1))
                        kept = None
                if last == end:
                    waiting.pop(0)


def _copy_divided(files: SavedFiles, name: str, writer: HubWriter) -> None:
    """Put a parameter together whose parts lie in several vectors."""
    param = files.manifest.params[name]
    whole = torch.empty(math.prod(param.shape), dtype=DTYPES[param.dtype])
    for at, values in files.parts(name, files.value_kind(name), 0, whole.numel()):
        whole[at : at + values.numel()] = values
    writer.write(name, 0, whole.as_strided(param.shape, param.stride).contiguous().view(-1))


def _documents(path: Path, dtype: torch.dtype | None) -> dict[str, bytes]:
    """The configuration files to copy, by name. `dtype`: what values are rounded to, which the configuration says too."""
    if path.is_dir():
        found = {"config.json": path / "config.json"}
        if (path / "generation_config.json").exists():
            found["generation_config.json"] = path / "generation_config.json"
    else:
        found = {"config.json": path}
    texts = {name: _read_config(file) for name, file in found.items()}
    if dtype is not None:
        fields = json.loads(texts["config.json"])
        fields |= {key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in fields} or {"dtype": dtype_name(dtype)}
        texts["config.json"] = json.dumps(fields, indent=2).encode()
    return texts


def _read_config(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"config={path} is not a file. Name a config.json, or a directory that has one.")
    with os.fdopen(open_regular(Path(os.path.realpath(path))), "rb") as file:
        text = file.read(_MAX_CONFIG_BYTES + 1)
    if len(text) > _MAX_CONFIG_BYTES or not isinstance(loads(text, str(path), allows_floats=True), dict):
        raise CheckpointError(f"{path} is not a configuration: a JSON object was expected.")
    return text
