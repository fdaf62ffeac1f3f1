"""The ledger's measured peaks against the planner's formula, and full buffers that really go away."""

from __future__ import annotations

import mmap
import time

import pytest
import torch

import shardwise as sw
from cases import CASES, build
from shardwise.errors import LifecycleError
from shardwise.observe import MemorySampler, format_bytes, noting_saved, process_memory
from shardwise.planner import UnitSize, gpt_activation_bytes, plan_memory
from shardwise.testing import RankPool
from shardwise.testing.models import GPT, GPTConfig
from shardwise.tiers import Heap, HeldStorages, Kind, Ledger, SparePages, Tier, make_full_buffer, pages
from shardwise.tiers.heap import RETURN_EVERY_BYTES

MB = 1 << 20


def test_discarded_buffers_leave_memory_and_views_come_back() -> None:
    buffer = make_full_buffer(16 * MB, torch.float32, torch.device("cpu"))
    view = buffer.tensor[1000:2000].view(10, 100).t()
    before = process_memory().anonymous
    for round_number in range(3):
        buffer.claim()
        buffer.tensor.fill_(float(round_number + 1))
        assert process_memory().anonymous - before > 60 * MB
        assert bool((view == round_number + 1).all())
        buffer.discard()
        assert process_memory().anonymous - before < 4 * MB


