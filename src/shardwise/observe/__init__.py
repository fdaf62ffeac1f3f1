"""What did happen?

Public names: `EventLog`, `Event`, `timed_hook` (named events in order); `pause`, `delays` (where tests inject delays);
`process_memory`, `ProcessMemory`, `MemorySampler` (resident bytes, page cache excluded); `saved_activation_bytes`;
`format_bytes`, `format_table`.

Invariant: this room imports no other room and knows nothing of Units, ranks or stages.
"""

from shardwise.observe.activations import saved_activation_bytes
from shardwise.observe.events import Event, EventLog, delays, pause, timed_hook
from shardwise.observe.memory import MemorySampler, ProcessMemory, process_memory
from shardwise.observe.text import format_bytes, format_table

__all__ = [
    "Event",
    "EventLog",
    "MemorySampler",
    "ProcessMemory",
    "delays",
    "format_bytes",
    "format_table",
    "pause",
    "process_memory",
    "saved_activation_bytes",
    "timed_hook",
]
