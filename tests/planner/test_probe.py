"""What this machine can do: measured, shown, kept and read back."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from shardwise.planner import cached_probe, keep_probe, probe


def test_a_probe_is_measured_kept_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules[probe.__module__], "_DISK_BYTES", 8 << 20)
    assert cached_probe() is None
    found = dataclasses.replace(probe(tmp_path), links={"shared": 1.0})
    figures = [found.copy, *found.disk_read.values(), *found.disk_write.values(), *found.products.values()]
    assert len(figures) == 1 + 3 + 3 + 3 and all(figure > 0 for figure in figures)
    kept = keep_probe(found)
    assert cached_probe() == found
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "version": 0}))
    assert cached_probe() is None, "another version's figures are not read"
    kept.write_text("{")
    assert cached_probe() is None
