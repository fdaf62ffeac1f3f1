"""Every example runs, alone and with two ranks, and shows what it promises."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launching import run_program, run_ranks, without_launcher

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BENCHMARKS = EXAMPLES.parent / "benchmarks"
PLACE = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
LAUNCHER = ("-m", "torch.distributed.run", *PLACE)


def run_example(name: str, ranks: int, *args: str) -> str:
    code, shown = run_ranks([str(EXAMPLES / name), *args], ranks)
    assert code == 0, shown
    return shown


def under_torchrun(argv: Sequence[str], ranks: int) -> tuple[int, str]:
    env = without_launcher() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_program([sys.executable, *LAUNCHER, "--nproc-per-node", str(ranks), *argv], env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("launch", [run_ranks, pytest.param(under_torchrun, marks=pytest.mark.slow)])
def test_the_readmes_quickstart(tmp_path: Path, launch: Callable[[Sequence[str], int], tuple[int, str]]) -> None:
    block = re.search(r"```python\n(# train\.py\n.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    assert block is not None
    script = tmp_path / "train.py"
    script.write_text(block[1])
    code, shown = launch([str(script)], 2)
    assert code == 0 and "stage 3, rank 0 of 2" in shown and "transport shared memory" in shown, shown


def test_every_example_is_tested() -> None:
    tested = {"bigger_than_memory.py", "elastic.py", "plain_loop.py", "save_and_resume.py", "sharded_init.py", "selfcheck.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize(("ranks", "transport"), [(1, "alone"), (2, "shared memory")])
def test_plain_loop(ranks: int, transport: str) -> None:
    found = re.search(r"transport (.+): loss (\S+) -> (\S+)", run_example("plain_loop.py", ranks))
    assert found is not None
    assert found[1] == transport
    assert float(found[3]) < 0.7 * float(found[2])


def test_sharded_init() -> None:
    shown = run_example("sharded_init.py", 2)
    assert "after 3 steps" in shown
    assert "stage 3, rank 0 of 2" in shown
    assert re.search(r"^sum +\S+ MB +\S+ MB$", shown, re.MULTILINE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_save_and_resume(ranks: int) -> None:
    assert run_example("save_and_resume.py", ranks).count("resumed after step 4; the same losses: True") == ranks


def test_elastic_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    kept = ("--checkpoints", str(tmp_path))
    assert "2 ranks begin after step 0" in run_example("elastic.py", 2, *kept, "--steps", "3")
    shown = run_example("elastic.py", 1, *kept, "--steps", "5")
    assert "1 ranks begin after step 3" in shown and re.findall(r"step (\d)  ranks (\d)", shown) == [("4", "1"), ("5", "1")]


@pytest.mark.slow
def test_elastic_loses_an_agent_and_goes_on() -> None:
    """Three torchrun agents; one is killed with its rank, the others meet again and finish the curve."""
    done = run_program([sys.executable, str(BENCHMARKS / "elastic.py"), "--steps", "20"], env=without_launcher(), timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step  20  2 ranks", done.stdout)
    assert len(re.findall(r"rank \d failed \S+ s after the kill", done.stdout)) == 2


def test_selfcheck() -> None:
    assert "equal to the last bit" in run_example("selfcheck.py", 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bigger_than_memory(ranks: int) -> None:
    shape = ("--layers", "3", "--hidden", "64", "--heads", "2", "--vocabulary", "300", "--sequence", "16", "--steps", "4")
    shown = run_example("bigger_than_memory.py", ranks, *shape)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", shown)]
    assert len(losses) == 4 * ranks and min(losses[-ranks:]) < max(losses[:ranks])
    assert "params disk, grads disk, optimizer disk" in shown
