"""Chooses the transport: what the user named, or what suits the devices and the world."""

from __future__ import annotations

from shardwise.comm.alone import AloneTransport
from shardwise.comm.nccl import NcclTransport
from shardwise.comm.pairwise import PairwiseTransport
from shardwise.comm.reference import ReferenceTransport
from shardwise.comm.transport import Transport
from shardwise.comm.world import World
from shardwise.errors import ConfigError


def make_transport(name: str, world: World, exchange_bytes: int) -> Transport:
    """Build the transport called `name`; 'auto' picks by device and world size."""
    if world.world_size == 1:
        return AloneTransport(world, exchange_bytes)
    if name == "auto":
        name = "nccl" if world.backend == "nccl" else "pairwise"
    if name == "nccl":
        if world.backend != "nccl":
            raise ConfigError(f"transport='nccl' needs an NCCL process group; this one is {world.backend}.")
        return NcclTransport(world)
    if world.device.type != "cpu":
        raise ConfigError(f"transport={name!r} moves CPU memory; parameters are on {world.device}. Use 'nccl'.")
    if name == "reference":
        return ReferenceTransport(world)
    return PairwiseTransport(world, exchange_bytes)
