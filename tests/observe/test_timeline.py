"""Memory over time: what is recorded of a run, and what is drawn of it."""

from __future__ import annotations

import html.parser
import itertools
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from cases import generator, sharded
from shardwise.errors import ConfigError, LifecycleError
from shardwise.observe import Event, Panel, Timeline, draw_html, draw_png
from shardwise.observe import chart as chart_module
from shardwise.testing import RankPool
from shardwise.testing.models import GPT, GPTConfig
from shardwise.tiers import Kind, Ledger, Tier

# -- the ledger's observer ---------------------------------------------------------------------------------------------


def test_an_observer_is_told_what_is_held_and_every_change() -> None:
    ledger = Ledger()
    ledger.reserve(Tier.HOST, Kind.PARAM, 7)
    seen: list[tuple[Tier, Kind, int]] = []
    with ledger.observed_by(lambda *change: seen.append(change)):
        assert len(seen) == len(Tier) * len(Kind) and [change for change in seen if change[2]] == [(Tier.HOST, Kind.PARAM, 7)]
        seen.clear()
        ledger.reserve(Tier.DISK, Kind.GRAD, 5)
        ledger.release(Tier.DISK, Kind.GRAD, 2)
        ledger.set(Tier.HOST, Kind.MOMENT, 9)
        ledger.note(Tier.HOST, Kind.ACTIVATION, 3)
        with pytest.raises(LifecycleError):
            ledger.release(Tier.HOST, Kind.PARAM, 8)
        with pytest.raises(LifecycleError, match="only one"), ledger.observed_by(print):
            pass
        assert ledger.is_observed
    ledger.reserve(Tier.HOST, Kind.PARAM, 1)
    assert not ledger.is_observed
    assert seen == [
        (Tier.DISK, Kind.GRAD, 5), (Tier.DISK, Kind.GRAD, 3), (Tier.HOST, Kind.MOMENT, 9), (Tier.HOST, Kind.ACTIVATION, 3),
    ]  # fmt: skip


# -- sums and drawings -------------------------------------------------------------------------------------------------


def recorded() -> Timeline:
    """A recording with a clock that ticks."""
    ticks = itertools.count()
    timeline = Timeline("</script> & <b>", "host", lambda: float(next(ticks)))
    timeline.note("host", "param", 100)
    timeline.note("host", "grad", 0)
    timeline.note("disk", "moment", 300)
    timeline.note("device", "param", 0)
    timeline.note_resident(1150)
    timeline.begin()  # at 0
    for num_bytes in (20, 60, 10):
        timeline.note("host", "activation", num_bytes)  # at 1, 2, 3
    timeline.note("host", "odd", 5)  # at 4
    timeline.note("host", "grad", 40)  # at 5
    timeline.note_resident(1300)  # at 6
    timeline.end(
        [
            Event(-1.0, "step", ""),
            Event(0.5, "forward", ""),
            Event(1.5, "gathered", "blocks.<1>"),
            Event(2.5, "forward end", ""),
            Event(2.5, "backward", ""),
            Event(4.0, "reduce", "blocks.0", 0.5, "exchange"),
            Event(5.0, "backward end", ""),
            Event(6.0, "update", "", 0.5),
            Event(6.5, "step", ""),
        ]
    )  # at 7
    timeline.predicted = {"param": 100, "grad": 50, "activation": 70}
    return timeline


def test_sums_over_time() -> None:
    timeline = recorded()
    host, disk = timeline.panels
    assert (host.tier, disk.tier) == ("host", "disk")
    assert host.times_s == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and timeline.duration_s == 7.0
    assert host.columns == {
        "param": [100] * 6, "grad": [0] * 5 + [40], "activation": [0, 20, 60, 10, 10, 10], "odd": [0] * 4 + [5, 5],
    }  # fmt: skip
    assert host.totals == [100, 120, 160, 110, 115, 155]
    assert timeline.peak_bytes("host") == 160 and timeline.peak_bytes("host", "grad") == 40
    assert timeline.peak_bytes("disk") == 300 and timeline.peak_bytes("device") == 0 and timeline.peak_bytes("host", "no") == 0
    assert timeline.predicted_bytes == 220
    assert timeline.uncounted_bytes == 1050 and timeline.resident_above == [(0.0, 100), (6.0, 250)]
    assert [tuple(phase) for phase in timeline.phases] == [("forward", 0.5, 2.5), ("backward", 2.5, 5.0), ("step", 5.5, 6.5)]


