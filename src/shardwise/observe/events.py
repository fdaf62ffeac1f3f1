"""Records named events in the order in which they happened, and marks where tests may inject delays.

Called by every room on its hot path, so an event is one tuple in a bounded deque.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Event(NamedTuple):
    """One event: when it ended (seconds, monotonic), its kind, its Unit, how long it took, and on which Lane it ran."""

    time_s: float
    kind: str
    subject: str
    duration_s: float = 0.0
    lane: str = ""
    """Empty for the training thread."""


class EventLog:
    """A bounded record of events; the oldest are dropped."""

    def __init__(self, limit: int = 20_000, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` returns the time in seconds; a dry run passes its own."""
        self.now = clock
        self._events: deque[Event] = deque(maxlen=limit)
        self.is_detailed = False
        """Whether every hook records its duration too. For profiles only: it costs a few microseconds per hook."""

    def emit(self, kind: str, subject: str = "", since: float | None = None) -> None:
        """Record an event that ends now. `since` is the value of `now()` at its start; None: it has no duration."""
        now = self.now()
        self._events.append(Event(now, kind, subject, 0.0 if since is None else now - since))

    def emit_span(self, kind: str, subject: str, span: tuple[float, float] | None, lane: str) -> None:
        """Record work that ran on a Lane. Does nothing if `span` is None."""
        if span is not None:
            self._events.append(Event(span[1], kind, subject, span[1] - span[0], lane))

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._events.clear()

    def listing(self, *kinds: str) -> list[tuple[str, str]]:
        """(kind, subject) of the training thread's events in order; only of the given kinds, if any are given."""
        return [(e.kind, e.subject) for e in self._events if not e.lane and (not kinds or e.kind in kinds)]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)


class _HasEvents(Protocol):
    events: EventLog


_S = TypeVar("_S", bound=_HasEvents)


def timed_hook(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Decorator for methods that hooks call on the hot path: records their duration if `events.is_detailed`."""

    @functools.wraps(method)
    def timed(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not self.events.is_detailed:
            return method(self, *args, **kwargs)
        begin = self.events.now()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.events.emit("hook", method.__name__, since=begin)

    return timed


_delay: Callable[[str], None] | None = None


def pause(edge: str) -> None:
    """Mark an asynchronous edge: a point where work is started or waited for. Does nothing unless a test injects delays."""
    if _delay is not None:
        _delay(edge)


@contextlib.contextmanager
def delays(delay: Callable[[str], None]) -> Iterator[None]:
    """Inside the context, call `delay(edge)` at every asynchronous edge of this process."""
    global _delay
    before, _delay = _delay, delay
    try:
        yield
    finally:
        _delay = before
