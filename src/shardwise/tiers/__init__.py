"""Where do bytes live?

Public names: `Ledger`, `Kind`, `Tier` (bytes per tier and kind, now and at peak); `FullBuffer`, `FixedBuffer`,
`OverlaidBuffer`, `make_full_buffer`, `own_storage` (the memory of a gathered Unit), `SparePages` (what a freed Unit leaves
to the next);
`DiskFile` (one rank's file, read and written in the background by the engine of `io`); `Shelf` (one kind of state of many Units
away from the device: `HostShelf`, `DiskShelf`); `Mover` (copies between host and device, and the `Buffers` that everything
passes through); `Heap` (freed memory that is returned); `checksum`.

Invariants: a FullBuffer keeps one storage object for life, so views saved by autograd are right again after the
next gather; giving its pages back is exact, so resident memory is what the ledger says. What moves to and from disk passes
through few buffers, whatever the model's size.
"""

from shardwise.tiers.buffers import Buffer, Buffers
from shardwise.tiers.checksum import checksum
from shardwise.tiers.disk import ALIGNMENT, DiskFile, aligned_memory
from shardwise.tiers.extents import Extents
from shardwise.tiers.heap import Heap
from shardwise.tiers.ledger import Kind, Ledger, Tier, device_tier
from shardwise.tiers.memory import FixedBuffer, FullBuffer, OverlaidBuffer, make_full_buffer, own_storage
from shardwise.tiers.mover import Mover
from shardwise.tiers.pages import SparePages
from shardwise.tiers.shelf import QUANTUM, DiskShelf, HostShelf, Shelf, is_aligned, whole_quanta

__all__ = [
    "ALIGNMENT",
    "QUANTUM",
    "Buffer",
    "Buffers",
    "DiskFile",
    "DiskShelf",
    "Extents",
    "FixedBuffer",
    "FullBuffer",
    "Heap",
    "HostShelf",
    "Kind",
    "Ledger",
    "Mover",
    "OverlaidBuffer",
    "Shelf",
    "SparePages",
    "Tier",
    "aligned_memory",
    "checksum",
    "device_tier",
    "is_aligned",
    "make_full_buffer",
    "own_storage",
    "whole_quanta",
]
