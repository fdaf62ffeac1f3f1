"""The ZeRO table: what each stage holds whole and what it holds in shards. The only place where stages differ.

Configuration, planner and engine read their answers here; nothing else compares stage numbers.
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
    """One row of the table."""

    number: int
    params: Held
    grads: Held
    """Local gradients are reduced as they complete. FULL: all of them may be alive until then, and the backward never waits;
    SHARD: a few are, and the backward waits for earlier ones."""
    states: Held
    """Masters and moments, and therefore who updates what."""

    @property
    def gathers_after_step(self) -> bool:
        """Whether every rank needs the others' updated shards at once, because parameters are always whole."""
        return self.params is Held.FULL and self.states is Held.SHARD

    @property
    def gathers_grads(self) -> bool:
        """Whether reduced gradients go back to every rank, because every rank updates everything."""
        return self.states is Held.FULL


STAGES = {
    0: Stage(0, params=Held.FULL, grads=Held.FULL, states=Held.FULL),
    1: Stage(1, params=Held.FULL, grads=Held.FULL, states=Held.SHARD),
    2: Stage(2, params=Held.FULL, grads=Held.SHARD, states=Held.SHARD),
    3: Stage(3, params=Held.SHARD, grads=Held.SHARD, states=Held.SHARD),
}
