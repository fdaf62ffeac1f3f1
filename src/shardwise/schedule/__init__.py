"""What comes next?

Public names: `Phase` (forward or backward), `Move` (what is moved from where to where), `Trace` (the order of moves), `Plan`
and `make_plan` (how far ahead moves may start, pure arithmetic), `Depth` (how many moves ahead, adapted to stalls), `Runner`
(starts moves early).

Invariants: a plan is only a hint. A pass that differs from it gets its moves on demand, never raises, and updates the trace.
Moves that were started and are not in use yet never exceed the byte budget. Starts depend only on the order of the program and
on values that all ranks agreed on, never on a clock, so ranks that run the same program start the same moves in the same order.
"""

from shardwise.schedule.depth import Depth
from shardwise.schedule.plan import Plan, make_plan
from shardwise.schedule.runner import Runner
from shardwise.schedule.trace import Move, Phase, Trace

__all__ = ["Depth", "Move", "Phase", "Plan", "Runner", "Trace", "make_plan"]
