"""Draws a recording of memory as a page to look around in: one file of HTML that needs nothing else, also without a network.

The figures are in the page as JSON, and a table of them as text; the script at its end draws the charts.
"""

from __future__ import annotations

import html
import json

from shardwise.observe.text import format_bytes
from shardwise.observe.timeline import COLOURS, KINDS, PREDICTED_COLOUR, RESIDENT_COLOUR, Panel, Timeline

_OTHER_COLOUR = "#999999"


def draw_html(timeline: Timeline) -> str:
    """The page, as text."""
    panels = timeline.panels
    data = {
        "duration": timeline.duration_s,
        "panels": [_panel(panel.thinned(), timeline) for panel in panels],
        "phases": [[phase.name, phase.begin_s, phase.end_s] for phase in timeline.phases],
        "events": [[round(e.time_s, 7), f"{e.kind} {e.subject}".strip()] for e in timeline.events if not e.lane],
        "predictedColour": PREDICTED_COLOUR,
        "residentColour": RESIDENT_COLOUR,
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # nothing in it can end the script
    page = _PAGE.replace("@TITLE@", html.escape(timeline.title)).replace(
        "@TABLES@", "\n".join(_table(p, timeline) for p in panels)
    )
    return page.replace("@DATA@", text)


def _panel(panel: Panel, timeline: Timeline) -> dict[str, object]:
    is_own, is_host = panel.tier == timeline.tier, panel.tier == "host"
    return {
        "tier": panel.tier,
        "times": [round(time_s, 7) for time_s in panel.times_s],
        "kinds": [
            {"kind": kind, "name": KINDS.get(kind, kind), "colour": COLOURS.get(kind, _OTHER_COLOUR), "values": values}
            for kind, values in panel.columns.items()
        ],
        "predicted": timeline.predicted_bytes if is_own and timeline.predicted else None,
        "resident": [[round(time_s, 7), num_bytes] for time_s, num_bytes in timeline.resident_above] if is_host else [],
        "uncounted": timeline.uncounted_bytes if is_host else 0,
    }


def _table(panel: Panel, timeline: Timeline) -> str:
    """Bytes at the beginning, at most, at the fullest moment, at the end, and as predicted; exchange buffers count as buffers."""
    totals = panel.totals
    fullest = totals.index(max(totals))
    has_predicted = panel.tier == timeline.tier and bool(timeline.predicted)
    rows = []
    for kind, values in reversed(panel.columns.items()):
        predicted = timeline.predicted.get(kind) if has_predicted else None
        figures = [format_bytes(n) for n in (values[0], max(values), values[fullest], values[-1])]
        figures += [("" if predicted is None else format_bytes(predicted)) if kind != "exchange" else "in buffer"] * has_predicted
        swatch = f'<i style="background:{COLOURS.get(kind, _OTHER_COLOUR)}"></i>'
        rows.append(f"<tr><td>{swatch}{html.escape(KINDS.get(kind, kind))} ({html.escape(kind)})</td>{_cells(figures)}</tr>")
    sums = [format_bytes(n) for n in (totals[0], max(totals), totals[fullest], totals[-1])]
    sums += [format_bytes(timeline.predicted_bytes)] * has_predicted
    head = ["at the beginning", "most", "at the fullest moment", "at the end", *["predicted"] * has_predicted]
    return (
        f"<table><caption>Bytes, {html.escape(panel.tier)}</caption><thead><tr><th></th>"
        + "".join(f"<th>{name}</th>" for name in head)
        + f"</tr></thead><tbody>{''.join(rows)}<tr class=sum><td>together</td>{_cells(sums)}</tr></tbody></table>"
    )


def _cells(figures: list[str]) -> str:
    return "".join(f"<td>{figure}</td>" for figure in figures)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>@TITLE@</title>
<style>
  body { font: 14px/1.45 system-ui, sans-serif; color: #222; background: #fff; }
  body { margin: 24px auto; max-width: 1180px; padding: 0 16px; }
  h1 { font-size: 18px; margin: 0 0 2px; } h2 { font-size: 14px; margin: 18px 0 4px; font-weight: 600; }
  p { margin: 0 0 8px; color: #666; }
  svg { display: block; width: 100%; cursor: crosshair; user-select: none; }
  svg text { font-size: 11px; fill: #555; }
  .legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 4px 0 6px 66px; }
  .legend label { cursor: pointer; white-space: nowrap; } .legend input { margin: 0 5px 0 0; vertical-align: -1px; }
  i { display: inline-block; width: 11px; height: 11px; margin-right: 6px; border-radius: 2px; vertical-align: -1px; }
  i.line { height: 0; border-radius: 0; border-top: 2px solid; vertical-align: 4px; width: 16px; }
  #tip { position: fixed; display: none; pointer-events: none; background: #fffffff2; border: 1px solid #bbb; border-radius: 5px;
         box-shadow: 0 2px 8px #0002; padding: 7px 10px; font-size: 12px; z-index: 9; }
  #tip table { margin: 4px 0 0; } #tip td { border: 0; padding: 0 0 0 14px; } #tip td:first-child { padding: 0; }
  table { border-collapse: collapse; margin: 22px 0 0; font-variant-numeric: tabular-nums; }
  caption { text-align: left; font-weight: 600; padding-bottom: 4px; }
  th { font-weight: 500; color: #666; } th, td { text-align: right; padding: 3px 0 3px 26px; border-bottom: 1px solid #e6e6e6; }
  td:first-child { text-align: left; padding-left: 0; } .sum td { font-weight: 600; border: 0; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
<p>Point at a moment to read it. Drag to look closer, double-click to see everything. Click a name to hide it.</p>
<div id="charts"><svg width="0" height="0" hidden></svg></div>
<div id="tip"></div>
@TABLES@
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const charts = document.getElementById("charts"), tip = document.getElementById("tip");
const spaces = charts.firstElementChild.namespaceURI;
const LEFT = 66, RIGHT = 8, TOP = 20, BOTTOM = 24, WIDTH = 1148;
const SHADES = { forward: "#eef3fa", backward: "#f8f1ea", step: "#f1eef7" };
let view = [0, data.duration || 1e-9];

function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(n) < 1000) return n.toFixed(unit === "B" ? 0 : 1) + " " + unit;
    n /= 1000;
  }
  return n.toFixed(2) + " TB";
}
function time(s) {
  const span = view[1] - view[0];
  if (data.duration < 10) return (1e3 * s).toFixed(span < 0.01 ? 2 : span < 0.1 ? 1 : 0) + " ms";
  return s.toFixed(span < 1 ? 3 : 2) + " s";
}
function last(list, at, key) {  // the last entry that is not after `at`
  let low = 0, high = list.length;
  while (low < high) { const mid = (low + high) >> 1; if (key(list[mid]) <= at) low = mid + 1; else high = mid; }
  return low - 1;
}
function ticks(low, high) {  // round figures for an axis
  const unit = 10 ** Math.floor(Math.log10((high - low) / 8));
  const wide = unit * [1, 2, 5, 10].find((n) => (high - low) / (n * unit) <= 8), first = Math.ceil(low / wide);
  return Array.from({ length: Math.floor(high / wide) - first + 1 }, (_, n) => (first + n) * wide);
}
function make(name, attributes, parent, text) {
  const node = document.createElementNS(spaces, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

class Chart {
  constructor(panel, number) {
    this.panel = panel;
    this.hidden = new Set();
    this.height = number ? 170 : 400;
    const title = document.createElement("h2");
    const totals = panel.times.map((_, at) => panel.kinds.reduce((sum, kind) => sum + kind.values[at], 0));
    title.textContent = panel.tier + ": at most " + bytes(totals.reduce((most, n) => Math.max(most, n), 0)) + " at once";
    const legend = document.createElement("div");
    legend.className = "legend";
    for (const kind of [...panel.kinds].reverse()) this.entry(legend, kind.kind, kind.name, kind.colour, false);
    if (panel.predicted !== null) this.entry(legend, "predicted", "predicted by the formula", data.predictedColour, true);
    if (panel.resident.length) {
      const name = "resident memory, without " + bytes(panel.uncounted) + " that were there before (interpreter, libraries)";
      this.entry(legend, "resident", name, data.residentColour, true);
    }
    this.svg = document.createElementNS(spaces, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${this.height}`);
    charts.append(title, legend, this.svg);
    this.svg.addEventListener("mousemove", (event) => this.point(event));
    this.svg.addEventListener("mouseleave", () => { tip.style.display = "none"; this.drawn(null); });
    this.svg.addEventListener("mousedown", (event) => { this.from = this.at(event); event.preventDefault(); });
    this.svg.addEventListener("mouseup", (event) => {
      const ends = [this.from, this.at(event)].sort((a, b) => a - b);
      this.from = null;
      if (ends[1] - ends[0] > 0.005 * (view[1] - view[0])) { view = ends; drawAll(); }
    });
    this.svg.addEventListener("dblclick", () => { view = [0, data.duration || 1e-9]; drawAll(); });
  }
  entry(legend, key, text, colour, isLine) {
    const label = document.createElement("label"), box = document.createElement("input"), swatch = document.createElement("i");
    box.type = "checkbox";
    box.checked = true;
    if (isLine) { swatch.className = "line"; swatch.style.color = colour; } else swatch.style.background = colour;
    box.addEventListener("change", () => { box.checked ? this.hidden.delete(key) : this.hidden.add(key); this.draw(); });
    label.append(box, swatch, text);
    legend.append(label);
  }
  x(s) { return LEFT + (s - view[0]) / (view[1] - view[0]) * (WIDTH - LEFT - RIGHT); }
  y(n) { return this.height - BOTTOM - n / this.most * (this.height - TOP - BOTTOM); }
  at(event) {
    const box = this.svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * WIDTH;
    return Math.min(Math.max(view[0] + (x - LEFT) / (WIDTH - LEFT - RIGHT) * (view[1] - view[0]), view[0]), view[1]);
  }
  draw() {
    const { panel, svg, hidden } = this, shown = panel.kinds.filter((kind) => !hidden.has(kind.kind));
    svg.replaceChildren();
    const first = Math.max(last(panel.times, view[0], (s) => s), 0), end = last(panel.times, view[1], (s) => s) + 1;
    const times = panel.times.slice(first, end), below = times.map(() => 0), areas = [];
    for (const kind of shown) {
      const low = below.slice();
      times.forEach((_, at) => { below[at] += kind.values[first + at]; });
      areas.push([kind, low, below.slice()]);
    }
    const resident = hidden.has("resident") ? [] : panel.resident.filter(([s]) => s >= view[0] && s <= view[1]);
    const predicted = hidden.has("predicted") ? null : panel.predicted;
    this.most = 1.06 * Math.max(1, predicted || 0, below.reduce((most, n) => Math.max(most, n), 0),
      resident.reduce((most, [, n]) => Math.max(most, n), 0));
    const clip = "clip-" + panel.tier;
    make("rect", { x: LEFT, y: 0, width: WIDTH - LEFT - RIGHT, height: this.height }, make("clipPath", { id: clip }, svg));
    const inside = make("g", { "clip-path": `url(#${clip})` }, svg);
    for (const [name, begin, finish] of data.phases) {
      const x = this.x(begin), wide = Math.max(this.x(finish) - x, 0), height = this.height - TOP - BOTTOM + 16;
      make("rect", { x, y: TOP - 16, width: wide, height, fill: SHADES[name] || "#f4f4f4" }, inside);
      const low = Math.max(x, LEFT), high = Math.min(x + wide, WIDTH - RIGHT);
      if (high - low > 45) make("text", { x: (low + high) / 2, y: TOP - 5, "text-anchor": "middle" }, inside, name);
    }
    for (const [kind, low, high] of areas) {
      const top = [], bottom = [];
      times.forEach((s, at) => {
        const from = this.x(at ? s : Math.max(s, view[0])).toFixed(2);
        const to = this.x(at + 1 < times.length ? times[at + 1] : view[1]).toFixed(2);
        top.push(`${from} ${this.y(high[at]).toFixed(2)} ${to} ${this.y(high[at]).toFixed(2)}`);
        bottom.push(`${to} ${this.y(low[at]).toFixed(2)} ${from} ${this.y(low[at]).toFixed(2)}`);
      });
      make("path", { d: "M" + top.join(" ") + " " + bottom.reverse().join(" ") + "Z", fill: kind.colour }, inside);
    }
    for (const n of ticks(0, this.most)) {
      make("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(n), y2: this.y(n), stroke: "#0000001a" }, svg);
      make("text", { x: LEFT - 6, y: this.y(n) + 4, "text-anchor": "end" }, svg, bytes(n));
    }
    for (const [, begin, finish] of data.phases) {
      for (const s of [begin, finish]) {
        make("line", { x1: this.x(s), x2: this.x(s), y1: TOP - 16, y2: this.height - BOTTOM, stroke: "#00000033" }, inside);
      }
    }
    for (const s of ticks(...view)) {
      make("line", { x1: this.x(s), x2: this.x(s), y1: this.height - BOTTOM, y2: this.height - BOTTOM + 4, stroke: "#888" }, svg);
      if (this.x(s) < WIDTH - 26) make("text", { x: this.x(s), y: this.height - 5, "text-anchor": "middle" }, svg, time(s));
    }
    if (predicted !== null) {
      const line = { x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(predicted), y2: this.y(predicted) };
      make("line", { ...line, stroke: data.predictedColour, "stroke-width": 1.6, "stroke-dasharray": "8 4" }, inside);
    }
    const points = resident.map(([s, n]) => this.x(s).toFixed(2) + "," + this.y(n).toFixed(2)).join(" ");
    make("polyline", { points, fill: "none", stroke: data.residentColour, "stroke-width": 1 }, inside);
    this.cursor = make("g", {}, inside);
  }
  drawn(s) {  // the line under the pointer, and what is being dragged over
    this.cursor.replaceChildren();
    if (s === null) return;
    if (this.from != null) {
      const low = this.x(Math.min(this.from, s)), wide = Math.abs(this.x(s) - this.x(this.from));
      make("rect", { x: low, y: TOP, width: wide, height: this.height - TOP - BOTTOM, fill: "#00000014" }, this.cursor);
    }
    make("line", { x1: this.x(s), x2: this.x(s), y1: TOP - 16, y2: this.height - BOTTOM, stroke: "#000", "stroke-width": 0.8 },
      this.cursor);
  }
  point(event) {
    const s = this.at(event), { panel, hidden } = this, at = Math.max(last(panel.times, s, (t) => t), 0);
    this.drawn(s);
    const phase = data.phases.find(([, begin, finish]) => begin <= s && s <= finish);
    const happened = data.events[last(data.events, s, (e) => e[0])];
    const rows = [];
    let sum = 0;
    for (const kind of panel.kinds) {
      if (hidden.has(kind.kind)) continue;
      sum += kind.values[at];
      rows.unshift([kind.colour, false, kind.name, kind.values[at]]);
    }
    rows.push([null, false, "together", sum]);
    const lines = [["predicted", data.predictedColour, panel.predicted]];
    const resident = panel.resident[Math.max(last(panel.resident, s, (r) => r[0]), 0)];
    if (resident) lines.push(["resident", data.residentColour, resident[1]]);
    for (const [name, colour, n] of lines) if (n !== null && !hidden.has(name)) rows.push([colour, true, name, n]);
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = time(s) + (phase ? ", " + phase[0] : "");
    const what = document.createElement("div");
    what.textContent = happened ? "after: " + happened[1] : "";
    const table = document.createElement("table");
    for (const [colour, isLine, name, n] of rows) {
      const row = table.insertRow(), cell = row.insertCell(), swatch = document.createElement("i");
      if (isLine) { swatch.className = "line"; swatch.style.color = colour; } else swatch.style.background = colour || "none";
      cell.append(swatch, name);
      row.insertCell().textContent = bytes(n);
      if (colour === null) row.style.fontWeight = "600";
    }
    tip.append(head, what, table);
    tip.style.display = "block";
    const right = event.clientX + tip.offsetWidth + 30 > innerWidth;
    tip.style.left = (right ? event.clientX - tip.offsetWidth - 16 : event.clientX + 16) + "px";
    tip.style.top = Math.max(Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8), 4) + "px";
  }
}
const all = data.panels.map((panel, number) => new Chart(panel, number));
function drawAll() { for (const chart of all) chart.draw(); }
drawAll();
</script>
</body>
</html>
"""
