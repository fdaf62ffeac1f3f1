"""The format itself: lossless values, files that any safetensors reader opens, places by calculation, damage that is noticed."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import shardwise as sw
from shardwise.checkpoint import Manifest, read_manifest
from shardwise.checkpoint.chunks import Chunks
from shardwise.checkpoint.header import CHUNK_BYTES
from shardwise.checkpoint.manifest import SavedParam, SavedVector
from shardwise.checkpoint.plain import decode, dumps, encode, loads
from shardwise.checkpoint.tensor_file import Plan, Reader
from shardwise.checkpoint.writer import InMemory, Writer
from shardwise.errors import CheckpointError, DiskError
from shardwise.partition import make_layout, row_major
from shardwise.tiers import ALIGNMENT, aligned_memory, aligned_zeros
from shardwise.tiers.io import File, make_engine

# -- values ------------------------------------------------------------------------------------------------------------


def test_values_come_back_as_they_were() -> None:
    values = {
        "numbers": [0, -1, 1 << 62, 1 << 200, 0.1, -0.0, float("inf"), float("-inf"), True, None, "text ü"],
        "tuple": (1, (2.5, "x")),
        "tensors": [
            torch.randn(3, 2),
            torch.tensor(5),
            torch.empty(0, 3),
            torch.randn(4).bfloat16(),
            torch.tensor([True, False]),
        ],
        "keys": {1: "one", (2, 3): "pair", "$": "dollar"},
    }
    stored: dict[str, torch.Tensor] = {}
    for found in (
        decode(loads(dumps(encode(values, "it")).encode(), "it"), "it"),
        decode(loads(dumps(encode(values, "it", stored)).encode(), "it"), "it", stored.__getitem__),
    ):
        for mine, other in zip(values.pop("tensors", []), found.pop("tensors"), strict=False):
            assert torch.equal(mine, other) and mine.dtype == other.dtype
        assert found == values and type(found["tuple"]) is tuple and str(found["numbers"][5]) == "-0.0"
    nan = decode(encode(float("nan"), "it"), "it")
    assert nan != nan


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}', b"[NaN]", b"[Infinity]", b"[1.5]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}garbage',
    ],
    ids=range(8),
)  # fmt: skip
def test_text_that_was_not_written_here_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        loads(text, "it")


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        {"$": "unknown"},
        {"$": "float", "digits": "zz"},
        {"$": "tensor", "dtype": "float32", "shape": [2], "bytes": "00"},
        {"$": "tensor", "dtype": "object", "shape": [1], "bytes": "00"},
        {"$": "tensor", "dtype": "uint8", "shape": [-5], "bytes": ""},
        {"$": "stored", "key": "../x"},
        {"$": "dict", "pairs": [[[1], 2]]},
        {"$": "tuple"},
    ],
    ids=range(9),
)  # fmt: skip
def test_values_that_were_not_written_here_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(value, "it")


def test_what_cannot_be_saved_is_named() -> None:
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(CheckpointError, match="nested more than"):
        encode(deep, "it")
    with pytest.raises(CheckpointError, match=r"it\['a'\]\[0\] is a object, which cannot be saved"):
        encode({"a": [object()]}, "it")


# -- one file ----------------------------------------------------------------------------------------------------------


def write(path: Path, vectors: dict[str, torch.Tensor]) -> None:
    engine = make_engine()
    plan = Plan({key: (values.dtype, values.numel()) for key, values in vectors.items()}, {"who": "test"})
    told: dict[str, int] = dict.fromkeys(vectors, 0)

    def on_written(key: str, num_bytes: int) -> None:
        told[key] += num_bytes

    writer = Writer(path, plan, engine, on_written)
    for key, values in vectors.items():
        writer.write(key, InMemory([(0, values)]))
    writer.finish()
    assert told == {key: values.numel() * values.element_size() for key, values in vectors.items()}
    writer.close()
    engine.close()
    assert path.stat().st_size == plan.num_bytes


def test_any_reader_opens_the_file_and_every_range_can_be_read(tmp_path: Path) -> None:
    rng = random.Random(2)
    sizes = [0, 1, 1000, 1024, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, CHUNK_BYTES, 3 * CHUNK_BYTES]
    vectors = {f"v{n}": torch.randn(size).to(rng.choice((torch.float32, torch.bfloat16))) for n, size in enumerate(sizes)}
    path = tmp_path / "file.safetensors"
    write(path, vectors)
    with safe_open(path, "pt") as file:
        assert all(torch.equal(file.get_tensor(key), values) for key, values in vectors.items())
    chunks = Chunks()
    reader = Reader(path, chunks)
    for key, values in vectors.items():
        for _ in range(6):
            start = rng.randrange(values.numel() + 1)
            numel = rng.randrange(values.numel() - start + 1)
            found = [part.clone() for _, part in reader.read(key, start, numel)]
            assert torch.equal(torch.cat([*found, values[:0]]), values[start : start + numel])
        with pytest.raises(CheckpointError, match="are needed"):
            list(reader.read(key, 0, values.numel() + 1))
    reader.close()
    chunks.close()


@pytest.mark.parametrize("directory", ["a disk", "/dev/shm"])
def test_ranges_are_read_into_vectors_of_any_alignment_and_dtype(directory: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    place = Path(tempfile.mkdtemp(dir=directory)) if directory == "/dev/shm" else tmp_path
    path = place / "file.safetensors"
    block = ALIGNMENT // 4
    values = torch.randn(3 * CHUNK_BYTES // 4 + 5 * block + 7)
    write(path, {"whole": values, "blocks": values[: -7 - block]})
    chunks = Chunks()
    reader = Reader(path, chunks)
    try:
        for _ in range(40):
            key = rng.choice(["whole", "blocks"])
            length = reader.entries[key].numel
            start = rng.choice([0, block, 3, rng.randrange(length), CHUNK_BYTES // 4])
            numel = rng.choice([length - start, rng.randrange(length - start + 1)])
            dtype = rng.choice([torch.float32, torch.float32, torch.float64])
            shift = rng.choice([0, start % block, 5])  # with the second one chunks lie in memory as in the file
            around = aligned_memory((shift + numel + 9) * dtype.itemsize)[: (shift + numel + 9) * dtype.itemsize].view(dtype)
            around.fill_(-1)
            moved: list[int] = []
            reader.read_into(key, start, around[shift : shift + numel], moved.append)
            assert torch.equal(around[shift : shift + numel], values[start : start + numel].to(dtype))
            assert bool((around[:shift] == -1).all()) and bool((around[shift + numel :] == -1).all())
            assert sum(moved) == 4 * numel
        with open(path, "r+b") as file:  # the last byte of the second chunk
            file.seek(reader._data_start + 2 * CHUNK_BYTES - 1)
            file.write(b"\xff\xff")
        with pytest.raises(CheckpointError, match=f"bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES} of entry 'whole'"):
            reader.read_into("whole", 0, aligned_zeros(values.numel(), values.dtype, values.device), moved.append)
    finally:
        reader.close()
        chunks.close()
        shutil.rmtree(place)


# -- the manifest ------------------------------------------------------------------------------------------------------


def test_places_follow_from_the_layout() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = [(rng.randrange(1, 40), rng.randrange(1, 9)) for _ in range(rng.randrange(1, 7))]
        shapes = [(f"p{n}", size, row_major(size)) for n, size in enumerate(sizes)]
        world = rng.randrange(1, 9)
        layout = make_layout(shapes, 4, world)
        params = {name: SavedParam(shape, stride, "float32", True) for name, shape, stride in shapes}
        vector = SavedVector(tuple(s.name for s in layout.slots), tuple(s.offset for s in layout.slots), layout.shard_numel)
        manifest = Manifest.from_bytes(Manifest("id", world, 3, params, [vector], {}).to_bytes(), "it")
        flat = torch.arange(layout.numel)
        for slot in layout.slots:
            start = rng.randrange(slot.numel)
            numel = rng.randrange(1, slot.numel - start + 1)
            found = torch.empty(numel, dtype=torch.int64)
            for part in manifest.locate(slot.name, start, numel):
                low = part.rank * layout.shard_numel + part.start
                found[part.at : part.at + part.numel] = flat[low : low + part.numel]
            assert torch.equal(found, flat[slot.offset + start : slot.offset + start + numel])


def test_the_size_of_a_manifest_does_not_depend_on_the_number_of_ranks() -> None:
    def size(world: int) -> int:
        params, vectors = {}, []
        for unit in range(50):
            shapes = [(f"blocks.{unit}.{n}", (512, 512), (512, 1)) for n in range(8)]
            layout = make_layout(shapes, 4, world)
            params |= {name: SavedParam(shape, stride, "float32", True) for name, shape, stride in shapes}
            vectors.append(SavedVector(tuple(n for n, _, _ in shapes), tuple(s.offset for s in layout.slots), layout.shard_numel))
        return len(Manifest("id", world, 0, params, vectors, {}).to_bytes())

    assert abs(size(4096) - size(2)) < 1000


# -- damage ------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).square().mean()


def small_run(seed: int) -> tuple[sw.Run, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = sw.shard(model, optimizer, stage=2)
    model(torch.randn(4, 7)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return run, model, optimizer


def content(run: sw.Run) -> list[tuple[str, str, int, list[float]]]:
    found = [(name, kind, start, values.tolist()) for name, kind, start, values in run._survivors.ranges()]
    return [*found, *((name, "buffer", 0, buffer.view(-1).tolist()) for name, buffer in run._model.named_buffers())]


def mutate(rng: random.Random, path: Path) -> str:
    """Damage a checkpoint in one of many ways; says which."""
    files = sorted(path.iterdir())
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    how = rng.choice(["flip", "flip", "flip", "truncate", "extend", "zero", "remove", "swap", "field", "link", "grammar"])
    if how == "flip":
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(min(len(data), rng.choice((64, 4096, len(data)))))
            data[at] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif how == "truncate":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif how == "extend":
        file.write_bytes(data + bytes(rng.randrange(1, 5000)))
    elif how == "zero":
        start = rng.randrange(len(data))
        end = min(len(data), start + rng.randrange(1, 4096))
        data[start:end] = bytes(end - start)
        file.write_bytes(data)
    elif how == "remove":
        file.unlink()
    elif how == "swap":
        file.write_bytes(files[0].read_bytes() if file != files[0] else files[-1].read_bytes())
    elif how == "link":
        file.unlink()
        file.symlink_to(rng.choice(["/dev/zero", "/etc/passwd", str(path / "nowhere"), "../other/" + file.name]))
    else:
        _mutate_manifest(rng, path, keeps_checksum=how == "field")
    return f"{how} {file.name}"


def _mutate_manifest(rng: random.Random, path: Path, *, keeps_checksum: bool) -> None:
    """Change a field of the manifest; with `keeps_checksum` as somebody would who knows the format."""
    from shardwise.checkpoint import manifest as module

    fields = json.loads((path / "manifest.json").read_text())
    place, key = rng.choice(
        [
            (fields, "version"), (fields, "format"), (fields["content"], "world_size"), (fields["content"], "save_id"),
            (fields["content"], "vectors"), (fields["content"], "params"), (fields["content"]["vectors"][0], 1),
            (fields["content"]["vectors"][0], 2), (fields["content"]["vectors"][0], 0),
            (fields["content"]["params"], "first.weight"), (fields["content"]["params"]["first.weight"], 0),
            (fields["content"]["params"]["first.weight"], 1), (fields["content"]["params"]["first.weight"], 2),
            (fields["content"], "others"),
        ]
    )  # fmt: skip
    place[key] = rng.choice([-1, 0, 10**30, "../../etc/passwd", None, [], {}, [[]], True, 1 << 62, [1 << 62] * 3, {"$": "int"}])
    if keeps_checksum and isinstance(fields["content"], dict):
        fields["checksum"] = module._mark(fields["content"])
    (path / "manifest.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("stride", [[1 << 40, 1], [0, 1], [1, 1], [7], [7, 1, 1], [14, 2]])
def test_strides_that_do_not_fill_memory_are_refused(tmp_path: Path, stride: list[int]) -> None:
    from shardwise.checkpoint import manifest as module

    run, _, _ = small_run(0)
    run.save(tmp_path / "saved")
    fields = json.loads((tmp_path / "saved/manifest.json").read_text())
    fields["content"]["params"]["first.weight"][1] = stride
    fields["checksum"] = module._mark(fields["content"])
    (tmp_path / "saved/manifest.json").write_text(json.dumps(fields))
    plain = Small()
    before = plain.first.weight.detach().clone()
    for load in (run.load, lambda path: sw.load_pretrained(plain, path), read_manifest):
        with pytest.raises(CheckpointError, match=r"contradicts itself: .*strides"):
            load(tmp_path / "saved")
    assert torch.equal(plain.first.weight, before)


@pytest.mark.parametrize("number", [250, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_refused_or_load_the_same(tmp_path: Path, number: int) -> None:
    source, _, _ = small_run(0)
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    source.save(whole, extra={"note": "x", "values": torch.arange(4)})
    saved = content(source)
    target, _, _ = small_run(1)
    before = content(target)
    outcomes = {"refused": 0, "the same": 0}
    for seed in range(number):
        shutil.copytree(whole, damaged)
        outside = set(os.listdir(tmp_path))
        what = mutate(random.Random(seed), damaged)
        try:
            target.load(damaged)
            assert content(target) == saved, f"{seed}: {what} was loaded, and gave other values"
            outcomes["the same"] += 1
            target, _, _ = small_run(1)
        except CheckpointError:
            assert content(target) == before, f"{seed}: {what} was refused, but something was changed"
            outcomes["refused"] += 1
        assert set(os.listdir(tmp_path)) == outside
        shutil.rmtree(damaged)
    assert outcomes["refused"] > 0.8 * number
    print(outcomes)
    assert read_manifest(whole).num_steps == 1


# -- chunks ------------------------------------------------------------------------------------------------------------


def test_an_expanded_value_is_copied_into_its_chunk() -> None:
    one = aligned_memory(4096).view(torch.float32)[:1].fill_(2.5)
    memory = aligned_memory(CHUNK_BYTES)
    values, _ = InMemory([(0, one.expand(1024))]).start(0, memory, torch.float32, 1024)
    assert values.is_contiguous() and torch.equal(values, torch.full((1024,), 2.5))


def test_an_error_of_a_chunk_that_nobody_asked_for_is_not_raised(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(4096))
    chunks = Chunks()
    with open(tmp_path / "short", "rb") as opened:
        file = File(opened.fileno(), "short")
        for number in range(20):  # all of them but the first lie behind the end of the file
            chunks.start((chunks, "entry", number), file, number * 4096, 4096, is_direct=False)
        assert chunks.start((chunks, "entry", 0), file, 0, 4096, is_direct=False)
        assert not chunks.get((chunks, "entry", 0), 4096).any()
        with pytest.raises(DiskError):
            chunks.get((chunks, "entry", 19), 4096)
        chunks.drop(chunks)
    chunks.close()
