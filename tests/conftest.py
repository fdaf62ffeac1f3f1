"""Pools of live ranks, kept alive across tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.testing import RankPool

TIMEOUT_S = 240.0
"""Generous: tests run beside other tests, and on slow machines."""


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=TIMEOUT_S) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    with RankPool(3, timeout_s=TIMEOUT_S) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=TIMEOUT_S) as ranks:
        yield ranks
