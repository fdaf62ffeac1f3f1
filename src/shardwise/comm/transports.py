"""Chooses the transport: what the user named, or what suits the devices and the world."""

from __future__ import annotations

import platform

from shardwise.comm.alone import AloneTransport
from shardwise.comm.nccl import NcclTransport
from shardwise.comm.pairwise import PairwiseTransport
from shardwise.comm.reference import ReferenceTransport
from shardwise.comm.segment import host_identity
from shardwise.comm.shared import SharedTransport
from shardwise.comm.transport import Transport
from shardwise.comm.world import World
from shardwise.errors import ConfigError


def make_transport(name: str, world: World, exchange_bytes: int, timeout_s: float) -> Transport:
    """Build the transport called `name`; 'auto' picks by device, hosts and world size."""
    if world.world_size == 1:
        return AloneTransport(world, exchange_bytes)
    if name == "auto":
        name = _suitable(world)
    if name == "nccl":
        if world.backend != "nccl":
            raise ConfigError(f"transport='nccl' needs an NCCL process group; this one is {world.backend}.")
        return NcclTransport(world)
    if world.device.type != "cpu":
        raise ConfigError(f"transport={name!r} moves CPU memory; parameters are on {world.device}. Use 'nccl'.")
    if name == "shared":
        reason = _why_not_shared(world)
        if reason is not None:
            raise ConfigError(f"transport='shared' is not possible: {reason}. Use 'pairwise'.")
        return SharedTransport(world, exchange_bytes, timeout_s)
    if name == "reference":
        return ReferenceTransport(world)
    return PairwiseTransport(world, exchange_bytes)


def _suitable(world: World) -> str:
    if world.backend == "nccl":
        return "nccl"
    return "pairwise" if _why_not_shared(world) is not None else "shared"


def _why_not_shared(world: World) -> str | None:
    """The reason why ranks cannot share memory, the same on every rank; None if they can."""
    mine = (host_identity(), platform.machine())
    everyone = world.gather_objects(mine)
    if any(identity != everyone[0][0] for identity, _ in everyone):
        return "the ranks are on several hosts or in several process namespaces"
    if any(machine not in ("x86_64", "AMD64") for _, machine in everyone):
        return f"its ordering of memory accesses is only relied on for x86-64, this is {mine[1]}"
    return None
