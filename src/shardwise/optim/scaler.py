"""Dynamic loss scaling for fp16: grow after a run of good steps, back off and skip after an overflow."""

from __future__ import annotations

from shardwise.config import LossScale


class LossScaler:
    """The scale in force and the count towards its growth."""

    def __init__(self, policy: LossScale) -> None:
        self._policy = policy
        self.scale = policy.initial
        self.num_good_steps = 0

    def update(self, *, found_overflow: bool) -> None:
        """Take note of one step's outcome."""
        if found_overflow:
            self.scale = max(self.scale * self._policy.backoff, self._policy.minimum)
            self.num_good_steps = 0
            return
        self.num_good_steps += 1
        if self.num_good_steps % self._policy.interval == 0:
            self.scale *= self._policy.growth
