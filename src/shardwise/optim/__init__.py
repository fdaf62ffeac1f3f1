"""How is a shard updated?

Public names: `check_optimizer`, `Adopted`, `innermost`, `num_moments`, `state_bytes`, `clone_optimizer`, `check_elementwise`,
`has_stepped`, `GradScaler`; `Region` (where states live), `StreamedStep` (an update portion by portion), `NUM_SETS`,
`long_states` and `long_names` (which states it makes), `was_zeroed`, `can_update` (whether the native Adam can be used).

Invariants: the hyperparameters of the user's optimizer are read from its groups at every step; a parameter that no rank used
is not updated, and neither are its moments; an optimizer that is not element-wise is refused before anything changes.
"""

from shardwise.optim.adam import can_update
from shardwise.optim.adopt import Adopted, check_optimizer, innermost, num_moments, state_bytes
from shardwise.optim.elementwise import check_elementwise, clone_optimizer, has_stepped
from shardwise.optim.scaler import GradScaler
from shardwise.optim.states import Region, was_zeroed
from shardwise.optim.streaming import NUM_SETS, StreamedStep
from shardwise.optim.trial import long_names, long_states

__all__ = [
    "NUM_SETS",
    "Adopted",
    "GradScaler",
    "Region",
    "StreamedStep",
    "can_update",
    "check_elementwise",
    "check_optimizer",
    "clone_optimizer",
    "has_stepped",
    "innermost",
    "long_names",
    "long_states",
    "num_moments",
    "state_bytes",
    "was_zeroed",
]
