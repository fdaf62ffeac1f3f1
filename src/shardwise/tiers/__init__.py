"""Where do bytes live?

Public names: `Ledger`, `Kind`, `Tier`, `device_tier` (bytes per tier and kind, now and at peak); `HeldStorages`, `Hold` (storages
that are held for backward, each counted once), `own_part` (what wrappers hold); `FullBuffer`, `FixedBuffer`,
`OverlaidBuffer`, `can_tell_own_pages`, `make_full_buffer`, `own_storage` (the memory of a gathered Unit), `SparePages` (pages
that a freed Unit leaves for the next gather); `DiskFile`, `ALIGNMENT`, `aligned`, `aligned_memory`, `aligned_zeros`,
`make_direct`, `reads_direct` (one rank's file, read and written in the background by the engine of `io`); `Shelf`, `HostShelf`,
`DiskShelf`, `QUANTUM`, `whole_quanta`, `is_aligned` (offloaded states of one kind of many Units); `Mover` (copies between host
and device), `Buffer`, `Buffers` (borrowed for every transfer); `Extents` (free ranges), `Arena` and `Room`
(ranges that come and go within a step); `Heap` and `SteadyHeap` (return freed memory to the
system while a model is sharded and after steps); `checksum`.

Invariants: a FullBuffer keeps one storage object for life, so views saved by autograd are valid again after the next gather.
Discarding it returns exactly its pages, so resident memory is what the ledger says. Transfers to and from disk use a few buffers,
whatever the model's size.
"""

from shardwise.tiers.arena import Arena, Room
from shardwise.tiers.buffers import Buffer, Buffers
from shardwise.tiers.checksum import checksum
from shardwise.tiers.disk import ALIGNMENT, DiskFile, aligned, aligned_memory, aligned_zeros, make_direct, reads_direct
from shardwise.tiers.extents import Extents
from shardwise.tiers.heap import Heap, SteadyHeap
from shardwise.tiers.held import HeldStorages, Hold, own_part
from shardwise.tiers.ledger import Kind, Ledger, Tier, device_tier
from shardwise.tiers.memory import (
    FixedBuffer,
    FullBuffer,
    OverlaidBuffer,
    can_tell_own_pages,
    make_full_buffer,
    own_storage,
)
from shardwise.tiers.mover import Mover
from shardwise.tiers.pages import SparePages
from shardwise.tiers.shelf import QUANTUM, DiskShelf, HostShelf, Shelf, is_aligned, whole_quanta

__all__ = [
    "ALIGNMENT",
    "QUANTUM",
    "Arena",
    "Buffer",
    "Buffers",
    "DiskFile",
    "DiskShelf",
    "Extents",
    "FixedBuffer",
    "FullBuffer",
    "Heap",
    "HeldStorages",
    "Hold",
    "HostShelf",
    "Kind",
    "Ledger",
    "Mover",
    "OverlaidBuffer",
    "Room",
    "Shelf",
    "SparePages",
    "SteadyHeap",
    "Tier",
    "aligned",
    "aligned_memory",
    "aligned_zeros",
    "can_tell_own_pages",
    "checksum",
    "device_tier",
    "is_aligned",
    "make_direct",
    "make_full_buffer",
    "own_part",
    "own_storage",
    "reads_direct",
    "whole_quanta",
]
