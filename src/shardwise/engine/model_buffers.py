"""The model's buffers (running statistics, codebooks): every rank goes on with rank 0's, as under DistributedDataParallel.

Called by the runtime. Changes are noticed when a backward ends, where all ranks agree on many small things anyway; buffers
that no rank has changed are not moved. Before a training forward ranks ask each other once more, because another forward or
user code may have changed some since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm import Transport, World
from shardwise.tiers import checksum

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class ModelBuffers:
    """The buffers of one model, and what they were when ranks last had the same."""

    def __init__(self, model: nn.Module, world: World, *, is_local: bool) -> None:
        self._model = model
        self._modules = list(model.named_modules())  # walked in every step; those added later have buffers of their own rank
        self._world = world
        self._is_idle = is_local or world.world_size == 1
        self._marks: dict[str, int] = {}
        self._keys: list[str] = []
        if not self._is_idle:
            self._remember(dict(self._each()))

    def _each(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for path, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen and buffer.numel() and not buffer.is_meta:
                    seen.add(id(buffer))
                    yield f"{path}.{name}" if path else name, buffer

    def _remember(self, buffers: dict[str, torch.Tensor]) -> None:
        self._keys = list(buffers)
        self._marks = {name: _mark(buffer) for name, buffer in buffers.items()}

    def changed(self) -> list[bool]:
        """Which buffers this rank has changed since ranks had the same; always as long as when that was."""
        if self._is_idle:
            return []
        now = dict(self._each())
        return [name not in now or _mark(now[name]) != self._marks[name] for name in self._keys]

    def before_forward(self, transport: Transport) -> None:
        """A training forward of the whole model begins: whatever any rank has changed since the last backward is agreed on."""
        if self._is_idle or not self._keys or not (torch.is_grad_enabled() and self._model.training):
            return
        flags = torch.tensor(self.changed(), dtype=torch.uint8, device=self._world.device)
        found = transport.all_reduce(flags, dist.ReduceOp.MAX).tolist()
        if any(found):
            self.broadcast(transport, [bool(flag) for flag in found], tells_autograd=True)

    def broadcast(self, transport: Transport, chosen: Sequence[bool], *, tells_autograd: bool = False) -> None:
        """Every rank takes rank 0's values of the chosen buffers.

        `tells_autograd`: a graph that has yet to be run backward may have saved them, and autograd must notice, as under
        DistributedDataParallel. Not for running statistics: backward does not read them in training.
        """
        if self._is_idle:
            return
        now = dict(self._each())
        names = [name for name, is_chosen in zip(self._keys, chosen, strict=True) if is_chosen and name in now]
        if names:
            parts = [_bytes_of(now[name]) for name in names]
            whole = transport.broadcast(torch.cat(parts))
            for name, part in zip(names, whole.split([part.numel() for part in parts]), strict=True):
                _fill(now[name], part, tells_autograd=tells_autograd and not name.endswith(_STATISTICS))
        if list(now) != self._keys or names:
            self._remember(now)


def broadcast_from_first(model: nn.Module, world: World) -> None:
    """Before training: every rank starts with rank 0's buffers."""
    for buffer in model.buffers():
        if world.world_size > 1 and buffer.numel() and not buffer.is_meta:
            values = _bytes_of(buffer)
            _fill(buffer, world.broadcast(values))


def _mark(buffer: torch.Tensor) -> int:
    """Changes when the values do. Statistics are updated by kernels that do not count versions, so it is the values
    themselves.
    """
    return checksum(_memory_of(buffer))


def _memory_of(buffer: torch.Tensor) -> torch.Tensor:
    """The elements a buffer really has: of an expanded dimension, one."""
    data = buffer.detach()
    for dim, (size, stride) in enumerate(zip(data.shape, data.stride(), strict=True)):
        if size > 1 and stride == 0:
            data = data.narrow(dim, 0, 1)
    return data


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """A copy, as bytes: transports do not know every dtype."""
    return _memory_of(buffer).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _fill(buffer: torch.Tensor, values: torch.Tensor, *, tells_autograd: bool = False) -> None:
    memory = _memory_of(buffer)
    values = values.clone().view(memory.dtype).view(memory.shape)  # a part of a longer vector need not be aligned
    with torch.no_grad():
        (memory if tells_autograd else memory.data).copy_(values)
