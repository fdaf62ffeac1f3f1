"""Which transport is used? The one that the user named, or the best one for the devices and hosts."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from shardwise.comm.alone import AloneTransport
from shardwise.comm.beside import Beside
from shardwise.comm.combined import CombinedTransport
from shardwise.comm.nccl import NcclTransport, ReplicatedNcclTransport
from shardwise.comm.pairwise import PairwiseTransport
from shardwise.comm.reference import ReferenceTransport
from shardwise.comm.replicated import ReplicatedTransport
from shardwise.comm.segment import host_identity
from shardwise.comm.shared import SharedTransport
from shardwise.comm.transport import Reservation, Transport
from shardwise.comm.world import World
from shardwise.errors import ConfigError, SharedMemoryError


def make_transport(
    name: str, world: World, reservations: Sequence[Reservation], exchange_bytes: int, timeout_s: float
) -> tuple[Transport, list[torch.Tensor]]:
    """Build the transport called `name` and the memory it reserves; 'auto' picks by device, hosts, memory and world size."""
    is_auto, reason = name == "auto", ""
    if is_auto:
        name, reason = ("nccl", "") if world.backend == "nccl" and world.across is not None else _suitable(world.inside)
    if world.across is not None:
        exchange_bytes //= 3  # inside, across, and for sums on their way between the two
        if len(set(world.gather_objects((name, _chunk_form(name, world.inside))))) > 1:
            # Chunks are summed across as they are summed inside, so replicas must cut alike.
            name, reason = "pairwise", "replicas would use different transports"
    made: list[tuple[Transport, list[torch.Tensor]]] = []

    def make(name: str) -> None:
        if name == "nccl" and world.across is not None:
            transport: Transport = ReplicatedNcclTransport(world, timeout_s)
        else:
            transport = _build(name, world.inside, exchange_bytes, timeout_s)
        made.append((transport, transport.reserve(reservations)))

    if name in ("shared", "combined"):  # it may fail on one host only: all ranks must know
        failed = world.try_together(lambda: make(name), SharedMemoryError).first
        if failed is not None and not is_auto:
            raise SharedMemoryError(failed[1])
        if failed is not None:
            reason = f"no shared memory: {failed[1].partition('. ')[0]}"
            while made:
                made.pop()[0].close()
            name = "pairwise"
            make(name)
    else:
        make(name)
    transport, memory = made[-1]
    if world.across is not None and name != "nccl":
        transport = ReplicatedTransport(world, transport, _build_across(name, world, exchange_bytes, timeout_s), exchange_bytes)
    transport.reason = reason
    if world.beside is not None:
        transport.beside = Beside(world.beside, transport.watch)
    for entry in reservations:
        transport.know(entry.tag, entry.name, entry.parameters)
    return transport, memory


def _chunk_form(name: str, inside: World) -> tuple[int, ...]:
    """What the length of chunks depends on, besides the number of ranks."""
    return tuple(len(ranks) for ranks in _hosts(inside)) if name == "combined" else ()


def _build_across(name: str, world: World, exchange_bytes: int, timeout_s: float) -> Transport:
    """The transport between replicas: shared memory if all are on one host and use it inside, else messages."""
    across = world.across
    assert across is not None
    if across.world_size == 1:
        return _build("pairwise", across, exchange_bytes, timeout_s)
    made: list[Transport] = []
    wants_shared = name not in ("pairwise", "reference", "nccl") and _suitable(across)[0] == "shared"
    if all(world.gather_objects(wants_shared)):
        attempt = lambda: made.append(_build("shared", across, exchange_bytes, timeout_s))  # noqa: E731
        if world.try_together(attempt, SharedMemoryError).first is None:
            return made[0]
        while made:
            made.pop().close()
    return _build("reference" if name == "reference" else "pairwise", across, exchange_bytes, timeout_s)


def _build(name: str, world: World, exchange_bytes: int, timeout_s: float) -> Transport:
    if world.world_size == 1:
        return AloneTransport(world, exchange_bytes, timeout_s)
    if name == "nccl":
        if world.backend != "nccl":
            raise ConfigError(f"transport='nccl' needs an NCCL process group; this one is {world.backend}.")
        return NcclTransport(world, timeout_s)
    if world.device.type != "cpu":
        raise ConfigError(f"transport={name!r} moves CPU memory; parameters are on {world.device}. Use 'nccl'.")
    if name in ("shared", "combined"):
        hosts = _hosts(world)
        reason = _why_no_shared_memory(name, hosts)
        if reason is not None:
            raise ConfigError(f"transport={name!r} is not possible: {reason}. Use 'pairwise'.")
        if name == "shared":
            return SharedTransport(world, exchange_bytes, timeout_s)
        return CombinedTransport(world, hosts, exchange_bytes, timeout_s)
    if name == "reference":
        return ReferenceTransport(world, timeout_s)
    return PairwiseTransport(world, exchange_bytes, timeout_s)


def _suitable(world: World) -> tuple[str, str]:
    """The best possible transport, and why it is not shared memory, if it is not; the same on every rank."""
    if world.world_size == 1:
        return "alone", ""
    if world.backend == "nccl":
        return "nccl", ""
    hosts = _hosts(world)
    name = "shared" if len(hosts) == 1 else "combined"
    reason = _why_no_shared_memory(name, hosts)
    return (name, "") if reason is None else ("pairwise", reason)


def _hosts(world: World) -> list[list[int]]:
    """The ranks of each host, hosts in order of their first rank; empty if a CPU is not x86-64 (it may reorder stores)."""
    everyone = world.gather_objects((host_identity(), platform.machine()))
    if any(machine not in ("x86_64", "AMD64") for _, machine in everyone):
        return []
    hosts: dict[tuple[str, int, int], list[int]] = {}
    for rank, (identity, _) in enumerate(everyone):
        hosts.setdefault(identity, []).append(rank)
    return list(hosts.values())


def _why_no_shared_memory(name: str, hosts: list[list[int]]) -> str | None:
    if not hosts:
        return "ranks share memory on x86-64 only, whose ordering of memory accesses they rely on"
    if name == "shared":
        return None if len(hosts) == 1 else "the ranks are on several hosts or in several process or network namespaces"
    sizes = sorted({len(ranks) for ranks in hosts})
    if len(hosts) == 1:
        return "all ranks are on one host"
    if sizes == [1]:
        return "every host has one rank"
    return None if len(sizes) == 1 else f"hosts have different numbers of ranks ({', '.join(map(str, sizes))})"