def test_phases_that_began_before_or_have_not_ended() -> None:
    timeline = Timeline("", "host", iter([0.0, 9.0]).__next__)
    timeline.begin()
    timeline.end([Event(2.0, "backward end", ""), Event(3.0, "forward", ""), Event(4.0, "forward", "")])
    assert [tuple(phase) for phase in timeline.phases] == [("backward", 0.0, 2.0), ("forward", 3.0, 9.0)]


def test_fewer_moments_have_the_same_peak_and_ends() -> None:
    values = torch.randint(0, 1000, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    panel = Panel("host", [n / 100 for n in range(len(values))], {"grad": values, "param": [1] * len(values)})
    thin = panel.thinned(300)
    assert len(thin.times_s) <= 330 and thin.times_s == sorted(thin.times_s)
    assert max(thin.totals) == max(panel.totals)
    assert (thin.times_s[0], thin.totals[-1]) == (0.0, panel.totals[-1])
    assert panel.thinned(len(values)) is panel
    same = Panel("host", [0.0] * 10, {"grad": list(range(10))})
    assert same.thinned(5).columns["grad"][-1] == 9


class Parsed(html.parser.HTMLParser):
    """The tags, attributes and texts of a page; raises if tags do not match."""

    VOID = ("meta", "input", "br", "hr", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def test_the_page_has_everything_and_needs_nothing() -> None:
    text = draw_html(recorded())
    page = Parsed(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text), "nothing is fetched"
    assert not {name for name, _ in page.attributes} & {"src", "href"}
    scripts = [data for tag, data in page.texts if tag == "script"]
    data = json.loads(scripts[0])
    assert [panel["tier"] for panel in data["panels"]] == ["host", "disk"]
    host, disk = data["panels"]
    assert [entry["kind"] for entry in host["kinds"]] == ["param", "grad", "activation", "odd"]
    assert max(map(sum, zip(*(entry["values"] for entry in host["kinds"]), strict=True))) == 160
    assert (host["predicted"], disk["predicted"]) == (220, None)
    assert host["resident"] == [[0.0, 100], [6.0, 250]] and disk["resident"] == []
    assert data["phases"][0] == ["forward", 0.5, 2.5]
    assert [1.5, "gathered blocks.<1>"] in data["events"] and not any("reduce" in event[1] for event in data["events"])
    cells = [data for tag, data in page.texts if tag == "td"]
    assert {"160 B", "300 B", "220 B", "odd (odd)", "kept for backward (activation)"} <= set(cells)
    assert ("h1", "</script> & <b>") in page.texts, "a title cannot break the page"


def test_the_picture_is_one() -> None:
    for timeline in (recorded(), Timeline("nothing", "host", lambda: 0.0)):
        timeline.note("host", "param", 0)
        content = draw_png(timeline)
        assert content.startswith(b"\x89PNG\r\n") and len(content) > 5000


# -- runs --------------------------------------------------------------------------------------------------------------


def built(**options: Any) -> tuple[sw.Run, GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=61, context=32, layers=3, heads=2, hidden=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return sharded(model, optimizer, stage=3, **options), model, optimizer


def step(run: sw.Run, model: GPT, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    tokens = torch.randint(0, 61, (8, 32), generator=generator(number))
    model(tokens, tokens).backward()
    run.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def observed(directory: str, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The second step of a run, recorded."""
    run, model, optimizer = built(**options)
    step(run, model, optimizer)
    run.measured_memory()  # puts the optimizer's states into the ledger
    run.ledger.reset_peak()
    before = set(threading.enumerate())
    with run.memory_timeline(os.path.join(directory, "step-1.5")) as timeline:
        step(run, model, optimizer, 1)
    assert set(threading.enumerate()) == before and not run.ledger.is_observed
    assert all(0 <= sample.time_s <= timeline.duration_s for sample in timeline.samples)
    exchange = run.transport.exchange_bytes
    for tier in Tier:
        peak = run.ledger.peak(tier) + exchange * (tier is Tier.HOST)
        assert timeline.peak_bytes(tier.value) == peak, (tier, peak)
        for kind in Kind:
            assert timeline.peak_bytes(tier.value, kind.value) == run.ledger.peak(tier, kind), (tier, kind)
    assert [phase.name for phase in timeline.phases] == ["forward", "backward", "step"]
    assert timeline.predicted == run.predicted_memory().by_kind() and len(timeline.resident) > 1
    assert {"gathered", "free", "reduce", "step"} <= {event.kind for event in timeline.events}
    assert run.ledger.now(Tier.HOST, Kind.ACTIVATION) == 0
    peaks = {f"{tier.value} {kind.value}": timeline.peak_bytes(tier.value, kind.value) for tier in Tier for kind in Kind}
    found = {**peaks, "predicted": timeline.predicted_bytes, "sum": timeline.peak_bytes("host")}
    with run.memory_timeline(os.path.join(directory, "step-2.html"), png=False) as timeline:
        step(run, model, optimizer, 2)
    run.close()
    return found, [file.name for file in timeline.files]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_the_recorded_step_is_what_the_ledger_saw(pool: RankPool, tmp_path: Path, where: str) -> None:
    options: dict[str, Any] = {}
    if where == "disk":
        options = {
            "offload": sw.Offload(params="disk", grads="disk", optimizer="disk", path=tmp_path, step_bytes=1 << 16),
            "activations": sw.Activations(offload="disk", path=tmp_path),
        }
    for number, (found, files) in enumerate(pool.run(observed, str(tmp_path), options)):
        tier = "disk" if where == "disk" else "host"
        assert all(found[f"{tier} {kind}"] > 0 for kind in ("param", "grad", "moment", "activation")), found
        assert found["host activation"] > 0 and (found["host moment"] > 0) == (where == "memory")
        assert found["sum"] <= found["predicted"]
        assert files == [f"step-2-rank{number}.html"]
        assert (tmp_path / f"step-1.5-rank{number}.png").read_bytes().startswith(b"\x89PNG")
        Parsed((tmp_path / f"step-1.5-rank{number}.html").read_text())


def test_the_first_step_shows_states_as_they_come(tmp_path: Path) -> None:
    run, model, optimizer = built()
    with run.memory_timeline(tmp_path / "first") as timeline:
        step(run, model, optimizer)
    assert [file.name for file in timeline.files] == ["first.html", "first.png"]
    moments = [sample.num_bytes for sample in timeline.samples if sample.kind == "moment" and sample.tier == "host"]
    assert moments[0] == 0 and moments[-1] == run.ledger.now(Tier.HOST, Kind.MOMENT) > 0
    assert "not given" not in run.report() and "not measured" not in run.report(), "activations were counted meanwhile"
    run.close()


def test_what_raises_inside_leaves_nothing(tmp_path: Path) -> None:
    run, model, optimizer = built(activations="units")
    num_hooks = len(optimizer._optimizer_step_post_hooks)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), run.memory_timeline(tmp_path / "step"):
        step(run, model, optimizer)
        raise ZeroDivisionError
    assert not run.ledger.is_observed and not list(tmp_path.iterdir())
    assert len(optimizer._optimizer_step_post_hooks) == num_hooks and set(threading.enumerate()) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with run.memory_timeline(tmp_path / "step") as timeline:
        step(run, model, optimizer)
    assert len(timeline.files) == 2
    run.close()


def test_what_cannot_be_drawn_is_refused_before_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, model, optimizer = built()
    reached = False
    missing = tmp_path / "no" / "step"
    with pytest.raises(ConfigError, match=r"there is no directory .*Make it first"), run.memory_timeline(missing):
        reached = True
    with run.memory_timeline(tmp_path / "outer", png=False):
        with pytest.raises(ConfigError, match="inside another one"), run.memory_timeline(tmp_path / "inner"):
            reached = True
        step(run, model, optimizer)
    monkeypatch.setattr(chart_module.importlib.util, "find_spec", lambda name: None)
    refused = pytest.raises(ConfigError, match=r"matplotlib, which is not installed.*pip install.*png=False")
    with refused, run.memory_timeline(tmp_path / "step"):
        reached = True
    with run.memory_timeline(tmp_path / "step", png=False) as timeline:
        step(run, model, optimizer)
    monkeypatch.undo()
    assert not reached and [file.name for file in timeline.files] == ["step.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outer.html", "step.html"]
    run.close()


def test_recording_changes_nothing(tmp_path: Path) -> None:
    found = []
    for records in (False, True):
        run, model, optimizer = built(activations="units")
        for number in range(3):
            if records:
                with run.memory_timeline(tmp_path / f"step-{number}", png=False):
                    step(run, model, optimizer, number)
            else:
                step(run, model, optimizer, number)
        found.append((run.full_state_dict(), run.ledger.peak(Tier.HOST, Kind.GRAD)))
        run.close()
    (plain, plain_grads), (recorded_state, recorded_grads) = found
    assert all(torch.equal(value, recorded_state[name]) for name, value in plain.items())
    assert plain_grads == recorded_grads, "a tied table's gradient is still held once"
