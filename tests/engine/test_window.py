"""The window of Units gathered by touch: never more than its room, unless one operation needs more, and each released once."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shardwise.engine.window import ROOM_BYTES, Window


@dataclasses.dataclass(eq=False)
class Stub:
    """Stands in for a Unit."""

    full_bytes: int


@pytest.mark.parametrize("seed", range(40))
def test_what_is_open(seed: int) -> None:
    rng = random.Random(seed)
    units = [Stub(rng.choice([1 << 10, ROOM_BYTES // 3, ROOM_BYTES // 2, ROOM_BYTES, 2 * ROOM_BYTES])) for _ in range(8)]
    opened: list[Stub] = []

    def gather(unit: Stub) -> None:
        assert unit not in opened
        opened.append(unit)

    window = Window(gather, opened.remove)  # type: ignore[arg-type]
    for _ in range(60):
        touched = [rng.choice(units) for _ in range(rng.randint(1, 3))]
        window.touch(touched)  # type: ignore[arg-type]
        assert all(unit in opened for unit in touched)
        needed = sum(unit.full_bytes for unit in set(touched))
        assert sum(unit.full_bytes for unit in opened) <= max(ROOM_BYTES, needed)
    window.close()
    assert opened == []


def test_the_oldest_goes_first() -> None:
    first, second, third = (Stub(ROOM_BYTES // 2) for _ in range(3))
    released: list[Stub] = []
    window = Window(lambda unit: None, released.append)  # type: ignore[arg-type]
    for unit in (first, second, first, third):
        window.touch([unit])  # type: ignore[list-item]
    assert released == [first]
