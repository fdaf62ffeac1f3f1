"""What can every transport do? Gather shards into a full vector, and reduce full gradients into a shard.

Called by the engine. A transport moves elements and counts them. It knows Units only as tags and never decides when to move.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.comm.beside import Beside
from shardwise.comm.watch import Watch
from shardwise.comm.world import World
from shardwise.errors import LifecycleError
from shardwise.ticket import Done, Ticket
from shardwise.tiers import FullBuffer, aligned_zeros

READY = Done()
"""Ticket of a shard that is in memory already."""


class Source(Protocol):
    """This rank's full gradient."""

    def __call__(self, start: int, out: torch.Tensor) -> None:
        """Write elements [start, start + len(out)) into `out`."""

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        """A view of the same elements, if they are contiguous in memory; else None."""


class Sink(Protocol):
    """Where this rank's shard of the summed gradient goes."""

    def place(self, start: int, numel: int) -> torch.Tensor | None:
        """Memory in which the sum of elements [start, start + numel) of the shard may be formed; None if there is none."""

    def __call__(self, start: int, total: torch.Tensor) -> None:
        """Receive the sum over ranks of elements [start, start + len(total)), once per element, in `place` or elsewhere."""


class PeerShards(Protocol):
    """Reads the shards of other ranks without their participation."""

    def __call__(self, tag: int, rank: int, place: torch.Tensor) -> None:
        """Fill `place`, that rank's slice of a full vector, with its shard of a Unit."""


@dataclasses.dataclass(frozen=True)
class Reservation:
    """Memory that a Unit needs: its shard, or (`is_full`) a full vector whose slice r is the shard of rank r."""

    tag: int
    name: str
    numel: int
    dtype: torch.dtype
    is_full: bool
    parameters: tuple[str, ...] = ()
    """Names of the Unit's parameters, for error messages."""
    is_offloaded: bool = False
    """The vector is offloaded, so no memory is allocated for it."""

    @property
    def memory_numel(self) -> int:
        """Number of elements to allocate."""
        return 0 if self.is_offloaded else self.numel

    def shard_numel(self, world_size: int) -> int:
        """Number of elements of one rank's shard."""
        return self.numel // world_size if self.is_full else self.numel


@dataclasses.dataclass
class Counters:
    """Calls, elements and bytes that this rank sent, per operation."""

    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    elements: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    """What names of operations begin with."""

    def under(self, prefix: str) -> Counters:
        """The same counters, for operations whose names begin with `prefix`."""
        return dataclasses.replace(self, prefix=prefix)

    def count(self, operation: str, elements: int, itemsize: int) -> None:
        """Add one operation that sent `elements` elements from this rank."""
        operation = self.prefix + operation
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self.elements[operation] = self.elements.get(operation, 0) + elements
        self.bytes[operation] = self.bytes.get(operation, 0) + elements * itemsize

    def total_elements(self) -> int:
        """Elements sent by all operations together."""
        return sum(self.elements.values())

    def reset(self) -> None:
        """Count from zero again."""
        self.calls.clear()
        self.elements.clear()
        self.bytes.clear()


