"""Where do bytes live?

Public names: `Ledger`, `Kind`, `Tier` (bytes per tier and kind, now and at peak); `FullBuffer`, `FixedBuffer`,
`OverlaidBuffer`, `make_full_buffer` (the memory of a gathered Unit).

Invariants: a FullBuffer keeps one storage object for life, so views saved by autograd are right again after the
next gather; giving its pages back is exact, so resident memory is what the ledger says.
"""

from shardwise.tiers.ledger import Kind, Ledger, Tier
from shardwise.tiers.memory import FixedBuffer, FullBuffer, OverlaidBuffer, make_full_buffer

__all__ = ["FixedBuffer", "FullBuffer", "Kind", "Ledger", "OverlaidBuffer", "Tier", "make_full_buffer"]
