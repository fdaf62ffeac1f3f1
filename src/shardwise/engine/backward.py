"""Is a backward running, and when does it end?"""

from __future__ import annotations

from collections.abc import Callable

import torch


class EndOfBackward:
    """The callback that autograd runs when a backward has ended; if the backward raises, autograd deletes it uncalled."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self) -> None:
        """The backward has ended."""
        self._function()


def is_inside_autograd() -> bool:
    """Whether this thread is inside a backward, which includes hooks and recomputation."""
    return torch._C._current_graph_task_id() != -1
