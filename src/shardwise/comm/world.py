"""The ranks that train together, on `torch.distributed` and `DeviceMesh`. A world of one is an ordinary world."""

from __future__ import annotations

import ctypes
import os
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import ConfigError

_HEAD = 8
_SMALL_BYTES = 4096
_parts: dict[tuple[int, ...], tuple[Any, dist.ProcessGroup]] = {}  # by global ranks, of one launch


class Axis(NamedTuple):
    """One way to see the ranks: this rank's place along it, and how many there are."""

    rank: int
    size: int


class World:
    """Rank, size, device, and the small collectives the library needs outside the hot path.

    Three axes: `shard`, the ranks that divide a flat vector among them; `replicate`, those that hold the same shard; `everyone`,
    all of them. Layouts and norms go by `shard`, averages and agreement by `everyone`. Today every rank is on the shard axis.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self.rank = mesh.get_local_rank() if mesh is not None else 0
        self.world_size = mesh.size() if mesh is not None else 1
        self.group: dist.ProcessGroup | None = mesh.get_group() if mesh is not None else None
        self.threads = ""
        """How many threads this rank computes with, and why; empty if nobody has looked."""
        self.ranks = list(range(self.world_size))
        """These ranks, as messages call them: a part of a world keeps the numbers of the whole."""

    @staticmethod
    def of(mesh: DeviceMesh | None, device: torch.device) -> World:
        """The mesh given, or all ranks of this launch: torchrun's environment, or a world of one without it."""
        if mesh is not None:
            if mesh.ndim != 1:
                raise ConfigError(f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; pass one of them, such as mesh['dp'].")
            return World(mesh, device)
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return World(None, device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return World(init_device_mesh(device.type, (dist.get_world_size(),)), device)

    @property
    def everyone(self) -> Axis:
        """All ranks: gradients are averaged over them, and agreements are theirs."""
        return Axis(self.rank, self.world_size)

    @property
    def shard(self) -> Axis:
        """The ranks that divide a flat vector among them."""
        return Axis(self.rank, self.world_size)

    @property
    def replicate(self) -> Axis:
        """The ranks that hold the same shard."""
        return Axis(0, 1)

    @property
    def backend(self) -> str:
        """The backend behind the group, or 'none' in a world of one without a group."""
        return "none" if self.group is None else dist.get_backend(self.group)

    def new_group(self) -> dist.ProcessGroup | None:
        """A further group over the same ranks, so that another thread's operations cannot interleave."""
        if self.group is None:
            return None
        group: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(self.group), use_local_synchronization=True)
        return group

    def part(self, ranks: list[int]) -> World:
        """The world of some of these ranks; all of them must ask, each for a part that it is in."""
        assert self.group is not None
        everyone = dist.get_process_group_ranks(self.group)
        part = World(None, self.device)
        members = tuple(everyone[rank] for rank in ranks)
        if members not in _parts or _parts[members][0] is not dist.group.WORLD:
            # Kept: torch would keep it anyway, and the same hosts come again with the next run.
            _parts[members] = (dist.group.WORLD, dist.new_group(list(members), use_local_synchronization=True))
        part.group = _parts[members][1]
        part.ranks = [self.ranks[rank] for rank in ranks]
        part.rank, part.world_size = ranks.index(self.rank), len(ranks)
        return part

    def peers(self) -> Iterator[int]:
        """Every other rank, starting with the next one, so that no rank is asked by all at once."""
        return ((self.rank + step) % self.world_size for step in range(1, self.world_size))

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Combine a small tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def broadcast(self, values: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite `values` with those of rank `source`."""
        if self.world_size > 1:
            dist.broadcast(values, group_src=source, group=self.group)
        return values

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. Set-up only."""
        if self.world_size == 1:
            return [value]
        # torch's own all_gather_object needs numpy, and always two rounds; most values are small.
        data = pickle.dumps(value)
        framed = len(data).to_bytes(_HEAD, "little") + data
        rows = self._gather_bytes(framed, _SMALL_BYTES)
        lengths = [_HEAD + int.from_bytes(row[:_HEAD], "little") for row in rows]
        if max(lengths) > _SMALL_BYTES:
            rows = self._gather_bytes(framed, max(lengths))
        return [pickle.loads(row[_HEAD:length]) for row, length in zip(rows, lengths, strict=True)]

    def _gather_bytes(self, data: bytes, room: int) -> list[bytes]:
        """The first `room` bytes of every rank's data, filled up with zeros."""
        mine = torch.frombuffer(bytearray(data[:room].ljust(room, b"\0")), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self.group)
        return [ctypes.string_at(part.cpu().data_ptr(), room) for part in parts]
