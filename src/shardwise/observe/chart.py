"""Draws a recording of memory as a picture, with matplotlib, which is imported only when a picture is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import io
from typing import Any

from shardwise.observe.text import format_bytes
from shardwise.observe.timeline import COLOURS, KINDS, PREDICTED_COLOUR, RESIDENT_COLOUR, Panel, Timeline

_PHASE_SHADES = {"forward": "#eef3fa", "backward": "#f8f1ea", "step": "#f1eef7"}
_WIDTH_INCHES, _FIRST_INCHES, _OTHER_INCHES = 12.0, 4.6, 2.2


def has_matplotlib() -> bool:
    """Whether a picture can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_png(timeline: Timeline) -> bytes:
    """The picture: a stacked chart for each tier that held anything."""
    panels = timeline.panels
    heights = [_FIRST_INCHES if panel.tier == timeline.tier else _OTHER_INCHES for panel in panels]
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(_WIDTH_INCHES, sum(heights) + 0.6), layout="constrained", dpi=110
    )
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    scale, unit = (1e3, "ms") if timeline.duration_s < 10 else (1.0, "s")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for number, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        _draw_panel(axis, panel.thinned(), timeline, scale, names_phases=number == 0)
    axes[-1].set_xlabel(f"{unit} since the recording began")
    figure.suptitle(timeline.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_panel(axis: Any, panel: Panel, timeline: Timeline, scale: float, *, names_phases: bool) -> None:
    end_s = timeline.duration_s
    times = [scale * time_s for time_s in (*panel.times_s, end_s)]
    below = [0] * len(times)
    handles = []
    for kind, values in panel.columns.items():
        above = [low + value for low, value in zip(below, (*values, values[-1]), strict=True)]
        label = f"{KINDS.get(kind, kind)} ({kind}), {format_bytes(max(values))}"
        colour = COLOURS.get(kind, "#999999")
        handles.append(axis.fill_between(times, below, above, step="post", color=colour, linewidth=0, label=label))
        below = above
    handles.reverse()  # the legend reads like the chart
    most = max(below)
    if panel.tier == timeline.tier and timeline.predicted:
        num_bytes = timeline.predicted_bytes
        label = f"predicted by the formula, {format_bytes(num_bytes)}"
        handles.append(axis.axhline(num_bytes, color=PREDICTED_COLOUR, linestyle=(0, (6, 3)), linewidth=1.6, label=label))
        most = max(most, num_bytes)
    if panel.tier == "host" and timeline.resident:
        before = format_bytes(timeline.uncounted_bytes)
        label = f"resident memory, without {before} that\nwere there before (interpreter, libraries)"
        xs, ys = [scale * time_s for time_s, _ in timeline.resident], [num_bytes for _, num_bytes in timeline.resident_above]
        handles += axis.plot(xs, ys, color=RESIDENT_COLOUR, linewidth=0.9, label=label)
        most = max(most, *ys)
    axis.set_xlim(0, scale * end_s or 1)
    axis.set_ylim(0, 1.09 * most or 1)
    axis.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axis.set_title(f"{panel.tier}: at most {format_bytes(max(panel.totals))} at once", loc="left", fontsize=10)
    axis.grid(axis="y", color="#00000018", linewidth=0.7)
    axis.set_axisbelow(False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for phase in timeline.phases:
        low, high = scale * phase.begin_s, scale * phase.end_s
        axis.axvspan(low, high, color=_PHASE_SHADES[phase.name], zorder=-10, linewidth=0)
        axis.axvline(high, color="#00000030", linewidth=0.7)
        axis.axvline(low, color="#00000030", linewidth=0.7)
        if names_phases and phase.end_s - phase.begin_s > 0.04 * end_s:
            place = axis.get_xaxis_transform()
            axis.text((low + high) / 2, 0.985, phase.name, transform=place, ha="center", va="top", fontsize=9, color="#444444")
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9, borderaxespad=0)
