"""Pools of live ranks, kept alive across tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.testing import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks
