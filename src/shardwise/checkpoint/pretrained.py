"""Reads weights of others, or of a checkpoint, into a model: a plain one, a sharded one, or one that is being built.

Names and shapes are compared before anything is changed. Every rank reads the ranges that it keeps, chunk by chunk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable

import torch
from torch import nn

from shardwise.checkpoint.matching import Matching, match, persistent_buffers
from shardwise.checkpoint.subject import Subject, try_together
from shardwise.checkpoint.weights import Weights, open_weights
from shardwise.comm import World
from shardwise.engine import Restoring
from shardwise.errors import CheckpointError, ModelError
from shardwise.partition import Piece, Slot, Unit, list_params, storage_stride


class Arriving:
    """Weights on their way into one model. `engine.Construction` and `engine.Restoring` read from it."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._matching = Matching({}, ())

    def fit(self, model: nn.Module, *, strict: bool = True, elsewhere: Collection[str] = ()) -> tuple[str, ...]:
        """Find the model's parameters and buffers; raise CheckpointError if they do not fit. Returns what was left out.

        `elsewhere`: names of parameters and buffers that other stages of a pipeline have.
        """
        shapes = {name: stored.shape for name, stored in self._weights.tensors.items()}
        self._matching = match(model, shapes, str(self._weights.path), strict=strict, elsewhere=elsewhere)
        return self._matching.left_out

    def read_range(self, name: str, slot: Slot, start: int, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Read elements of the parameter `name`, from `start` on in the slot's storage order, rounded to `dtype`."""
        if name in self._matching.names:
            self._weights.read_part(self._matching.names[name], slot, start, out, dtype)

    def has(self, unit: Unit, piece: Piece) -> bool:
        """Whether the parameter of a Piece is among the weights."""
        return unit.layout.slots[piece.slot_index].name in self._matching.names

    def read(self, unit: Unit, pieces: Iterable[Piece], kind: str | None, vector: torch.Tensor) -> None:
        """Read Pieces' values to where they lie in `vector`, rounded to the parameters' dtype, as if loaded there."""
        for piece in pieces:
            slot, out = unit.layout.slots[piece.slot_index], vector[piece.shard_start : piece.shard_start + piece.numel]
            self.read_range(slot.name, slot, slot.start + piece.param_start, out, unit.dtypes.original)

    def dtype_of(self, unit: Unit, piece: Piece, kind: str) -> torch.dtype:
        """Never asked: there are no optimizer states."""
        raise NotImplementedError

    def verify(self, unit: Unit, piece: Piece) -> None:
        """Read a Piece and compare it with its checksums, if the files have any."""
        slot = unit.layout.slots[piece.slot_index]
        if slot.name in self._matching.names:
            self._weights.verify_part(self._matching.names[slot.name], slot, slot.start + piece.param_start, piece.numel)

    def verify_all(self) -> None:
        """Read everything that fits the model and compare it with its checksums, if the files have any."""
        for name in self._matching.names.values():
            stored = self._weights.tensors[name]
            self._weights.verify(name, stored.stride, 0, math.prod(stored.shape))

    def read_whole(self, name: str, value: torch.Tensor) -> None:
        """Read a parameter or buffer that is in memory."""
        if name not in self._matching.names:
            return
        value = value.detach()
        key, stride = self._matching.names[name], tuple(value.stride())
        with torch.no_grad():
            if storage_stride(value.shape, stride) == stride:
                self._weights.read(key, stride, 0, value.as_strided((value.numel(),), (1,)), value.dtype)
            else:
                value.copy_(self._weights.whole(key))

    def read_buffers(self, model: nn.Module) -> None:
        """Read all buffers that a state dict contains."""
        for name, buffer in persistent_buffers(model):
            self.read_whole(name, buffer)

    def mark(self, name: str) -> int:
        """A number that is the same on ranks that see the same file."""
        return self._weights.mark(self._matching.names[name])

    def close(self) -> None:
        """Close all files."""
        self._weights.close()


def open_together(world: World, path: str | os.PathLike[str]) -> Arriving:
    """Open weights on every rank; if that fails on any, raise CheckpointError on all."""
    found: list[Arriving] = []
    try:
        try_together(world, lambda: found.append(Arriving(open_weights(path))), f"the weights at {path} cannot be read")
    except BaseException:
        for arriving in found:
            arriving.close()
        raise
    return found[0]


def load_into_run(subject: Subject, path: str | os.PathLike[str], *, strict: bool) -> tuple[str, ...]:
    """Load weights into a sharded model. All ranks must call. Optimizer states stay as they are."""
    subject.finish_saving()
    arriving = open_together(subject.runtime.world.whole, path)
    elsewhere = subject.names_elsewhere()
    left_out: tuple[str, ...] = ()

    def fit() -> None:
        nonlocal left_out
        left_out = arriving.fit(subject.model, strict=strict, elsewhere=elsewhere)
        for unit in subject.runtime.units:
            for piece in Restoring.pieces(unit):
                arriving.verify(unit, piece)

    try:
        try_together(subject.everyone, fit, f"{path} was not loaded, and nothing was changed")
        Restoring(subject.runtime, subject.optimizer, arriving)(None)
        arriving.read_buffers(subject.model)
        return left_out
    finally:
        arriving.close()


def load_into_plain(model: nn.Module, path: str | os.PathLike[str], *, strict: bool) -> tuple[str, ...]:
    """Load weights into a model that is not sharded, tensor by tensor."""
    infos = list_params(model)
    for info in infos:
        if hasattr(info.param, "_shardwise"):
            raise ModelError(
                f"load_pretrained(): parameter {info.name!r} was built under sharded_init() and is not sharded yet. Build the "
                "model under sharded_init(weights=...), or call sw.shard() first."
            )
        if info.param.is_meta:
            raise ModelError(
                f"load_pretrained(): parameter {info.name!r} is on the meta device and has no memory. Build the model under "
                "sw.sharded_init(weights=...) instead."
            )
    try:
        arriving = Arriving(open_weights(path))
    except OSError as error:
        raise CheckpointError(f"the weights at {path} cannot be read: {error}.") from None
    try:
        left_out = arriving.fit(model, strict=strict)
        arriving.verify_all()
        for info in infos:
            arriving.read_whole(info.name, info.param)
        arriving.read_buffers(model)
        return left_out
    finally:
        arriving.close()
