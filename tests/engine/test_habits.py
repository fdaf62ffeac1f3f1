"""Nothing silent: whatever user code does around the step gives the result of plain training, or a ShardwiseError.

`docs/habits.md` is the table of outcomes; the slow test, which runs every cell, writes it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from habits import HABITS, WHEN, Cell, cells, outcomes
from shardwise.testing import RankPool

DOCUMENT = Path(__file__).parents[2] / "docs" / "habits.md"
SAMPLE = 59  # one cell in so many, by default; a prime, so that every stage, transport and moment is met
BATCH = 40
pytestmark = pytest.mark.filterwarnings("ignore")


def _run(pools: dict[str, RankPool], chosen: list[Cell]) -> dict[Cell, str]:
    """Outcome of every cell; ranks must agree."""
    found: dict[Cell, str] = {}
    for transport in ("alone", "shared", "pairwise"):
        mine = [cell for cell in chosen if cell.transport == transport]
        for start in range(0, len(mine), BATCH):
            batch = mine[start : start + BATCH]
            for rank, answers in enumerate(pools[transport].run(outcomes, batch, timeout_s=240)):
                for cell, answer in zip(batch, answers, strict=True):
                    before = found.setdefault(cell, answer)
                    same = before.partition(":")[0] == answer.partition(":")[0]
                    assert same, f"{cell.label}: rank 0 says {before}, rank {rank} {answer}"
                    if answer.startswith("other"):
                        print(cell.label, answer[:300], flush=True)
            print(f"{transport}: {start + len(batch)} of {len(mine)} cells", flush=True)
    return found


def _check(found: dict[Cell, str]) -> None:
    wrong = [f"{cell.label}: {answer}" for cell, answer in found.items() if answer.startswith("other")]
    assert not wrong, f"{len(wrong)} of {len(found)} cells are neither equal nor refused:\n" + "\n".join(wrong[:30])
    refused = [cell for cell, answer in found.items() if answer.startswith("refused")]
    unexplained = sorted({cell.habit for cell in refused if not HABITS[cell.habit].why})
    assert not unexplained, f"refused without a reason: {unexplained}"
    assert len(refused) < len(found) / 4


@pytest.fixture(scope="module")
def pools(pool: RankPool) -> object:
    with RankPool(1) as alone:
        yield {"alone": alone, "shared": pool, "pairwise": pool}


def test_there_are_enough_habits() -> None:
    assert len(HABITS) >= 60
    assert {cell.when for cell in cells()} == set(WHEN)
    sample = cells()[::SAMPLE]
    assert {cell.stage for cell in sample} == {0, 1, 2, 3} and len({cell.habit for cell in sample}) > 60


def test_a_sample_of_the_table_of_habits(pools: dict[str, RankPool]) -> None:
    found = _run(pools, cells()[::SAMPLE])
    _check(found)
    documented = _documented()
    for cell, answer in found.items():
        is_refused = cell.stage in documented[cell.habit][cell.when]
        assert answer.startswith("equal") or is_refused, f"{cell.label} is refused, but docs/habits.md does not say so"


@pytest.mark.slow
def test_the_whole_table_of_habits(pools: dict[str, RankPool]) -> None:
    found = _run(pools, cells())
    _check(found)
    DOCUMENT.write_text(_document(found))
    counts = Counter(answer.partition(":")[0] for answer in found.values())
    print(f"{len(HABITS)} habits, {len(found)} cells: {dict(counts)}")


# -- the document -------------------------------------------------------------------------------------------------


_PREFACE = """# Habits

What user code does around a training step, and what comes of it. Every cell was run by `tests/engine/test_habits.py` at stages
0 to 3, on one rank, on two ranks over shared memory and over pairwise messages, with fp32 and with bf16 storage, at stage 3
with small Units joined and apart, against plain training: {cells} runs, of which {equal} gave the same losses, parameters,
buffers and readings to the last bit and {refused} were refused with an error that names the remedy. Nothing else happened in
any of them. `make test-slow` writes this page.

*equal*: the result of plain training (which may be the same error). *refused at ...*: a `ShardwiseError` at these
stages, equal at the others; an asterisk means only in some of the runs at that stage (with 16-bit storage, with joined Units, or
on more than one rank). A dash: not tried there.

With 16-bit storage a value that is written by hand is rounded to the stored dtype before the next forward; elements that are not
changed keep the digits of their fp32 masters. Operations on a parameter outside forward gather its Unit at stage 3, run, and free
it: all ranks must do the same.
"""


def _document(found: dict[Cell, str]) -> str:
    counts = Counter(answer.partition(":")[0] for answer in found.values())
    refused: dict[tuple[str, str], set[int]] = defaultdict(set)
    where: dict[tuple[str, str, int], set[Cell]] = defaultdict(set)
    tried = Counter((cell.habit, cell.when, cell.stage) for cell in found)
    for cell, answer in found.items():
        if answer.startswith("refused"):
            refused[cell.habit, cell.when].add(cell.stage)
            where[cell.habit, cell.when, cell.stage].add(cell)
    head = f"| habit | {' | '.join(WHEN)} | why it is refused |"
    lines = [_PREFACE.format(cells=len(found), **counts), head, "|---" * (len(WHEN) + 2) + "|"]
    for name, habit in HABITS.items():
        row = []
        for when in WHEN:
            if when not in habit.when:
                row.append("-")
                continue
            stages = sorted(refused[name, when])
            marks = [f"{stage}{'' if len(where[name, when, stage]) == tried[name, when, stage] else '*'}" for stage in stages]
            row.append(f"refused at {', '.join(marks)}" if stages else "equal")
        why = habit.why if any(refused[name, when] for when in WHEN) else ""
        lines.append(f"| {name} | {' | '.join(row)} | {why} |")
    return "\n".join(lines) + "\n"


def _documented() -> dict[str, dict[str, set[int]]]:
    """Stages at which each habit is refused, by moment, as the document says."""
    found: dict[str, dict[str, set[int]]] = {}
    for line in DOCUMENT.read_text().splitlines():
        fields = [field.strip() for field in line.strip("|").split(" | ")]
        if len(fields) >= len(WHEN) + 1 and fields[0] in HABITS:
            found[fields[0]] = {
                when: {int(stage) for stage in re.findall(r"\d", text)} for when, text in zip(WHEN, fields[1:], strict=False)
            }
    assert set(found) == set(HABITS), sorted(set(HABITS) - set(found))
    return found
