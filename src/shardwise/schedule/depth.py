"""How many moves should start ahead of their use? One more while steps stall, one less again if that did not help.

Called by the Runner with stall shares that all ranks agreed on, so that all ranks choose the same depth.
"""

from __future__ import annotations

STALL_PERCENT = 2
"""The depth grows only if at least this share of the step is spent waiting for gathers."""
_PASSES = 3  # steps measured at a depth before it is judged
_HELPS = 0.9  # a larger depth is kept if its stall is at most this fraction of the stall before


class Depth:
    """The current depth, between 1 and `most`."""

    def __init__(self, most: int) -> None:
        self.now = 1
        self._most = max(most, 1)
        self._seen: list[int] = []
        self._before: float | None = None  # the stall at the depth before, while a larger one is tried
        self._is_settled = False

    def observe(self, stall_percent: int) -> bool:
        """Record the stall of one step; return whether the depth changed."""
        self._seen.append(stall_percent)
        if len(self._seen) < _PASSES:
            return False
        stall = sorted(self._seen)[_PASSES // 2]
        self._seen.clear()
        if self._before is not None and stall > _HELPS * self._before:
            self._before, self._is_settled = None, True
            self.now -= 1
            return True
        if stall < STALL_PERCENT:
            self._is_settled, self._before = False, None  # if steps stall again later, try larger depths again
            return False
        if self._is_settled or self.now == self._most:
            self._before = None
            return False
        self._before = max(float(stall), 1.0)
        self.now += 1
        return True
