"""How much memory was held when? A recording of one step, and the sums that are drawn of it.

Filled by `run.memory_timeline()`; drawn by `chart.py` (a picture) and `page.py` (a page to look around in). Knows tiers and kinds
by their names only, and opens no file.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.observe.events import Event

KINDS = {
    "param": "parameters",
    "master": "masters",
    "moment": "optimizer states",
    "exchange": "exchange buffers",
    "buffer": "gathered Units and buffers",
    "grad": "gradients",
    "activation": "kept for backward",
    "spare": "unused space for activations",
}
"""What each kind is, from the bottom of a chart to its top: what changes most is on top."""
COLOURS = {
    "param": "#3f6fb0",
    "master": "#85aedb",
    "moment": "#8f73bd",
    "exchange": "#b7a58a",
    "buffer": "#e3bd4e",
    "grad": "#dd7f43",
    "activation": "#57a170",
    "spare": "#d5d8dd",
}
PREDICTED_COLOUR, RESIDENT_COLOUR = "#b3261e", "#222222"
MAX_COLUMNS = 3000
"""A chart has at most about this many moments; the largest of each short span is drawn."""


class Sample(NamedTuple):
    """From `time_s` on, this many bytes of one kind are held on one tier. Times are in seconds since the recording began."""

    time_s: float
    tier: str
    kind: str
    num_bytes: int


class Phase(NamedTuple):
    """A forward pass, a backward or an optimizer step."""

    name: str
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Panel:
    """One tier over time: `columns[kind][i]` bytes are held from `times_s[i]` until the next."""

    tier: str
    times_s: list[float]
    columns: dict[str, list[int]]

    @property
    def totals(self) -> list[int]:
        """The sum of all kinds at each moment."""
        return [sum(values) for values in zip(*self.columns.values(), strict=True)]

    def thinned(self, limit: int = MAX_COLUMNS) -> Panel:
        """The same with fewer moments: of every short span the first, the largest and the last."""
        if len(self.times_s) <= limit:
            return self
        totals, span_s = self.totals, (self.times_s[-1] - self.times_s[0]) * 3 / limit
        kept: set[int] = set()
        start = 0
        while start < len(totals):
            end = max(bisect.bisect_right(self.times_s, self.times_s[start] + span_s), start + 1)
            kept |= {start, max(range(start, end), key=totals.__getitem__), end - 1}
            start = end
        rows = sorted(kept)
        return Panel(
            self.tier,
            [self.times_s[row] for row in rows],
            {kind: [values[row] for row in rows] for kind, values in self.columns.items()},
        )


class Timeline:
    """What was held, when, during one recording."""

    def __init__(self, title: str, tier: str, clock: Callable[[], float]) -> None:
        """`tier`: that of the device's own memory, which the formula is about. `clock`: the one of the events."""
        self.title, self.tier = title, tier
        self.samples: list[Sample] = []
        """Every change of every tier and kind, in the order of time."""
        self.resident: list[tuple[float, int]] = []
        """(seconds, bytes) of this process in memory, as the kernel counts them; empty where it does not tell."""
        self.events: list[Event] = []
        """What the run did meanwhile; times in seconds since the recording began."""
        self.predicted: dict[str, int] = {}
        """What the memory formula says, by kind."""
        self.duration_s = 0.0
        self.files: tuple[Path, ...] = ()
        """What was written at the end of the recording."""
        self._clock = clock
        self._begin_s: float | None = None

    def begin(self) -> None:
        """From now on time counts; what was noted before was held from the beginning."""
        self._begin_s = self._clock()

    def note(self, tier: str, kind: str, num_bytes: int) -> None:
        """So many bytes are held from now on. Safe for several threads."""
        self.samples.append(Sample(self._now(), tier, kind, num_bytes))

    def note_resident(self, num_bytes: int) -> None:
        """So many bytes of this process are in memory."""
        self.resident.append((self._now(), num_bytes))

    def _now(self) -> float:
        return 0.0 if self._begin_s is None else self._clock() - self._begin_s

    def end(self, events: Iterable[Event]) -> None:
        """The recording has ended; `events` may have older ones."""
        begin = self._begin_s or 0.0
        self.duration_s = self._now()
        self.samples.sort(key=lambda sample: sample.time_s)
        self.events = [event._replace(time_s=event.time_s - begin) for event in events if event.time_s >= begin]
        self.events.sort(key=lambda event: event.time_s)

    # -- what is drawn ----------------------------------------------------------------------------------------

    @property
    def panels(self) -> list[Panel]:
        """One for each tier that held anything, that of the device first."""
        used = {sample.tier for sample in self.samples if sample.num_bytes}
        names = dict.fromkeys([self.tier, *(sample.tier for sample in self.samples if sample.tier in used)])
        return [_panel(self.samples, tier) for tier in names]

    def peak_bytes(self, tier: str, kind: str | None = None) -> int:
        """The most that was held at once on a tier, of one kind or of all together."""
        for panel in self.panels:
            if panel.tier == tier:
                return max(panel.totals if kind is None else panel.columns.get(kind, [0]))
        return 0

    @property
    def predicted_bytes(self) -> int:
        """The sum of the formula."""
        return sum(self.predicted.values())

    @property
    def phases(self) -> list[Phase]:
        """Forward passes, backwards and steps."""
        return find_phases(self.events, self.duration_s)

    @property
    def uncounted_bytes(self) -> int:
        """Resident at the beginning beside what was counted: the interpreter, libraries, and what else the process had."""
        if not self.resident:
            return 0
        counted = next((panel.totals[0] for panel in self.panels if panel.tier == "host"), 0)
        return max(self.resident[0][1] - counted, 0)

    @property
    def resident_above(self) -> list[tuple[float, int]]:
        """Resident bytes without the uncounted ones: comparable with the sum of all kinds in host memory."""
        return [(time_s, max(num_bytes - self.uncounted_bytes, 0)) for time_s, num_bytes in self.resident]


