"""Which transport is taken and why, both levels combined, and how many threads a rank gets."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from cases import CASES, ByHost, Patched, as_hosts, build
from launching import Forked, finish, run_program, without_launcher
from shardwise.comm import segment
from shardwise.errors import ConfigError, SharedMemoryError, TransportError
from shardwise.testing import ParityReport, RankPool, compare_with_plain

WORKER = Path(__file__).parents[1] / "torchrun_worker.py"


def too_little_shared_memory(case: str, limit: int) -> tuple[str, str, bool]:
    rank = dist.get_rank()
    room = limit if rank == 1 else 1 << 60  # one rank's container is smaller: all must decide alike
    with Patched(segment, "available_bytes", lambda: room):
        run, model, opt, plain, plain_opt = build(case, "adamw", stage=3)
        text = ""
        try:
            build(case, "adamw", stage=3, transport="shared")
        except SharedMemoryError as error:
            text = str(error)
    report = compare_with_plain(run, model, opt, plain, plain_opt, CASES[case].loss, steps=2)
    found = (run.report().splitlines()[0], text, report.is_bitwise)
    run.close()
    return found


@pytest.mark.parametrize(("case", "limit"), [("gpt", 10_000), ("paged-large", 9_000_000)])  # exchange buffers, shards
def test_too_little_shared_memory_falls_back_with_a_reason(pool: RankPool, case: str, limit: int) -> None:
    for head, text, is_bitwise in pool.run(too_little_shared_memory, case, limit):
        assert "transport pairwise (no shared memory: shared memory for 2 ranks needs" in head
        assert f"{limit} are available" in head
        assert f"{limit} are available" in text and "needs" in text
        assert is_bitwise


def refused_allocation() -> str:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with Patched(os, "posix_fallocate", full):
        run, *_ = build("gpt", "adamw", stage=3)
    head = run.report().splitlines()[0]
    run.close()
    return head


def test_memory_the_kernel_refuses_falls_back_too(pool: RankPool) -> None:
    for head in pool.run(refused_allocation):
        assert "transport pairwise (no shared memory" in head and "No space left on device" in head


def chosen() -> list[str]:
    found = []
    for name in ("auto", "pairwise", "reference"):
        run, *_ = build("mlp", "sgd", stage=2, transport=name)
        found.append(run.transport.label)
        run.close()
    with pytest.raises(ConfigError, match="all ranks are on one host"):
        build("mlp", "sgd", stage=2, transport="combined")
    return found


def test_the_report_names_the_transport(pool: RankPool) -> None:
    assert pool.run(chosen) == [["shared memory", "pairwise", "reference"]] * 2


def on_two_hosts(stage: int, **options: Any) -> tuple[str, ParityReport, int, int]:
    with as_hosts(2):
        run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=stage, **options)
    report = compare_with_plain(
        run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=3, accumulate=2, max_norm=0.5, add_up=ByHost(2)
    )
    run.transport.counters.reset()
    CASES["gpt"].loss(model, 0).backward()
    opt.step()
    opt.zero_grad()
    numel = sum(unit.layout.numel for unit in run._runtime.units)
    found = (run.transport.name, report, run.transport.counters.total_elements(), numel)
    run.close()
    return found


@pytest.mark.parametrize(("stage", "factor"), [(1, 2), (2, 2), (3, 3)])
def test_both_levels_combined(pool4: RankPool, stage: int, factor: int) -> None:
    for name, report, sent, numel in pool4.run(on_two_hosts, stage):
        assert name.startswith("combined")
        assert report.is_bitwise, str(report)
        assert sent == factor * numel * 3 // 4


def test_both_levels_with_small_buffers_and_16_bits(pool4: RankPool) -> None:
    for _, report, _, _ in pool4.run(on_two_hosts, 3, exchange_bytes=65536, precision="bf16"):
        assert report.is_bitwise, str(report)


def test_both_levels_from_disk(pool4: RankPool) -> None:
    offload = sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)
    for name, report, sent, numel in pool4.run(on_two_hosts, 3, offload=offload):
        assert name.startswith("combined") and report.is_bitwise, str(report)
        assert sent == 3 * numel * 3 // 4


def uneven_hosts() -> str:
    with as_hosts(2):
        run, *_ = build("mlp", "sgd", stage=2)
    found = run.transport.label
    run.close()
    return found


def test_hosts_of_different_sizes_use_messages(pool3: RankPool) -> None:
    assert pool3.run(uneven_hosts) == ["pairwise (hosts have different numbers of ranks (1, 2))"] * 3


class _Host1Full:
    """Every allocation of shared memory on the second host fails."""

    def __call__(self) -> int:
        return 1 << 60 if dist.get_rank() < 2 else 1000


def one_host_lacks_memory(transport: str) -> str:
    with as_hosts(2), Patched(segment, "available_bytes", _Host1Full()):
        try:
            run, model, opt, plain, plain_opt = build("gpt", "adamw", stage=3, transport=transport)
        except SharedMemoryError as error:
            return str(error)
    report = compare_with_plain(run, model, opt, plain, plain_opt, CASES["gpt"].loss, steps=1)
    found = f"{run.transport.label} {report.is_bitwise}"
    run.close()
    return found


def test_hosts_fall_back_together(pool4: RankPool) -> None:
    for text in pool4.run(one_host_lacks_memory, "auto"):
        assert text.startswith("pairwise (no shared memory: ") and text.endswith("True")
    for text in pool4.run(one_host_lacks_memory, "combined"):
        assert "1000 are available" in text


def at_odds() -> str:
    """One rank asks for a gradient while the other steps: they meet, but not for the same thing."""
    run, model, opt, _, _ = build("gpt", "adamw", stage=3, timeout_s=5.0)
    CASES["gpt"].loss(model, 0).backward()
    try:
        if dist.get_rank() == 0:
            run.grad("blocks.0.up.weight")
        else:
            opt.step()
    except TransportError as error:
        return str(error)
    return "went on with wrong values"


def test_ranks_that_meet_for_different_things_are_told() -> None:
    with RankPool(2) as own:
        for text in own.run(at_odds):
            assert re.search(r"in (fence|gather|combine) \d+ .*at step [01]", text), text
            assert "they disagree" in text or "gave up" in text or "longer than timeout_s" in text, text


def closure_then_forward() -> bool:
    """A closure that goes on computing after its backward: no rank may update shards that a slower one still reads."""
    run, model, opt, plain, _ = build("paged", "sgd", stage=3)
    seen = []

    def closure() -> torch.Tensor:
        loss = CASES["paged"].loss(model, 0)
        loss.backward()
        if dist.get_rank() == 0:
            time.sleep(0.3)
        with torch.no_grad():
            seen.append(CASES["paged"].loss(model, 1))
        return loss

    with torch.no_grad():
        expected = CASES["paged"].loss(plain, 1)
    opt.step(closure)
    run.close()
    return torch.equal(seen[0], expected)


def test_a_closure_may_compute_after_its_backward(pool: RankPool) -> None:
    assert pool.run(closure_then_forward) == [True, True]


# -- torchrun -------------------------------------------------------------------------------------------------------------------


def torchrun(*args: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *args]
    clean = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return subprocess.Popen(
        command, env={**clean, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.slow
def test_torchruns_one_thread_is_told_from_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun gives each of several ranks one thread if its own environment says nothing."""
    for chosen_threads in (None, "1"):
        env = {"GLOO_SOCKET_IFNAME": "lo", **({} if chosen_threads is None else {"OMP_NUM_THREADS": chosen_threads})}
        out = finish(torchrun("--standalone", "--nproc-per-node=2", str(WORKER), "threads", env=env)).stdout
        share = 1 if chosen_threads else max(len(os.sched_getaffinity(0)) // 2, 1)
        for rank in range(2):
            assert f"rank {rank} user chose: {chosen_threads is not None}" in out, out
            assert f"rank {rank} threads {share}{', as chosen' if chosen_threads else ''} (" in out, out
    from shardwise.engine import threads

    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    assert threads.user_chose()


class _Counts:
    """torch's thread count, without touching it."""

    def __init__(self, now: int) -> None:
        self.now = now


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(16, 4, 4), (16, 3, 5), (2, 4, 1), (8, 1, 8)])
def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, expected: int) -> None:
    from shardwise.comm import World
    from shardwise.engine import threads

    counts = _Counts(now=1)  # what torchrun leaves
    monkeypatch.setattr(threads, "_expected", 1)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: counts.now)
    monkeypatch.setattr(threads.torch, "set_num_threads", lambda number: setattr(counts, "now", number))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    world = World(None, torch.device("cpu"))
    monkeypatch.setattr(world, "gather_objects", lambda mine: [mine] * ranks + [("another host", mine[1])])
    assert threads.share_cores(world).startswith(f"{expected} ({cores} cores for {ranks} rank")
    assert counts.now == expected
    assert not threads.user_chose(), "a second shard() in the same process finds its own setting"
    counts.now = expected + 1
    assert threads.share_cores(world).startswith(f"{expected + 1}, as chosen")
    assert counts.now == expected + 1


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _can_make_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"sw{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces as hosts 10.213.7.1 and 10.213.7.2, joined by a pair of virtual links: their names, the links'."""
    tag = uuid.uuid4().hex[:6]
    spaces, links = [f"swa{tag}", f"swb{tag}"], [f"sl0{tag}", f"sl1{tag}"]
    try:
        for space in spaces:
            _run("ip", "netns", "add", space)
        _run("ip", "link", "add", links[0], "netns", spaces[0], "type", "veth", "peer", "name", links[1], "netns", spaces[1])
        for number, (space, link) in enumerate(zip(spaces, links, strict=True)):
            _run("ip", "-n", space, "addr", "add", f"10.213.7.{number + 1}/24", "dev", link)
            _run("ip", "-n", space, "link", "set", link, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
        yield spaces, links
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def forked_ranks(spaces: list[str], links: list[str], directory: Path) -> str:
    """Two ranks in each namespace, with the variables that torchrun sets."""
    out = directory / "out"
    shared = {"MASTER_ADDR": "10.213.7.1", "MASTER_PORT": "29477", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        Forked(
            [str(WORKER), "parity"],
            out=out,
            env=without_launcher()
            | {"GLOO_SOCKET_IFNAME": links[rank // 2], "RANK": str(rank), "LOCAL_RANK": str(rank % 2), **shared},
            network=spaces[rank // 2],
        )
        for rank in range(4)
    ]
    assert [rank.finish() for rank in ranks] == [0] * 4, out.read_text()
    return out.read_text()


def ranks_of_torchrun(spaces: list[str], links: list[str], directory: Path) -> str:
    """The same started by torchrun, with its own rendezvous."""
    processes = [
        torchrun(
            "--nnodes=2",
            "--nproc-per-node=2",
            f"--node-rank={number}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=10.213.7.1:29477",
            f"--rdzv-conf=is_host={int(number == 0)}",
            f"--rdzv-id={spaces[0]}",
            f"--local-addr=10.213.7.{number + 1}",
            str(WORKER),
            "parity",
            env={"GLOO_SOCKET_IFNAME": link},
            prefix=("ip", "netns", "exec", space),
        )
        for number, (space, link) in enumerate(zip(spaces, links, strict=True))
    ]
    return "".join([finish(process).stdout for process in processes])


@pytest.mark.skipif(not _can_make_namespaces(), reason="making network namespaces needs root and iproute2")
@pytest.mark.parametrize("launch", [forked_ranks, pytest.param(ranks_of_torchrun, marks=pytest.mark.slow)])
def test_two_by_two_ranks_across_network_namespaces(tmp_path: Path, launch: Callable[[list[str], list[str], Path], str]) -> None:
    with two_networks() as (spaces, links):
        shown = launch(spaces, links, tmp_path)
    for rank in range(4):
        assert f"rank {rank}: combined" in shown and f"rank {rank}: equal to the last bit" in shown, shown


@pytest.mark.slow
@pytest.mark.skipif(not _can_make_namespaces(), reason="making network namespaces needs root and iproute2")
def test_a_host_that_is_cut_off_is_named_by_all_others_which_go_on_without_it() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "hosts.py"
    done = run_program([sys.executable, str(script), "--timeout-s=5", "--steps=16"], env=without_launcher())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line.startswith("| ")]
    survivors = [row for row in rows if row[1] in ("0", "1")]
    assert len(survivors) == 4
    for row in survivors:
        assert row[3] == "3" and row[4] == "[4, 5]" and row[5].startswith("TransportError"), row
    assert re.search(r"restarted with 2 hosts: goes on with step \d+, ends with 16", done.stdout), done.stdout
