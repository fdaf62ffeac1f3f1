"""Executes a plan: starts moves before they are needed, and drops those that a pass skips.

Called by the engine at every gather, free and pass boundary. It only decides; the callbacks `start` and `drop` do the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shardwise.schedule.depth import Depth
from shardwise.schedule.plan import Plan, make_plan
from shardwise.schedule.trace import Move, Phase, Trace


class Runner:
    """Starts the moves of this step early, as the trace of the last step predicts them."""

    def __init__(self, num_moves: int, budget_bytes: int, start: Callable[[Move], bool], drop: Callable[[Move], None]) -> None:
        """At most `num_moves` are started ahead. `start(move)` returns False if it cannot start yet; `drop(move)` discards it."""
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
        self._stop = 0  # the first move that this pass, and the backward it leads to, will not reach
        self._started: deque[tuple[int, Move]] = deque()  # (position, move) started and not yet used
        self.num_early = 0
        self.num_on_demand = 0

    def begin_forward(self, *, is_new: bool, leads_to_backward: bool = True) -> None:
        """An outermost forward call begins. `is_new`: it is the whole model's; other calls may continue a pass that has begun."""
        if is_new or self._phase is not Phase.FORWARD:
            self._begin(Phase.FORWARD)
        self._stop = len(self._plan.order) if leads_to_backward else self._plan.backward_at

    def begin_backward(self) -> None:
        """Backward begins. The moves since the last forward began are now the trace of the forward."""
        if self._phase is Phase.FORWARD:
            self._is_stale |= self._trace.end(Phase.FORWARD)
        self._begin(Phase.BACKWARD)
        self._stop = len(self._plan.order)

    def end_backward(self) -> None:
        """Backward has ended."""
        if self._phase is Phase.BACKWARD:
            self._is_stale |= self._trace.end(Phase.BACKWARD)
        self.stop()

    def _begin(self, phase: Phase) -> None:
        """Expect the moves of the last pass of this phase; drop what was started for another pass."""
        if self._is_stale:
            self._give_up_all()
            order, backward_at = self._trace.order()
            self._plan = make_plan(order, backward_at, self.budget_bytes, self.depth.now)
            self._is_stale = False
        self._phase = phase
        self._trace.begin(phase)
        self._move_to(0 if phase is Phase.FORWARD else self._plan.backward_at)

    def use(self, move: Move) -> None:
        """The bytes of a move are needed now."""
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
        """Where the plan of the current pass expects this move next; moves in between were skipped."""
        stop = self._plan.backward_at if self._phase is Phase.FORWARD else len(self._plan.order)
        return next((p for p in range(self._position, stop) if self._plan.order[p] == move), None)

    def _move_to(self, position: int) -> None:
        """Expect `position` next; drop started moves that are before it or too far ahead of it."""
        self._position = position
        for entry in list(self._started):
            if entry[0] < position or entry[0] >= self._plan.reach[position]:
                self._started.remove(entry)
                self._drop(entry[1])
        self._next = max((at + 1 for at, _ in self._started), default=position)

    @property
    def expects_more(self) -> bool:
        """Whether the current pass, or the backward it leads to, has more moves to start."""
        return self._phase is not None and self._next < self._stop

    def pump(self) -> None:
        """Start the moves that may start now. Called when a Unit is in use or was freed."""
        if self._phase is None:
            return
        while self._next < min(self._plan.reach[self._position], self._stop):
            move = self._plan.order[self._next]
            if any(move == started for _, started in self._started) or not self._start(move):
                return  # its Unit is still in use: it starts when the Unit is freed
            self._started.append((self._next, move))
            self._next += 1

    def stop(self) -> None:
        """No pass runs, or its end will not be noticed: drop what was started and start nothing more."""
        self._phase = None
        self._give_up_all()

    def _give_up_all(self) -> None:
        """Drop every move that was started and not used, even if dropping one of them raises."""
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
        """Record the share of the last step spent waiting for gathers; it must be the same number on every rank."""
        if self.depth.observe(stall_percent):
            self._is_stale = True
