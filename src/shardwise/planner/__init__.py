"""What would happen?

Public names: `plan_memory`, `MemoryPlan`, `UnitSize` (bytes per rank and kind for a stage), `gpt_activation_bytes`.

Invariant: formulas here are the ones the documentation states and the tests hold measurements to.
"""

from shardwise.planner.memory import MemoryPlan, UnitSize, gpt_activation_bytes, plan_memory

__all__ = ["MemoryPlan", "UnitSize", "gpt_activation_bytes", "plan_memory"]