def test_pages_go_from_one_buffer_to_the_next_and_leave_zeros() -> None:
    ledger = Ledger()
    spare = SparePages(32 * MB, ledger)
    large, small, odd = (make_full_buffer(n * MB // 4, torch.float32, torch.device("cpu"), spare) for n in (24, 10, 15))
    for value in (1.0, 2.0, 3.0):  # the second round finds ranges that are made of several
        large.claim()
        large.tensor.fill_(value)
        large.discard()
        assert spare.num_bytes == ledger.now(Tier.HOST) == 24 * MB and large.is_untouched()
        small.claim()
        assert spare.num_bytes == 14 * MB and bool((small.tensor == value).all()), "contents came with the pages"
        odd.claim()
        assert spare.num_bytes == 0 and bool((odd.tensor[: 14 * MB // 4] == value).all())
        assert odd.tensor[14 * MB // 4 :].count_nonzero() == 0
        small.tensor.fill_(7.0)
        small.discard()
        odd.discard()
        assert spare.num_bytes == 14 * MB, "the last one's whole huge pages only"
        assert small.is_untouched() and odd.is_untouched()


def test_pages_are_given_back_when_asked_when_limited_and_when_something_failed() -> None:
    ledger = Ledger()
    spare = SparePages(32 * MB, ledger)
    buffer = make_full_buffer(16 * MB // 4, torch.float32, torch.device("cpu"), spare)
    before = process_memory().anonymous

    def resident() -> int:
        return process_memory().anonymous - before

    for how in ("drop", "limit", "not quiet", "no room"):
        ledger.limit(Tier.HOST, 20 * MB if how != "no room" else 1 * MB)
        buffer.claim()
        buffer.tensor.fill_(1.0)
        assert resident() > 15 * MB
        buffer.discard(is_quiet=how != "not quiet")
        if how == "drop":
            assert resident() > 15 * MB
            spare.drop()
        elif how == "limit":
            assert ledger.now(Tier.HOST) == 16 * MB
            ledger.reserve(Tier.HOST, Kind.GRAD, 10 * MB)  # more than there is beside what is parked
            ledger.release(Tier.HOST, Kind.GRAD, 10 * MB)
        assert resident() < 2 * MB and ledger.now(Tier.HOST) == 0 and spare.num_bytes == 0


def test_without_the_kernels_help_pages_come_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    def refuse(*_: object) -> int:
        ctypes.set_errno(38)
        return -1

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = pages._libc().mmap.argtypes
    monkeypatch.setattr(libc, "mremap", refuse)
    monkeypatch.setattr(pages, "_libc", lambda: libc)
    spare = SparePages(32 * MB, Ledger())
    buffer = make_full_buffer(16 * MB // 4, torch.float32, torch.device("cpu"), spare)
    for _ in range(2):
        buffer.claim()
        assert buffer.tensor.count_nonzero() == 0
        buffer.tensor.fill_(1.0)
        buffer.discard()
        assert spare.num_bytes == 0 and buffer.is_untouched()


def test_a_move_that_is_refused_half_way_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    spare = SparePages(32 * MB, ledger)
    small, large = (make_full_buffer(n * MB // 4, torch.float32, torch.device("cpu"), spare) for n in (8, 24))
    small.claim()
    small.tensor.fill_(1.0)
    small.discard()
    large.claim()  # 8 MB that came and 16 of its own: two extents
    large.tensor.fill_(2.0)
    large.discard()
    assert spare.num_bytes == ledger.now(Tier.HOST) == 24 * MB
    real, calls = pages.move_pages, []

    def refuse_the_second(origin: int, target: int, length: int) -> bool:
        calls.append(length)
        if len(calls) == 2:
            pages.map_over(target, length)
            return False
        return real(origin, target, length)

    monkeypatch.setattr(pages, "move_pages", refuse_the_second)
    large.claim()
    assert calls == [16 * MB, 8 * MB] and spare.num_bytes == ledger.now(Tier.HOST) == 0
    assert large.tensor[16 * MB // 4 :].count_nonzero() == 0, "what did not come is empty"
    large.tensor.fill_(3.0)
    large.discard()
    assert large.is_untouched() and spare.num_bytes == 24 * MB


def test_the_sampler_sees_shared_memory_that_came_and_went() -> None:
    before = process_memory().total
    with MemorySampler() as memory:
        shared = mmap.mmap(-1, 64 * MB)  # shared between parent and children
        shared.write(b"1" * 64 * MB)
        time.sleep(0.1)
        shared.close()
    assert 60 * MB < memory.peak_bytes - before < 200 * MB


def test_the_heap_gives_back_what_was_freed() -> None:
    Heap().give_back()  # what earlier tests have freed would be used again
    before = process_memory().anonymous
    vectors = [torch.ones(16 * 1024) for _ in range(2000)]  # 64 KB each: from the heap
    assert process_memory().anonymous - before > 100 * MB
    last = vectors[-1]
    del vectors
    heap = Heap()
    heap.freed(RETURN_EVERY_BYTES)
    assert process_memory().anonymous - before < 60 * MB and bool(last.all())


def test_the_ledger_counts_peaks_and_refuses_nonsense() -> None:
    ledger = Ledger()
    ledger.reserve(Tier.HOST, Kind.BUFFER, 100)
    ledger.reserve(Tier.HOST, Kind.GRAD, 50)
    ledger.release(Tier.HOST, Kind.BUFFER, 100)
    ledger.reserve(Tier.HOST, Kind.BUFFER, 30)
    assert ledger.now(Tier.HOST) == 80 and ledger.peak(Tier.HOST) == 150
    assert ledger.peak(Tier.HOST, Kind.BUFFER) == 100 and ledger.now(Tier.DEVICE) == 0
    ledger.reset_peak()
    assert ledger.peak(Tier.HOST) == 80
    with pytest.raises(LifecycleError, match="only 30 were taken"):
        ledger.release(Tier.HOST, Kind.BUFFER, 31)


@pytest.mark.parametrize(("stage", "bytes_per_param"), [(0, 16.0), (1, 4 + 4 + 12 / 8), (2, 4 + 12 / 8), (3, 16 / 8)])
def test_the_formula_is_the_papers_with_eight_ranks(stage: int, bytes_per_param: float) -> None:
    """fp32: parameter 4, gradient 4 (reduced), moments 8; stages 0 and 1 also keep local gradients: + 4."""
    psi = 8_000_000
    units = [
        UnitSize(path=f"b.{i}", full_numel=psi // 8, shard_numel=psi // 64, stored_itemsize=4, compute_itemsize=4,
                 master_itemsize=4)
        for i in range(8)
    ]  # fmt: skip
    plan = plan_memory(units, stage=stage, num_moments=2, reductions_in_flight=0 if stage > 1 else 3)
    states = plan.param + plan.master + plan.grad + plan.moment
    local = 4 * psi if stage == 0 else 0  # the papers count one gradient; stage 0 keeps the local and the reduced one
    assert states == pytest.approx(bytes_per_param * psi + local)
    assert plan.buffer == (4 * psi // 8 if stage == 3 else 0)


def test_sixteen_bit_storage_keeps_masters_and_both_forms() -> None:
    unit = UnitSize(path="", full_numel=1000, shard_numel=250, stored_itemsize=2, compute_itemsize=4, master_itemsize=4)
    plan = plan_memory([unit], stage=3, num_moments=2)
    assert (plan.param, plan.master, plan.moment, plan.buffer) == (500, 1000, 2000, 4000)
    plan = plan_memory([unit], stage=1, num_moments=2)
    assert (plan.param, plan.master) == (4000 + 500, 1000)


def measured(stage: int, case: str, precision: str) -> tuple[dict[str, int], dict[str, int], int, str]:
    run, model, opt, _, _ = build(case, "adamw", stage=stage, precision=precision)
    for number in range(3):
        with run.measuring_activations():
            loss = CASES[case].loss(model, number)
        loss.backward()
        opt.step()
        opt.zero_grad()
    # Units this small are one bucket: when it is launched, all local gradients are alive beside the reduced ones.
    trainable = [unit for unit in run._runtime.units if unit.is_trainable]
    reduced = sum(unit.span.numel * unit.dtypes.master.itemsize for unit in trainable)
    local = sum(unit.layout.param_numel * unit.dtypes.compute.itemsize for unit in trainable)
    found = run.predicted_memory().by_kind(), run.measured_memory(), reduced + local, run.report()
    run.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_measured_peaks_hold_to_the_formula(pool: RankPool, stage: int, precision: str) -> None:
    for case in ("gpt", "mlp", "frozen"):
        for predicted, found, grads, report in pool.run(measured, stage, case, precision):
            for kind in ("param", "master", "buffer", "activation"):
                assert found[kind] <= predicted[kind], f"{kind}: {found[kind]} > {predicted[kind]}\n{report}"
            assert found["param"] == predicted["param"] and found["master"] == predicted["master"]
            assert found["activation"] > 0
            assert 0.9 * predicted["moment"] - 2048 <= found["moment"] <= predicted["moment"]  # pieces leave padding out
            assert found["grad"] == grads, report
            assert found["grad"] <= predicted["grad"], report


def test_activation_formula_of_the_gpt() -> None:
    config = GPTConfig(vocabulary=300, context=64, layers=3, heads=4, hidden=64)
    model = GPT(config)
    pointers = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    held = HeldStorages(Ledger(), Tier.HOST, pointers.__contains__)
    with noting_saved(held.hold):
        loss = model(tokens, tokens)
    predicted = gpt_activation_bytes(layers=3, hidden=64, heads=4, sequence=48, batch=2, vocabulary=300)
    count = held._ledger.now(Tier.HOST, Kind.ACTIVATION)
    assert 0.9 * predicted <= count <= 1.1 * predicted, (predicted, count)
    loss.backward()
    assert held._ledger.now(Tier.HOST) == 0, "backward has dropped all of it"


def test_figures_are_readable() -> None:
    assert [format_bytes(n) for n in (0, 999, 1500, 2_000_000, 3.2e9, 5e12)] == [
        "0 B", "999 B", "1.5 kB", "2.0 MB", "3.2 GB", "5.00 TB",
    ]  # fmt: skip


def measured_from_disk(place: dict[str, str]) -> tuple[dict[str, int], dict[str, int], int]:
    run, model, opt, _, _ = build("paged-large", "fused", stage=3, offload=sw.Offload(**place, step_bytes=1 << 20))
    for step in range(3):
        CASES["paged-large"].loss(model, step).backward()
        opt.step()
        opt.zero_grad()
    found = run.predicted_memory(activation_bytes=0).by_kind(), run.measured_memory(), run.ledger.peak(Tier.DISK)
    run.close()
    return found


@pytest.mark.parametrize("away", [("params", "grads", "optimizer"), ("optimizer",), ("grads",), ("params", "optimizer")])
def test_what_is_on_disk_costs_only_buffers(pool: RankPool, away: tuple[str, ...]) -> None:
    kinds = {"params": ["param"], "grads": ["grad"], "optimizer": ["moment"]}
    for predicted, found, on_disk in pool.run(measured_from_disk, dict.fromkeys(away, "disk")):
        assert on_disk > 0
        for name in away:
            for kind in kinds[name]:
                assert found[kind] <= predicted[kind]
        assert found["param"] == predicted["param"] and found["moment"] == predicted["moment"]
        assert sum(found.values()) <= 1.1 * sum(predicted.values()), (predicted, found)
