"""What is kept for backward?

Public names: `choose` (which modules' calls are computed again), `apply` (attaches that to a model), `Keeping` (keeps their
inputs, or whatever autograd saves, in place, in host memory or on disk, whole or in parts), `StretchSize` (how many bytes that
took), `held_by` (counts what is held for backward).

Invariants: the module tree, its names and its `state_dict` do not change; a call that is computed again sees the inputs, random
numbers and autocast of the first time, or an error is raised; what is moved away is one copy, in space that is reused.
"""

from shardwise.activations.keeping import Keeping, held_by
from shardwise.activations.policy import apply, choose
from shardwise.activations.sizes import StretchSize

__all__ = ["Keeping", "StretchSize", "apply", "choose", "held_by"]
