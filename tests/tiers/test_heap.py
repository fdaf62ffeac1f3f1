"""Private memory stays level: when the heap is trimmed, and when it is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.tiers import heap
from shardwise.tiers.heap import Readings, SteadyHeap

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "steady.py"


class Process:
    """A process whose memory and time the test sets."""

    def __init__(self) -> None:
        self.used, self.garbage, self.kept, self.cpu_s = 1000, 0, 0, 0.0
        self.trims = self.releases = 0
        self.trim_s = 0.0
        readings = Readings(lambda: self.used + self.garbage + self.kept, self._trim, lambda: self.cpu_s, lambda: 0.001)
        self.heap = SteadyHeap(self._release, readings)

    def _trim(self) -> None:
        self.trims += 1
        self.cpu_s += self.trim_s
        self.garbage = 0

    def _release(self) -> None:
        self.releases += 1
        self.kept, self.garbage = 0, self.garbage + self.kept

    def step(self, garbage: int = 0, kept: int | None = None, cpu_s: float = 100.0) -> int:
        """One step leaves `garbage` in the heap; private memory after it."""
        self.cpu_s += cpu_s
        self.garbage += garbage
        self.kept = self.kept if kept is None else kept
        self.heap.after_step()
        return self.used + self.garbage + self.kept


def test_what_building_has_left_is_returned_at_once() -> None:
    process = Process()
    assert process.step(garbage=500) == 1000 and process.trims == 1


def test_a_loop_whose_sizes_repeat_is_left_alone() -> None:
    process = Process()
    process.step(garbage=100)
    for _ in range(20):
        process.garbage = 0  # the next step uses what the last one has freed
        assert process.step(garbage=100, kept=50) == 1150
    assert process.trims == 1 and process.releases == 0, "the first step's, and nothing after"


def test_memory_that_has_risen_is_returned_and_the_level_stays() -> None:
    process = Process()
    process.step()
    assert process.step(garbage=40) == 1040
    assert process.step(garbage=300) == 1000 and process.releases == 0, "free memory was enough"
    assert process.step(garbage=49) == 1049, "within a hundredth of the level"
    assert process.step(garbage=2) == 1000


def test_what_is_kept_for_reuse_is_given_up_if_free_memory_is_not_enough() -> None:
    process = Process()
    process.step()
    process.step(kept=20)
    assert process.step(kept=400) == 1000 and process.releases == 1


def test_the_level_rises_with_what_is_in_use() -> None:
    process = Process()
    process.step()
    process.step()
    process.used = 2000  # optimizer states, say
    process.step()
    trims = process.trims
    assert process.step(garbage=10) == 2010 and process.trims == trims, "2,000 is the level now"
    process.used = 1500
    process.step()
    assert process.step(garbage=100) == 1500, "and 1,500 after it has fallen"


def test_trims_take_no_more_than_their_share_of_time() -> None:
    process = Process()
    process.step()
    process.step()
    process.trim_s = 3.0
    for _ in range(100):
        process.step(garbage=100, cpu_s=1.0)
    spent = process.heap.cost_s
    assert spent <= heap.SHARE * process.cpu_s + 2 * (process.trim_s + 200 * 0.001)
    assert process.heap.num_trims >= 3, "but they go on"


def test_without_means_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_malloc_trim", lambda: None)
    steady = SteadyHeap(lambda: pytest.fail("nothing to release"))
    steady.after_step()
    assert not steady.is_on and steady.num_trims == 0


def test_of_this_process() -> None:
    steady = SteadyHeap(lambda: None)
    assert steady.is_on, "Linux with glibc"
    steady.after_step()
    assert steady.num_trims == 1 and 0 < steady.cost_s < 60


@pytest.mark.slow
def test_resident_memory_after_many_steps_of_changing_lengths() -> None:
    """200 steps, evaluation and generation in between: the memory of step 5, wherever activations are kept."""
    for setting in ("device", "host", "disk", "all on disk"):
        command = [sys.executable, str(BENCHMARK), "--settings", setting, "--most", "1.02"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=BENCHMARK.parent)
        assert done.returncode == 0, done.stdout + done.stderr
