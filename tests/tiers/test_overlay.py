"""Full vectors that show the ranks' shards where they lie: nothing is copied, writes stay private, nothing stale is ever read."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

import shardwise as sw
from cases import CASES, build
from shardwise.observe import process_memory
from shardwise.testing import RankPool, compare_with_plain
from shardwise.tiers import OverlaidBuffer


def overlaid(run) -> list[bool]:
    return [isinstance(unit._full, OverlaidBuffer) for unit in run._runtime.units]


def paged_parity(stage: int, accumulate: int) -> tuple[bool, str, int]:
    run, model, opt, plain, plain_opt = build("paged", "adamw", stage=stage)
    report = compare_with_plain(
        run, model, opt, plain, plain_opt, CASES["paged"].loss, steps=4, accumulate=accumulate, max_norm=0.5
    )
    found = (report.is_bitwise, str(report), sum(overlaid(run)))
    run.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parity_with_units_of_whole_pages(pool: RankPool, stage: int) -> None:
    for is_bitwise, text, num_overlaid in pool.run(paged_parity, stage, 2):
        assert is_bitwise, text
        assert (num_overlaid >= 3) == (stage == 3)


def test_parity_on_four_ranks_and_two_cores(pool4: RankPool) -> None:
    for is_bitwise, text, num_overlaid in pool4.run(paged_parity, 3, 1):
        assert is_bitwise, text
        assert num_overlaid >= 2


def writes() -> dict[str, bool]:
    run, model, opt, plain, plain_opt = build("paged", "adamw", stage=3)
    rank = torch.distributed.get_rank()
    weight, unit = model.blocks[0].up.weight, next(u for u in run._runtime.units if u.name == "blocks.0")
    found = {"is overlaid": isinstance(unit._full, OverlaidBuffer)}
    before = run.master("blocks.0.up.weight")
    with run.gathered(model.blocks[0]), torch.no_grad():
        weight.mul_(2.0)  # every rank makes the same change: it must count once
        found["seen inside"] = torch.equal(weight, 2 * before)
    found["kept once"] = torch.equal(run.master("blocks.0.up.weight"), 2 * before)
    with torch.no_grad():
        plain.blocks[0].up.weight.mul_(2.0)
    found["pages dropped"] = unit._full.is_untouched()

    def scribble(module: torch.nn.Module, _: object) -> None:
        if rank == 0:
            module.up.weight.data.fill_(7.0)  # behind the library's back, on one rank only

    handle = model.blocks[0].register_forward_pre_hook(scribble)
    with torch.no_grad():
        CASES["paged"].loss(model, 0)
    handle.remove()
    try:
        run.master("blocks.0.up.weight")
        found["scribbles refused"] = False
    except sw.errors.RanksDifferError as error:
        found["scribbles refused"] = "not alike on every rank" in str(error)
    found["scribbles dropped"] = unit._full.is_untouched()
    found["shards as before"] = torch.equal(run.master("blocks.0.up.weight"), 2 * before)
    report = compare_with_plain(run, model, opt, plain, plain_opt, CASES["paged"].loss, steps=3)
    found["parity afterwards"] = report.is_bitwise
    run.close()
    return found


def test_writes_are_private_and_never_leave_stale_pages(pool: RankPool) -> None:
    for found in pool.run(writes):
        assert all(found.values()), found


def test_a_buffer_knows_which_pages_are_its_own() -> None:
    page, length = mmap.PAGESIZE, 4 * mmap.PAGESIZE
    files = [os.memfd_create(f"test-{number}") for number in range(2)]
    for number, file in enumerate(files):
        os.truncate(file, length + page)
        os.pwrite(file, bytes([number + 1]) * (length + page), 0)
    buffer = OverlaidBuffer([(files[0], 0), (files[1], page)], length, torch.uint8, 2 * length)
    assert buffer.num_bytes == 0
    assert buffer.tensor[:length].eq(1).all() and buffer.tensor[length:].eq(2).all()
    assert buffer.is_untouched(), "reading makes no page its own"
    os.pwrite(files[1], b"\x09" * length, page)
    assert buffer.tensor[length:].eq(9).all(), "a change of the file shows"
    buffer.tensor[5] = 77
    assert not buffer.is_untouched()
    assert os.pread(files[0], 8, 0) == b"\x01" * 8, "a write does not reach the file"
    buffer.discard()
    assert buffer.is_untouched() and int(buffer.tensor[5]) == 1
    for file in files:
        os.close(file)


def gathered_memory() -> tuple[int, int]:
    """Private bytes with nothing gathered, and with everything gathered and read."""
    run, model, _, _, _ = build("paged-large", "sgd", stage=3)
    for unit in run._runtime.units:
        with run.gathered(unit.module):
            pass
    before = process_memory().anonymous
    with run.gathered():
        total = sum(float(param.detach().sum()) for param in model.parameters())
        assert total == total
        after = process_memory().anonymous
    assert all(overlaid(run))
    run.close()
    return after - before, sum(unit.layout.numel * 4 for unit in run._runtime.units)


def test_gathering_takes_no_memory(pool: RankPool) -> None:
    for growth, full_bytes in pool.run(gathered_memory):
        assert full_bytes > 30e6
        assert growth < 0.1 * full_bytes


def loading() -> tuple[int, int]:
    """Private memory while a state dict of 33 MB is loaded into overlaid Units, at its highest."""
    from shardwise.engine import window

    before_room, window.ROOM_BYTES = window.ROOM_BYTES, 8 << 20
    run, model, _, _, _ = build("paged-large", "sgd", stage=3)
    state = {name: torch.full(param.shape, 0.5) for name, param in model.named_parameters()}
    most = 0

    def watch(module: torch.nn.Module, _: object) -> None:
        nonlocal most
        open_bytes = sum(unit.full_bytes for unit in run._runtime.units if unit.is_gathered)
        most = max(most, open_bytes)

    handles = [module.register_load_state_dict_post_hook(watch) for module in model]
    model.load_state_dict(state)
    for handle in handles:
        handle.remove()
    window.ROOM_BYTES = before_room
    assert all(overlaid(run))
    wrong = sum(not torch.equal(run.master(name), value) for name, value in state.items())
    run.close()
    return wrong, most


def test_loading_holds_a_few_units_at_a_time(pool: RankPool) -> None:
    for wrong, most in pool.run(loading):
        assert wrong == 0
        assert 0 < most <= 8 << 20
