"""What is kept for backward?

Public names: `choose` (which modules' calls are computed again), `apply` (attaches that to a model), `Keeping` (keeps their
inputs, or whatever autograd saves, in place, in host memory or on disk, whole or in parts).

Invariants: the module tree, its names and its `state_dict` do not change; a call that is computed again sees the inputs, random
numbers and autocast of the first time, or an error is raised; what is moved away is one copy, in space that is reused.
"""

from shardwise.activations.keeping import Keeping
from shardwise.activations.policy import apply, choose

__all__ = ["Keeping", "apply", "choose"]
