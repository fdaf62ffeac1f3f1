"""What can go wrong, as a tree that callers can catch by meaning.

Every message says what was being done, what was found, what was expected and what to do.
"""


class ShardwiseError(Exception):
    """Root of every error this library raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""


class ModelError(ShardwiseError, ValueError):
    """The model cannot be sharded as it is."""


class OptimizerError(ShardwiseError, ValueError):
    """The optimizer cannot update flat shards, or does not belong to the model."""


class RanksDifferError(ShardwiseError, RuntimeError):
    """Ranks that must hold or do the same thing do not."""


class FreedParameterError(ShardwiseError, RuntimeError):
    """A parameter, or its gradient, was touched while only its shard is in memory."""


class StaleGraphError(ShardwiseError, RuntimeError):
    """Backward reached Units whose parameters changed after the forward pass."""


class NonFiniteGradientError(ShardwiseError, ArithmeticError):
    """Gradients contain infinity or NaN where finite values are required."""


class LifecycleError(ShardwiseError, RuntimeError):
    """A Unit was asked for a move its state does not allow: a broken invariant."""


class TransportError(ShardwiseError, RuntimeError):
    """Moving bytes between ranks failed."""


class MemoryBudgetError(ShardwiseError, MemoryError):
    """A reservation does not fit its tier."""


class SharedMemoryError(MemoryBudgetError, TransportError):
    """Ranks of one host cannot share as much memory as they need."""


class DiskError(ShardwiseError, OSError):
    """A disk tier could not be set up, read or written; `errno` says why."""
