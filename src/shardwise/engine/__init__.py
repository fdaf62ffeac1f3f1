"""How does one training step go?

Public names: `assemble` (makes a run of a model), `Runtime` (the step itself: start reading in `runtime.py`), `STAGES`, `Stage`,
`Held` (the ZeRO table), `Gradients`, `BUCKET_BYTES`, `MAX_IN_FLIGHT`, `constructing` and `was_built_on_disk` (sharded_init),
`clip_factor`, `digest`, `emulates_16_bit`, `resolve_dtypes`.

Invariants: stages differ only in the table; gradients are reduced and accumulated in fp32 or wider; parameters are
never visible while their full vector is not filled.
"""

from shardwise.engine.assembly import assemble
from shardwise.engine.construction import constructing, was_built_on_disk
from shardwise.engine.digest import digest
from shardwise.engine.gradients import BUCKET_BYTES, MAX_IN_FLIGHT, Gradients
from shardwise.engine.offload import MAX_EVICTIONS
from shardwise.engine.precision import emulates_16_bit, resolve_dtypes
from shardwise.engine.runtime import Runtime, clip_factor
from shardwise.engine.stages import STAGES, Held, Stage

__all__ = [
    "BUCKET_BYTES",
    "MAX_EVICTIONS",
    "MAX_IN_FLIGHT",
    "STAGES",
    "Gradients",
    "Held",
    "Runtime",
    "Stage",
    "assemble",
    "clip_factor",
    "constructing",
    "digest",
    "emulates_16_bit",
    "resolve_dtypes",
    "was_built_on_disk",
]
