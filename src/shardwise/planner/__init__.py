"""What would happen?

Public names: `plan_memory`, `MemoryPlan`, `UnitSize` (bytes per rank and kind for a stage), `gpt_activation_bytes`;
`predict_run`, `admission` (the same for a given model, and whether it fits);
`Probe`, `probe`, `keep_probe`, `cached_probe` (what this machine can do, measured).

Invariant: these are the formulas that the documentation states, and tests compare measurements with them.
"""

from shardwise.planner.memory import MemoryPlan, UnitSize, gpt_activation_bytes, plan_memory
from shardwise.planner.predict import admission, predict_run
from shardwise.planner.probe import Probe, cached_probe, keep_probe, probe

__all__ = [
    "MemoryPlan",
    "Probe",
    "UnitSize",
    "admission",
    "cached_probe",
    "gpt_activation_bytes",
    "keep_probe",
    "plan_memory",
    "predict_run",
    "probe",
]
