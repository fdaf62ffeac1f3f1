"""Does it hold on this machine, and for this model?

Public names: `RankPool` (live gloo ranks that run functions), `RankError`; `compare_with_plain`, `ParityReport`,
`PlainTrainer` (element-wise parity with plain replicated training); `fill_replica`, `group_names` (an ordinary copy of a sharded
model); the small models in `shardwise.testing.models`.

Invariants: a rank that does not answer is a failure, and the error shows its stack; parity compares every element.
"""

from shardwise.testing.parity import ParityReport, PlainTrainer, compare_with_plain
from shardwise.testing.pool import RankError, RankPool
from shardwise.testing.replica import fill_replica, group_names

__all__ = [
    "ParityReport",
    "PlainTrainer",
    "RankError",
    "RankPool",
    "compare_with_plain",
    "fill_replica",
    "group_names",
]
