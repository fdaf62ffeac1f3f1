"""What would happen?

Public names: `plan_memory`, `MemoryPlan`, `UnitSize` (bytes per rank and kind for a stage), `gpt_activation_bytes`,
`checkpoint_bytes`, `kept_activation_bytes`, `passing_activation_bytes` (activations);
`predict_run`, `predict_activations`, `SavedBytes`, `admission` (the same for a given model, and whether it fits);
`Probe`, `probe`, `keep_probe`, `cached_probe` (what this machine can do, measured).

Invariant: these are the formulas that the documentation states, and tests compare measurements with them.
"""

from shardwise.planner.memory import (
    MemoryPlan,
    UnitSize,
    checkpoint_bytes,
    gpt_activation_bytes,
    kept_activation_bytes,
    passing_activation_bytes,
    plan_memory,
)
from shardwise.planner.predict import SavedBytes, admission, predict_activations, predict_run
from shardwise.planner.probe import Probe, cached_probe, keep_probe, probe

__all__ = [
    "MemoryPlan",
    "Probe",
    "SavedBytes",
    "UnitSize",
    "admission",
    "cached_probe",
    "checkpoint_bytes",
    "gpt_activation_bytes",
    "keep_probe",
    "kept_activation_bytes",
    "passing_activation_bytes",
    "plan_memory",
    "predict_activations",
    "predict_run",
    "probe",
]