def _panel(samples: Sequence[Sample], tier: str) -> Panel:
    mine = [sample for sample in samples if sample.tier == tier]
    found = {sample.kind for sample in mine if sample.num_bytes}
    kinds = [kind for kind in KINDS if kind in found] + sorted(found - set(KINDS)) or ["param"]
    now = dict.fromkeys(kinds, 0)
    times: list[float] = []
    rows: list[list[int]] = []
    for sample in mine:
        if sample.kind not in now:
            continue
        now[sample.kind] = sample.num_bytes
        if times and times[-1] == sample.time_s:
            rows[-1] = list(now.values())
        else:
            times.append(sample.time_s)
            rows.append(list(now.values()))
    return Panel(tier, times, {kind: [row[at] for row in rows] for at, kind in enumerate(kinds)})


_ENDS = {"forward end": "forward", "backward end": "backward"}


def find_phases(events: Iterable[Event], duration_s: float) -> list[Phase]:
    """When forward passes, backwards and steps ran; one that has not ended lasts until the end."""
    found: list[Phase] = []
    open_since: dict[str, float] = {}
    for event in events:
        if event.lane:
            continue
        if event.kind in _ENDS.values():
            open_since.setdefault(event.kind, event.time_s)
        elif event.kind in _ENDS:
            found.append(Phase(_ENDS[event.kind], open_since.pop(_ENDS[event.kind], 0.0), event.time_s))
        elif event.kind == "update":
            open_since["step"] = max(event.time_s - event.duration_s, 0.0)
        elif event.kind == "step":
            found.append(Phase("step", open_since.pop("step", event.time_s), event.time_s))
    found += [Phase(name, begin_s, duration_s) for name, begin_s in open_since.items()]
    return sorted(found, key=lambda phase: phase.begin_s)
