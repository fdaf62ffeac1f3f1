"""Pools of live ranks, kept alive across tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sample import KEPT, is_kept
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cells of long tables that the default suite leaves out."""
    root = Path(__file__).parent
    names = [f"{item.path.relative_to(root).as_posix()}::{item.nodeid.partition('::')[2]}" for item in items]
    for item, name in zip(items, names, strict=True):
        if not is_kept(name):
            item.add_marker(pytest.mark.slow)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # all tests were collected
        for table, parts in KEPT.items():
            cells = [name for name in names if name.partition("[")[0] == table]
            if not cells or not all(any(part in name for name in cells) for part in parts):
                raise pytest.UsageError(f"tests/sample.py: {table} has no cells like {parts}")
