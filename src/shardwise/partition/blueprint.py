"""Describes a Unit before it has memory: its layout, its dtypes, and where each of its vectors is kept.

Made once per Unit when a model is sharded or constructed. Transports reserve memory from it, the planner predicts from it, and
the Unit is built from it. Pure: no tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from shardwise.partition.layout import Layout

BUCKET_BYTES = 1 << 20
"""Neighbouring Units whose shards together are not larger than this are reduced in one exchange."""


@dataclasses.dataclass(frozen=True)
class UnitDtypes:
    """The dtypes of one Unit, resolved from the requested precision and the parameters' own dtype."""

    original: torch.dtype
    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    master: torch.dtype


class Span(NamedTuple):
    """The part of a flat vector that this rank updates."""

    start: int
    numel: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What was decided about one Unit."""

    index: int
    name: str
    path: str
    """Path of the module whose forward gathers it."""
    joined_paths: tuple[str, ...] = ()
    """If small Units were joined: the modules whose forward gathers it, instead of `path`."""
    layout: Layout
    rank: int
    """The number of this rank's slice of the flat vector."""
    dtypes: UnitDtypes
    device: torch.device
    is_trainable: bool
    is_always_full: bool
    """Whether parameters stay full between their uses (below stage 3)."""
    updates_full: bool = False
    """Whether this rank updates the full flat vector instead of its shard (stage 0)."""
    offloads_shard: bool = False
    """Whether the shard is offloaded, and on device only while borrowed."""
    offloads_master: bool = False
    """Whether masters are offloaded, in memory of their own."""
    shared_numel: int = 0
    """Elements of the largest parameter that several modules use."""
    tile_of: str = ""
    """The parameter of which this Unit is one tile. It is gathered by operations, not by modules, and one at a time."""
    adds_in_place: bool = False
    """Whether all but one of those modules only look rows up, so that their gradients are added in place."""

    @property
    def span(self) -> Span:
        """The part of the flat vector that this rank updates."""
        if self.updates_full:
            return Span(0, self.layout.numel)
        return Span(self.rank * self.layout.shard_numel, self.layout.shard_numel)

    @property
    def full_bytes(self) -> int:
        """Size of the full vector in bytes: its cost while gathered, unless it is an overlay."""
        return self.layout.numel * self.dtypes.compute.itemsize

    @property
    def is_narrow(self) -> bool:
        """Whether values are stored in another dtype than they are computed with."""
        return self.dtypes.stored != self.dtypes.compute

    @property
    def holds_alias(self) -> bool:
        """Whether the shard is this rank's slice of the full vector itself, so that it costs no bytes of its own."""
        return self.is_always_full and not self.is_narrow

    @property
    def has_own_master(self) -> bool:
        """Whether masters have memory of their own, besides the stored and the full parameters."""
        if not self.is_trainable:
            return False
        return self.offloads_master or needs_own_master(
            is_stored=self.dtypes.master == self.dtypes.stored,
            is_computed=not self.is_narrow,
            updates_shard=self.span.numel == self.layout.shard_numel,
        )

    @property
    def reserved_numel(self) -> int:
        """Elements that the transport reserves for this Unit: the full vector if the shard is a slice of it, else the shard."""
        return self.layout.numel if self.holds_alias else self.layout.shard_numel

    @property
    def can_overlay(self) -> bool:
        """Whether the full vector may be an overlay: a mapping over all ranks' shards."""
        return not self.is_always_full and not self.offloads_shard and not self.is_narrow


def needs_own_master(*, is_stored: bool, is_computed: bool, updates_shard: bool) -> bool:
    """Whether masters need memory of their own, because no stored or full vector of the span has the master dtype.

    `is_stored`: the master dtype is the stored one; `is_computed`: the stored dtype is the one computed with.
    """
    return not (is_stored and (updates_shard or is_computed))


def fill_buckets(shard_bytes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Group positions of Units into buckets: neighbours of the same kind (dtypes), as many as fit into BUCKET_BYTES."""
    buckets: list[list[int]] = []
    filled_bytes = BUCKET_BYTES
    for position, num_bytes in enumerate(shard_bytes):
        if filled_bytes + num_bytes > BUCKET_BYTES or kinds[buckets[-1][0]] != kinds[position]:
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(position)
        filled_bytes += num_bytes
    return buckets
