"""shardwise trains PyTorch models that do not fit: the ZeRO family on the user's own model, optimizer and loop.

Public names: `shard`, `sharded_init`, `Run`, `Precision`, `LossScale`, `Offload`, and the errors in `shardwise.errors`.
"""

from shardwise.api import Run, shard, sharded_init
from shardwise.config import LossScale, Offload, Precision
from shardwise.errors import ShardwiseError

__version__ = "0.1.0"

__all__ = ["LossScale", "Offload", "Precision", "Run", "ShardwiseError", "__version__", "shard", "sharded_init"]
