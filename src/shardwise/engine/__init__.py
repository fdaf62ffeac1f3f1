"""How does one training step go?

Public names: `Runtime` (the step itself: start reading in `runtime.py`), `STAGES`, `Stage`, `Held` (the ZeRO table),
`attach`, `check_methods` (hooks), `Gradients`, `constructing`, `Construction`, `resolve_dtypes`, `emulates_16_bit`, `digest`, `Window`.

Invariants: stages differ only in the table; gradients are reduced and accumulated in fp32 or wider; parameters are
never visible while their full vector is not filled.
"""

from shardwise.engine.construction import Construction, constructing
from shardwise.engine.digest import digest
from shardwise.engine.gradients import Gradients
from shardwise.engine.hooks import attach, check_methods
from shardwise.engine.precision import emulates_16_bit, resolve_dtypes
from shardwise.engine.runtime import Runtime, clip_factor
from shardwise.engine.stages import STAGES, Held, Stage
from shardwise.engine.window import Window

__all__ = [
    "STAGES",
    "Construction",
    "Gradients",
    "Held",
    "Runtime",
    "Stage",
    "Window",
    "attach",
    "check_methods",
    "clip_factor",
    "constructing",
    "digest",
    "emulates_16_bit",
    "resolve_dtypes",
]
