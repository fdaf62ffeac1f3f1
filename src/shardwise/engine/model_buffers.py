"""Broadcasts the model's buffers (running statistics, codebooks) from rank 0, as DistributedDataParallel does.

Called by the runtime. Changes are looked for at the end of a backward, where ranks exchange flags anyway; only buffers that some
rank has changed are broadcast. Ranks check again before a training forward, because another forward or user code may have changed
buffers since.
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
    """The buffers of one model, and their checksums when they were last equal on all ranks."""

    def __init__(self, model: nn.Module, world: World, *, is_local: bool) -> None:
        self._model = model
        self._modules: list[tuple[str, nn.Module, tuple[nn.Module | None, ...]]] = []  # path, module, its children
        self._world = world
        self._is_idle = is_local or world.world_size == 1
        self._marks: dict[str, int] = {}
        self._keys: list[str] = []
        if not self._is_idle:
            self._remember(dict(self._each()))

    def _each(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Walking the tree anew in every step would cost more than all buffers of most models: look whether it has changed.
        if not self._modules or any(tuple(module._modules.values()) != children for _, module, children in self._modules):
            self._modules = [(path, m, tuple(m._modules.values())) for path, m in self._model.named_modules()]
        seen: set[int] = set()
        for path, module, _ in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen and buffer.numel() and not buffer.is_meta:
                    seen.add(id(buffer))
                    yield f"{path}.{name}" if path else name, buffer

    def _remember(self, buffers: dict[str, torch.Tensor]) -> None:
        self._keys = list(buffers)
        self._marks = {name: _mark(buffer) for name, buffer in buffers.items()}

    def changed(self) -> list[bool]:
        """Which of the known buffers this rank has changed since they were last equal on all ranks."""
        if self._is_idle:
            return []
        now = dict(self._each())
        return [name not in now or _mark(now[name]) != self._marks[name] for name in self._keys]

    def before_forward(self, transport: Transport) -> None:
        """Before a training forward of the model: broadcast the buffers that any rank has changed since the last backward."""
        if self._is_idle or not self._keys or not (torch.is_grad_enabled() and self._model.training):
            return
        flags = torch.tensor(self.changed(), dtype=torch.uint8, device=self._world.device)
        found = transport.all_reduce(flags, dist.ReduceOp.MAX).tolist()
        if any(found):
            self.broadcast(transport, [bool(flag) for flag in found], tells_autograd=True)

    def broadcast(self, transport: Transport, chosen: Sequence[bool], *, tells_autograd: bool = False) -> None:
        """Broadcast rank 0's values of the chosen buffers.

        `tells_autograd`: count a new version, so that autograd raises if a graph has saved the old values, as under
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
    """Broadcast rank 0's buffers before training."""
    for buffer in model.buffers():
        if world.world_size > 1 and buffer.numel() and not buffer.is_meta:
            values = _bytes_of(buffer)
            _fill(buffer, world.broadcast(values))


def _mark(buffer: torch.Tensor) -> int:
    """A checksum of the values: versions do not suffice, because kernels update running statistics without counting one."""
    return checksum(_memory_of(buffer))


def _memory_of(buffer: torch.Tensor) -> torch.Tensor:
    """The elements that a buffer has in memory: one along an expanded dimension."""
    data = buffer.detach()
    for dim, (size, stride) in enumerate(zip(data.shape, data.stride(), strict=True)):
        if size > 1 and stride == 0:
            data = data.narrow(dim, 0, 1)
    return data


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """A copy as bytes, because transports do not support every dtype."""
    return _memory_of(buffer).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _fill(buffer: torch.Tensor, values: torch.Tensor, *, tells_autograd: bool = False) -> None:
    memory = _memory_of(buffer)
    values = values.clone().view(memory.dtype).view(memory.shape)  # cloned, as a slice may not be aligned for the dtype
    with torch.no_grad():
        (memory if tells_autograd else memory.data).copy_(values)
