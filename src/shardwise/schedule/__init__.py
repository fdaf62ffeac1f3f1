"""What comes next?

Public names: `Phase` (forward or backward), `Move` (what is brought from where to where), `Trace` (the order of moves), `Plan`
and `make_plan` (how far ahead to start, pure arithmetic), `Depth` (how many moves ahead, learnt from stalls), `Runner` (starts
them early).

Invariants: a plan is only a hint. A pass that goes another way is served on demand, never raises, and renews the trace. What
is started early and not yet in use never exceeds the byte budget. Starts depend on the program's order and on what all ranks
agreed on, never on a clock, so that ranks that run the same program start the same moves in the same order.
"""

from shardwise.schedule.depth import Depth
from shardwise.schedule.plan import Plan, make_plan
from shardwise.schedule.runner import Runner
from shardwise.schedule.trace import Move, Phase, Trace

__all__ = ["Depth", "Move", "Phase", "Plan", "Runner", "Trace", "make_plan"]
