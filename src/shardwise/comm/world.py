"""The ranks that train together, on `torch.distributed` and `DeviceMesh`. One rank without a process group is a World too."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.meshes import Blocks, check_alike, dimensions
from shardwise.comm.notices import exchange_notices
from shardwise.errors import ConfigError, TransportError

_HEAD = 8
_SMALL_BYTES = 4096
_parts: dict[tuple[int, ...], tuple[Any, dist.ProcessGroup]] = {}  # (WORLD, group) by global ranks


class Axis(NamedTuple):
    """One way to see the ranks: this rank's index along the axis, and how many ranks are on it."""

    rank: int
    size: int


_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[_Result]):
    """What an attempt of all ranks came to."""

    results: Sequence[_Result | None]
    problems: Mapping[int, str]
    """The texts of the errors, by rank; empty if all succeeded."""
    problem: Exception | None
    """This rank's own error."""

    @property
    def first(self) -> tuple[int, str] | None:
        """The first rank with an error, and its text; None if all succeeded."""
        return next(iter(self.problems.items()), None)


class World:
    """Rank, size, device, and the small collectives the library needs outside the hot path.

    These are the ranks that train the same part of the model on different data. Three axes: `shard`, the ranks that divide a flat
    vector among them; `replicate`, those that hold the same shard; `everyone`, all of them. Layouts and norms use `shard`,
    averages and agreements use `everyone`. Without a mesh of several dimensions every rank is on the shard axis.

    If the model is divided by tensor or pipeline parallelism there is a fourth axis, `model`: the ranks that hold its other parts
    at the same place of their Worlds. Norms and checkpoints need them.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self.rank = mesh.get_local_rank() if mesh is not None else 0
        self.world_size = mesh.size() if mesh is not None else 1
        self.group: dist.ProcessGroup | None = mesh.get_group() if mesh is not None else None
        self.limit_s = 600.0
        """How long a small collective waits for a rank that does not come."""
        self.threads = ""
        """For the report: how many threads this rank computes with, and why; empty if that was not checked."""
        self.ranks = list(range(self.world_size))
        """The ranks' numbers in the world that this one is a part of, or in itself."""
        self.labels = list(self.ranks)
        """The ranks' numbers in error messages: those of the run's whole world."""
        self.company = list(self.ranks)
        """The numbers in error messages of all ranks of the run."""
        self.inside = self
        """The ranks of the shard axis that this rank is on."""
        self.roles: Mapping[str, str] | None = None
        """What the user said that the dimensions of the mesh are for."""
        self.replicas = [list(self.ranks)]
        """The ranks of each replica, in the order of their shards."""
        self.across: World | None = None
        """The ranks of the replicate axis that this rank is on; None if every rank holds another shard."""
        self.whole = self
        """All ranks of the run."""
        self.beside: World | None = None
        """The ranks of the model axis that this rank is on; None if every rank has the whole model."""
        self.tensor: World | None = None
        """Those of them on this rank's dimension of tensor parallelism, if there is one."""
        self.pipe: World | None = None
        """Those of them on this rank's dimension of pipeline parallelism, if there is one."""

    @staticmethod
    def of(mesh: DeviceMesh | None, device: torch.device, roles: Mapping[str, str] | None = None) -> World:
        """The World of a mesh or, without one, of all ranks that torchrun started (one rank without torchrun).

        `roles`: the role ('shard' or 'replicate') of each dimension of the mesh; by default its name.
        """
        if mesh is not None:
            named = dimensions(mesh, roles)
            check_alike(mesh, named)
            world = World(mesh, device) if named is None else World._with_roles(mesh, named, device)
            world.roles = roles
            return world
        if roles is not None:
            raise ConfigError("mesh_roles= says what the dimensions of mesh= are for, and no mesh was given.")
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return World(None, device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return World(init_device_mesh(device.type, (dist.get_world_size(),)), device)

    @staticmethod
    def _with_roles(mesh: DeviceMesh, named: Mapping[str, str], device: torch.device) -> World:
        """The World of a mesh with several dimensions."""
        blocks = Blocks.of(mesh, named)
        pipe, tensor, replicate, shard = blocks.place_of(dist.get_rank())
        members = sorted(blocks.by_role.flatten().tolist())
        data = blocks.by_role[pipe, tensor]
        world = _among(sorted(data.flatten().tolist()), members, device)
        world.mesh = mesh
        if "replicate" in named:
            world.replicas = [[world.labels.index(members.index(rank)) for rank in row] for row in data.tolist()]
            world.inside = _among(data[replicate].tolist(), members, device, mesh.get_group(named["shard"]))
            world.across = _among(data[:, shard].tolist(), members, device, mesh.get_group(named["replicate"]))
        peers = blocks.by_role[:, :, replicate, shard]
        if peers.numel() > 1:
            world.whole = _among(members, members, device)
            world.beside = _among(sorted(peers.flatten().tolist()), members, device)
        if "tensor" in named:
            world.tensor = _among(peers[pipe].tolist(), members, device, mesh.get_group(named["tensor"]))
        if "pipe" in named:
            world.pipe = _among(peers[:, tensor].tolist(), members, device, mesh.get_group(named["pipe"]))
        return world

    @property
    def everyone(self) -> Axis:
        """All ranks: gradients are averaged over them, and they make decisions together."""
        return Axis(self.rank, self.world_size)

    @property
    def shard(self) -> Axis:
        """The ranks that divide a flat vector among them."""
        return Axis(self.inside.rank, self.inside.world_size)

    @property
    def replicate(self) -> Axis:
        """The ranks that hold the same shard."""
        return Axis(0, 1) if self.across is None else Axis(self.across.rank, self.across.world_size)

    @property
    def model(self) -> Axis:
        """The ranks that hold the parts of the model."""
        return Axis(0, 1) if self.beside is None else Axis(self.beside.rank, self.beside.world_size)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of those that train the same blocks: of the run, or of a pipeline stage."""
        return self.rank == 0 and (self.tensor is None or self.tensor.rank == 0)

    @property
    def label(self) -> int:
        """This rank's number among all of the run; error messages name ranks by it."""
        return self.labels[self.rank]

    @property
    def backend(self) -> str:
        """The backend behind the group, or 'none' in a world of one without a group."""
        return "none" if self.group is None else dist.get_backend(self.group)

    def new_group(self) -> dist.ProcessGroup | None:
        """Make another process group over the same ranks, for the operations of another thread."""
        if self.group is None:
            return None
        group: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(self.group), use_local_synchronization=True)
        return group

    def twin(self) -> World:
        """The same ranks with a group of their own for small values in host memory, for another thread. All ranks must call."""
        twin = copy.copy(self)
        twin.device = torch.device("cpu")
        if self.group is not None:
            ranks = dist.get_process_group_ranks(self.group)
            twin.group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return twin

    def part(self, ranks: list[int]) -> World:
        """The World of some of these ranks. Each of them must call this, with the same `ranks`."""
        assert self.group is not None
        everyone = dist.get_process_group_ranks(self.group)
        part = World(None, self.device)
        part.group = _group_of(tuple(everyone[rank] for rank in ranks))
        part.ranks = [self.ranks[rank] for rank in ranks]
        part.labels, part.company = [self.labels[rank] for rank in ranks], self.company
        part.rank, part.world_size = ranks.index(self.rank), len(ranks)
        return part

    def peers(self) -> Iterator[int]:
        """Every other rank, starting with the next one, so that ranks do not all begin with the same peer."""
        return ((self.rank + step) % self.world_size for step in range(1, self.world_size))

    def limit(self, limit_s: float) -> None:
        """Set `limit_s` of this World and of those that belong to it."""
        for world in (self, self.inside, self.across, self.whole, self.beside, self.tensor, self.pipe):
            if world is not None:
                world.limit_s = limit_s

    def patient(self, further_s: float) -> World:
        """The same ranks, with a longer limit: for meetings after work that takes ranks differently long."""
        found = copy.copy(self)
        found.limit_s += further_s
        return found

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """All-reduce a small tensor over all ranks, in place."""
        if self.world_size > 1:
            self._wait(dist.all_reduce(values, op=op, group=self.group, async_op=True))
        return values

    def broadcast(self, values: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Broadcast `values` from rank `source`, in place."""
        if self.world_size > 1:
            self._wait(dist.broadcast(values, group_src=source, group=self.group, async_op=True))
        return values

    def try_together(self, attempt: Callable[[], _Result], *errors: type[Exception]) -> Outcome[_Result]:
        """Run `attempt` on every rank; no rank goes on before all know where it raised one of `errors`."""
        result, problem = None, None
        try:
            result = attempt()
        except errors as error:
            problem = error
        everyone = self.gather_objects((result, None if problem is None else str(problem)))
        return Outcome(
            [theirs for theirs, _ in everyone], {r: text for r, (_, text) in enumerate(everyone) if text is not None}, problem
        )

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. For set-up only."""
        if self.world_size == 1:
            return [value]
        # torch's own all_gather_object needs numpy and always two collectives; here small values need one.
        data = pickle.dumps(value)
        framed = len(data).to_bytes(_HEAD, "little") + data
        rows = self._gather_bytes(framed, _SMALL_BYTES)
        lengths = [_HEAD + int.from_bytes(row[:_HEAD], "little") for row in rows]
        if max(lengths) > _SMALL_BYTES:
            rows = self._gather_bytes(framed, max(lengths))
        return [pickle.loads(row[_HEAD:length]) for row, length in zip(rows, lengths, strict=True)]

    def _wait(self, work: Any) -> None:
        """Wait for a collective; if a rank does not come in time or is gone, raise an error that names those that are silent."""
        if self.backend == "nccl":
            work.wait()
            return
        begin = time.monotonic()
        try:
            work.wait(timedelta(seconds=self.limit_s))
        except RuntimeError as error:
            waited_s = time.monotonic() - begin
            is_late = waited_s >= 0.95 * self.limit_s
            cause = f"longer than {self.limit_s:g} s" if is_late else str(error).partition("\n")[0].partition(". ")[0]
            text = f"rank {self.label} waited {waited_s:.1f} s for the other ranks in a meeting outside any step: {cause}."
            others = exchange_notices(f"meeting-{self.labels}", self.label, self.company, text)
            raise TransportError(" ".join([text, *others])) from None

    def _gather_bytes(self, data: bytes, room: int) -> list[bytes]:
        """The first `room` bytes of every rank's data, padded with zeros."""
        mine = torch.frombuffer(bytearray(data[:room].ljust(room, b"\0")), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._wait(dist.all_gather(parts, mine, group=self.group, async_op=True))
        return [ctypes.string_at(part.cpu().data_ptr(), room) for part in parts]


def _among(ranks: Sequence[int], members: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None) -> World:
    """The World of some global ranks among all `members` of the run; each of them must call this."""
    found = World(None, device)
    found.group = group or _group_of(tuple(ranks))
    found.rank, found.world_size = ranks.index(dist.get_rank()), len(ranks)
    found.ranks = list(range(len(ranks)))
    found.replicas = [list(found.ranks)]
    found.labels = [members.index(rank) for rank in ranks]
    found.company = list(range(len(members)))
    return found


def _group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    """A process group over these global ranks. Each of them must call this."""
    if members == tuple(range(dist.get_world_size())):
        return dist.group.WORLD  # type: ignore[return-value]  # it is there: this rank is in it
    if members not in _parts or _parts[members][0] is not dist.group.WORLD:
        # Cached: torch keeps the group anyway, and the next run on the same ranks uses it again.
        _parts[members] = (dist.group.WORLD, dist.new_group(list(members), use_local_synchronization=True))
    return _parts[members][1]
