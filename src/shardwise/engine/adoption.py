"""The optimizer of one run: where its groups are known, and what happens to it when a frozen Unit becomes trainable."""

from __future__ import annotations

from typing import Any

from shardwise.engine.offload import Offloading
from shardwise.errors import ModelError
from shardwise.optim import Adopted
from shardwise.partition import Unit


class Adoption:
    """Built by assembly with the runtime; `adopted` follows, if there is an optimizer."""

    def __init__(self, offload: Offloading) -> None:
        self._offload = offload
        self.adopted: Adopted | None = None

    @property
    def asleep(self) -> dict[tuple[int, int], dict[str, Any]]:
        """States of frozen parameters, by Unit and slot: `Adopted.asleep`."""
        return {} if self.adopted is None else self.adopted.asleep

    def thaw(self, unit: Unit) -> None:
        """Make a Unit that was frozen when the model was sharded trainable."""
        if not self._offload.asked.is_idle:
            raise ModelError(
                f"a parameter of Unit {unit.name!r} was unfrozen after sw.shard(..., offload=...): room for its states was not "
                "set aside. Unfreeze it before sw.shard(), or shard without offload."
            )
        unit.thaw()
        if self.adopted is not None:
            self.adopted.add(unit)
