"""Carries a plan out: starts moves before they are needed, and gives up what a pass skips.

Called by the engine at every gather, free and pass boundary. It knows moves only; `start` and `drop` do the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shardwise.schedule.depth import Depth
from shardwise.schedule.plan import Plan, make_plan
from shardwise.schedule.trace import Move, Phase, Trace


class Runner:
    """Follows the trace of the last step through this one."""

    def __init__(self, num_moves: int, budget_bytes: int, start: Callable[[Move], bool], drop: Callable[[Move], None]) -> None:
        """`num_moves` there can be at most; `start(move)` is False if it cannot be started yet; `drop(move)` gives it up."""
        self.budget_bytes = budget_bytes
        self._start = start
        self._drop = drop
        self._trace = Trace()
        self.depth = Depth(most=num_moves)
        self._plan = Plan((), 0, (0,))
        self._is_stale = False
        self._phase: Phase | None = None
        self._position = 0  # the next move the plan expects
        self._next = 0  # the next move to start
        self._stop = 0  # the first one that this pass does not lead to
        self._started: deque[tuple[int, Move]] = deque()  # (position, move) started and not yet used
        self.num_early = 0
        self.num_on_demand = 0

    def begin_forward(self, *, is_new: bool, leads_to_backward: bool = True) -> None:
        """An outermost call begins. If it is not the whole model's (`is_new`) it may go on with a pass that others began."""
        if is_new or self._phase is not Phase.FORWARD:
            self._begin(Phase.FORWARD)
        self._stop = len(self._plan.order) if leads_to_backward else self._plan.backward_at

    def begin_backward(self) -> None:
        """Autograd has begun: what was moved since the last forward began is what a forward moves."""
        if self._phase is Phase.FORWARD:
            self._is_stale |= self._trace.end(Phase.FORWARD)
        self._begin(Phase.BACKWARD)
        self._stop = len(self._plan.order)

    def end_backward(self) -> None:
        """Autograd has ended."""
        if self._phase is Phase.BACKWARD:
            self._is_stale |= self._trace.end(Phase.BACKWARD)
        self.stop()

    def _begin(self, phase: Phase) -> None:
        """Expect what the last such pass did. What was started for another pass is given up."""
        if self._is_stale:
            self._give_up_all()
            order, backward_at = self._trace.order()
            self._plan = make_plan(order, backward_at, self.budget_bytes, self.depth.now)
            self._is_stale = False
        self._phase = phase
        self._trace.begin(phase)
        self._move_to(0 if phase is Phase.FORWARD else self._plan.backward_at)

    def use(self, move: Move) -> None:
        """What a move brings is needed now."""
        if self._phase is None:
            self.num_on_demand += 1
            return
        self._trace.add(self._phase, move)
        early = next((entry for entry in self._started if entry[1] == move), None)
        if early is not None:
            self._started.remove(early)
        self.num_early += early is not None
        self.num_on_demand += early is None
        found = self._find(move)
        if found is not None:
            self._move_to(found + 1)

    def _find(self, move: Move) -> int | None:
        """Where the plan expects this move next, in the pass that runs; those in between were skipped."""
        stop = self._plan.backward_at if self._phase is Phase.FORWARD else len(self._plan.order)
        return next((p for p in range(self._position, stop) if self._plan.order[p] == move), None)

    def _move_to(self, position: int) -> None:
        """Expect `position` next; of what was started, drop what lies before it or too far ahead of it."""
        self._position = position
        for entry in list(self._started):
            if entry[0] < position or entry[0] >= self._plan.reach[position]:
                self._started.remove(entry)
                self._drop(entry[1])
        self._next = max((at + 1 for at, _ in self._started), default=position)

    @property
    def expects_more(self) -> bool:
        """Whether the pass that runs, or the backward it leads to, has moves ahead that were not started."""
        return self._phase is not None and self._next < self._stop

    def pump(self) -> None:
        """Start what may be started now. Called when a Unit is in use or was freed."""
        if self._phase is None:
            return
        while self._next < min(self._plan.reach[self._position], self._stop):
            move = self._plan.order[self._next]
            if any(move == started for _, started in self._started) or not self._start(move):
                return  # still in use: its turn comes when it is freed
            self._started.append((self._next, move))
            self._next += 1

    def stop(self) -> None:
        """No pass runs, or none whose end will be seen: start nothing, hold nothing."""
        self._phase = None
        self._give_up_all()

    def _give_up_all(self) -> None:
        """Drop everything that was started and not used, also if dropping one fails."""
        failed: Exception | None = None
        while self._started:
            try:
                self._drop(self._started.popleft()[1])
            except Exception as error:
                failed = failed or error
        self._next = self._position
        if failed is not None:
            raise failed

    def observe(self, stall_percent: int) -> None:
        """The share of the last step spent waiting for gathers, the same number on every rank."""
        if self.depth.observe(stall_percent):
            self._is_stale = True
