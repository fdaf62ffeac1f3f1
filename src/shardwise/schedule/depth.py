"""How many Units to start ahead: one more while steps stall, back again if that did not help.

Fed with stall shares that all ranks agreed on, so that all ranks decide alike.
"""

from __future__ import annotations

STALL_PERCENT = 2
"""A smaller share of the step spent waiting for gathers is not worth more memory."""
_PASSES = 3  # per depth, before it is judged
_HELPS = 0.9  # a depth is kept if it stalls at most this much of what the depth before it did


class Depth:
    """The present depth, between 1 and `most`."""

    def __init__(self, most: int) -> None:
        self.now = 1
        self._most = max(most, 1)
        self._seen: list[int] = []
        self._before: float | None = None  # the stall at the depth tried before
        self._is_settled = False

    def observe(self, stall_percent: int) -> bool:
        """One more step was measured; returns whether the depth changed."""
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
            self._is_settled, self._before = False, None  # should it stall again some day, look again
            return False
        if self._is_settled or self.now == self._most:
            self._before = None
            return False
        self._before = max(float(stall), 1.0)
        self.now += 1
        return True
