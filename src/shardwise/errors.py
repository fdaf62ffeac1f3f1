"""What can go wrong? The exceptions as a tree: catch `ShardwiseError` for all, or a subclass for one kind of problem.

Every message says what was being done, what was found, what was expected and what to do.
"""


class ShardwiseError(Exception):
    """Base class of all errors that this library raises."""


class ConfigError(ShardwiseError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""


class ModelError(ShardwiseError, ValueError):
    """The model cannot be sharded as it is."""


class OptimizerError(ShardwiseError, ValueError):
    """The optimizer cannot update flat shards, or does not belong to the model."""


class RanksDifferError(ShardwiseError, RuntimeError):
    """Ranks that must hold the same values, or do the same operations, differ."""


class FreedParameterError(ShardwiseError, RuntimeError):
    """A parameter, or its gradient, was touched while only its shard is in memory."""


class StaleGraphError(ShardwiseError, RuntimeError):
    """Backward reached Units whose parameters changed after the forward pass."""


class NonFiniteGradientError(ShardwiseError, ArithmeticError):
    """Gradients contain infinity or NaN where finite values are required."""


class LifecycleError(ShardwiseError, RuntimeError):
    """An invariant of this library was broken, for example by a state transition that a Unit does not allow."""


class TransportError(ShardwiseError, RuntimeError):
    """Moving bytes between ranks failed."""


class MemoryBudgetError(ShardwiseError, MemoryError):
    """A request for memory exceeds what its tier (device, host or disk) can hold."""


class SharedMemoryError(MemoryBudgetError, TransportError):
    """Ranks of one host cannot share as much memory as they need."""


class DiskError(ShardwiseError, OSError):
    """The disk tier could not be set up, read or written; `errno` says why."""


class CheckpointError(ShardwiseError, ValueError):
    """A checkpoint is missing, incomplete, damaged, or does not fit the model; or it could not be written."""
