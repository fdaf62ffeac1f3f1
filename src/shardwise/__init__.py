"""shardwise trains PyTorch models that do not fit in memory: ZeRO stages 0 to 3 for the user's own model, optimizer and loop.

Public names: `shard`, `sharded_init`, `load_pretrained`, `linear_cross_entropy`, `Run`, `Checkpoints`, `Precision`, `LossScale`,
`Offload`, `Activations`, `Tiling`, `ShardwiseError`, `__version__`; and the room `tiling`, whose door plate says what it offers.
"""

from shardwise import tiling
from shardwise.api import load_pretrained, shard, sharded_init
from shardwise.checkpoint import Checkpoints
from shardwise.config import Activations, LossScale, Offload, Precision, Tiling
from shardwise.errors import ShardwiseError
from shardwise.run import Run
from shardwise.tiling import linear_cross_entropy

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "Checkpoints",
    "LossScale",
    "Offload",
    "Precision",
    "Run",
    "ShardwiseError",
    "Tiling",
    "__version__",
    "linear_cross_entropy",
    "load_pretrained",
    "shard",
    "sharded_init",
    "tiling",
]