class Transport(ABC):
    """Gather and reduce between the ranks of a world."""

    name: str
    gathers_ahead = False
    """Whether a gather runs in the background once it was started, so that it can be started early."""
    is_one_host = False
    """Whether all ranks are processes of one host, which can open each other's files."""

    def __init__(self, world: World, timeout_s: float) -> None:
        self.world = world
        self.counters = Counters()
        self.watch = Watch(world, timeout_s)
        self.reason = ""
        """Why 'auto' could not use shared memory, if it could not; else empty."""
        self.beside: Beside | None = None
        """The ranks with the other parts of the model; None if every rank has all of it."""

    def know(self, tag: int, name: str, parameters: Sequence[str]) -> None:
        """Set the names that error messages use for a Unit."""
        self.watch.know(tag, name, parameters)

    @property
    def inside(self) -> Transport:
        """The transport between the ranks that divide a flat vector among them: this one, unless there are replicas."""
        return self

    def reserve(self, reservations: Sequence[Reservation]) -> list[torch.Tensor]:
        """Allocate zeroed memory for the vectors that will be gathered, where this transport can reach it best."""
        return [aligned_zeros(entry.memory_numel, entry.dtype, self.world.device) for entry in reservations]

    def overlay(self, tag: int, memory: torch.Tensor) -> FullBuffer | None:
        """A full vector that maps the ranks' shards, so that gathering copies nothing; None if that is not possible."""
        return None

    def fence(self) -> None:  # noqa: B027  two-sided transports need none
        """Wait until no rank still reads shards (before they change) or still writes them (before they are read)."""

    def read_peers_with(self, reader: PeerShards) -> None:  # noqa: B027  only ranks of one host can
        """Let ranks gather different Units whose shards are on disk: each then reads the other ranks' shards with `reader`."""

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """All-reduce (sum or maximum) a small flat tensor; the result is bitwise the same on all ranks."""
        return self.world.all_reduce(values, op)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast a small flat tensor from rank 0."""
        return self.world.broadcast(values)

    @abstractmethod
    def gather(self, tag: int, shard: torch.Tensor, full: torch.Tensor, ready: Ticket = READY) -> Ticket:
        """Start filling `full` with every rank's shard; the shard must not change before the Ticket is waited for.

        The shard need not hold its values before `ready` has ended. `full` may have a wider dtype than `shard`: elements
        are sent in the dtype of the shard and converted on arrival.
        """

    @abstractmethod
    def reduce(self, tag: int, shard_numel: int, wire: torch.dtype, source: Source, sink: Sink) -> Ticket:
        """Start summing full gradients over ranks; `sink` receives this rank's slice, each element once.

        `source` and `sink` may be called from another thread, until the Ticket is waited for.
        """

    @property
    def exchange_bytes(self) -> int:
        """Bytes of exchange buffers this transport holds now."""
        return 0

    @property
    def planned_exchange_bytes(self) -> int:
        """Bytes of exchange buffers it will hold once it has reduced the reserved Units, all in one wire dtype."""
        return 0

    @property
    def allows_different_units(self) -> bool:
        """Whether ranks may gather different Units in the same forward pass."""
        return self.world.world_size == 1

    @property
    def note(self) -> str:
        """A line for the report; empty if there is nothing to say."""
        if self.allows_different_units:
            return ""
        return "all ranks must use the same Units in forward: a gather needs every rank on this transport"

    @property
    def label(self) -> str:
        """For the report: its name and, if there is one, the reason why it was chosen."""
        return f"{self.name} ({self.reason})" if self.reason else self.name

    def interrupt(self) -> None:
        """Make every wait for other ranks raise, because the script ends during an exchange."""
        self.watch.give_up()

    def close(self) -> None:  # noqa: B027  not every transport has threads
        """End threads and free buffers."""

    def _count_gather(self, shard: torch.Tensor) -> None:
        self.counters.count("gather", shard.numel() * (self.world.world_size - 1), shard.element_size())

    def _count_reduce(self, shard_numel: int, wire: torch.dtype) -> None:
        self.counters.count("reduce", shard_numel * (self.world.world_size - 1), wire.itemsize)


def own_slice(world: World, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    """The part of a full vector that belongs to `rank` (this one by default)."""
    numel = full.numel() // world.world_size
    at = world.rank if rank is None else rank
    return full[at * numel : (at + 1) * numel]


def copy_own(world: World, shard: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's shard into the full vector, unless it is there already."""
    mine = own_slice(world, full)
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard)


def combined(rows: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce `rows`, one per rank, in rank order."""
    if op == dist.ReduceOp.MAX:
        return rows.amax(dim=0)
    if op != dist.ReduceOp.SUM:
        raise LifecycleError(f"ranks agree by MAX and SUM, not by {op}: a broken invariant.")
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def sum_dtype(wire: torch.dtype) -> torch.dtype:
    """The dtype in which sums are formed: fp32, or the wire dtype if it is wider."""
    return torch.promote_types(torch.float32, wire)
