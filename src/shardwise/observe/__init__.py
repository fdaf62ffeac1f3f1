"""What did happen?

Public names: `EventLog`, `Event`, `timed_hook` (named events in order); `pause`, `delays` (where tests inject delays);
`process_memory`, `ProcessMemory`, `MemorySampler` (resident bytes, page cache excluded); `noting_saved` (what autograd saves);
`Timeline`, `Sample`, `Phase`, `Panel`, `draw_png`, `has_matplotlib`, `draw_html` (bytes over time, recorded and drawn);
`format_bytes`, `format_table`.

Invariant: this room imports no other room and knows nothing of Units, ranks or stages.
"""

from shardwise.observe.activations import noting_saved
from shardwise.observe.chart import draw_png, has_matplotlib
from shardwise.observe.events import Event, EventLog, delays, pause, timed_hook
from shardwise.observe.memory import MemorySampler, ProcessMemory, process_memory
from shardwise.observe.page import draw_html
from shardwise.observe.text import format_bytes, format_table
from shardwise.observe.timeline import Panel, Phase, Sample, Timeline

__all__ = [
    "Event",
    "EventLog",
    "MemorySampler",
    "Panel",
    "Phase",
    "ProcessMemory",
    "Sample",
    "Timeline",
    "delays",
    "draw_html",
    "draw_png",
    "format_bytes",
    "format_table",
    "has_matplotlib",
    "noting_saved",
    "pause",
    "process_memory",
    "timed_hook",
]
