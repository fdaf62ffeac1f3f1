"""How does one training step go?

Public names: `assemble` (builds the Runtime of a model), `Runtime` (the step itself: start reading in `runtime.py`), `Survivors`,
`Range`, `OnDisk`, `MASTER`, `VALUE`, `LONG`, `Restoring` and `Unsaved` (what a checkpoint must contain, how it comes back, and
what a save in the background has still to read), `plain_state_dict` (the optimizer's states for plain torch), `constructing` and
`was_built_on_disk` (sharded_init), `MAX_IN_FLIGHT` and `MAX_EVICTIONS` (bounds that the memory formula uses), `clip_factor`,
`emulates_16_bit` and `resolve_dtypes` (numerics); `Hook`, `is_inside_autograd`, `is_inside_checkpoint`,
`map_tensors` and `tensors_in` (for hooks of others on a model).

Invariants: stages differ only in the table of `stages.py`; gradients are summed in fp32 or wider; a parameter cannot be
used before its full vector is filled.
"""

from shardwise.engine.assembly import assemble
from shardwise.engine.backward import is_inside_autograd
from shardwise.engine.construction import constructing, was_built_on_disk
from shardwise.engine.grad_home import MAX_EVICTIONS
from shardwise.engine.gradients import MAX_IN_FLIGHT
from shardwise.engine.moving_out import plain_state_dict
from shardwise.engine.nested import map_tensors, tensors_in
from shardwise.engine.norms import clip_factor
from shardwise.engine.one_model import one_model
from shardwise.engine.precision import emulates_16_bit, resolve_dtypes
from shardwise.engine.restoring import Restoring
from shardwise.engine.runtime import Runtime
from shardwise.engine.saved import is_inside_checkpoint
from shardwise.engine.surface import Hook
from shardwise.engine.survivors import LONG, MASTER, VALUE, OnDisk, Range, Survivors
from shardwise.engine.tiles import Find, Operators, Tiled
from shardwise.engine.unsaved import Unsaved

__all__ = [
    "LONG",
    "MASTER",
    "MAX_EVICTIONS",
    "MAX_IN_FLIGHT",
    "VALUE",
    "Find",
    "Hook",
    "OnDisk",
    "Operators",
    "Range",
    "Restoring",
    "Runtime",
    "Survivors",
    "Tiled",
    "Unsaved",
    "assemble",
    "clip_factor",
    "constructing",
    "emulates_16_bit",
    "is_inside_autograd",
    "is_inside_checkpoint",
    "map_tensors",
    "one_model",
    "plain_state_dict",
    "resolve_dtypes",
    "tensors_in",
    "was_built_on_disk",
]
