"""What does each stage hold full, and what in shards? The ZeRO table, the only place where stages differ.

Configuration, planner, engine and command line read it. No other code may compare stage numbers.
"""

from __future__ import annotations

import dataclasses
import enum


class Held(enum.Enum):
    """How a rank holds one kind of model state between uses."""

    FULL = "every rank holds all of it"
    SHARD = "every rank holds its slice"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row of the table: how a stage holds each kind of state."""

    number: int
    params: Held
    grads: Held
    """Local gradients are reduced as soon as they are complete. FULL: all of them may be in memory at once, and backward never
    waits for a reduction. SHARD: only a few may be, and backward waits for earlier reductions."""
    states: Held
    """Masters and moments. A rank updates the elements whose states it holds."""

    @property
    def gathers_after_step(self) -> bool:
        """Whether a step ends with a gather: every rank updates its shard, but holds all parameters."""
        return self.params is Held.FULL and self.states is Held.SHARD

    @property
    def gathers_grads(self) -> bool:
        """Whether reduced gradients are gathered on every rank, because every rank updates all elements."""
        return self.states is Held.FULL


STAGES = {
    0: Stage(0, params=Held.FULL, grads=Held.FULL, states=Held.FULL),
    1: Stage(1, params=Held.FULL, grads=Held.FULL, states=Held.SHARD),
    2: Stage(2, params=Held.FULL, grads=Held.SHARD, states=Held.SHARD),
    3: Stage(3, params=Held.SHARD, grads=Held.SHARD, states=Held.SHARD),
}
