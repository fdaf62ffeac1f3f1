"""How is a shard updated?

Public names: `check_optimizer`, `adopt_optimizer`, `make_pieces`, `num_moments`, `state_bytes`, `clone_optimizer`,
`check_elementwise`, `LossScaler`.

Invariants: the user's optimizer object rules (its groups' hyperparameters are read at every step); a parameter that no
rank used is left alone, moments included; an optimizer that is not element-wise is refused before anything changes.
"""

from shardwise.optim.adopt import adopt_optimizer, check_optimizer, make_pieces, num_moments, state_bytes
from shardwise.optim.elementwise import check_elementwise, clone_optimizer
from shardwise.optim.scaler import LossScaler

__all__ = [
    "LossScaler",
    "adopt_optimizer",
    "check_elementwise",
    "check_optimizer",
    "clone_optimizer",
    "make_pieces",
    "num_moments",
    "state_bytes",
]
