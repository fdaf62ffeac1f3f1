"""Tickets: every asynchronous start returns one, and `wait()` ends it.

A `Lane` is one background thread that runs its jobs in the order they were given. Lanes never call
back into a Run; they only move bytes.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


class Ticket(ABC):
    """Something that was started and must be waited for exactly where its result is needed."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the work is done; raise what the work raised. Calling twice is allowed."""

    def is_done_within(self, patience_s: float) -> bool:
        """Whether `wait()` would not block for longer than `patience_s`."""
        return True

    @property
    def span(self) -> tuple[float, float] | None:
        """When a lane began and ended the work (`time.perf_counter`); None if no lane did."""
        return None


class Done(Ticket):
    """A Ticket for work that was already finished when it was handed out."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class Deferred(Ticket):
    """A Ticket whose completion runs in the waiting thread, once."""

    def __init__(self, finish: Callable[[], None], is_done: Callable[[], bool] | None = None) -> None:
        """`is_done`, if given, says whether `finish` would not block."""
        self._finish: Callable[[], None] | None = finish
        self._is_done = is_done

    def is_done_within(self, patience_s: float) -> bool:
        """Ask until it is, or patience ends."""
        if self._is_done is None or self._finish is None:
            return True
        deadline = time.monotonic() + patience_s
        while not self._is_done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)
        return True

    def wait(self) -> None:
        """Run the completion if nobody has."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class Returning(Ticket):
    """Another Ticket, and what is given back when it has ended, well or not. A wait that was interrupted gives nothing back."""

    def __init__(self, ticket: Ticket, give_back: Callable[[], None]) -> None:
        self._ticket = ticket
        self._give_back: Callable[[], None] | None = give_back

    @property
    def span(self) -> tuple[float, float] | None:
        """The other Ticket's."""
        return self._ticket.span

    def is_done_within(self, patience_s: float) -> bool:
        """Whether the other Ticket is."""
        return self._ticket.is_done_within(patience_s)

    def wait(self) -> None:
        """Wait for it, and give back once."""
        try:
            self._ticket.wait()
        except Exception:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            give_back()


class Chain(Ticket):
    """A Ticket, and those that its work started."""

    def __init__(self, first: Ticket, started: Sequence[Ticket]) -> None:
        self._first = first
        self._started = started

    def is_done_within(self, patience_s: float) -> bool:
        """Whether all of it is, or nearly."""
        return self._first.is_done_within(patience_s) and all(ticket.is_done_within(patience_s) for ticket in self._started)

    def wait(self) -> None:
        """Wait for the first, then for the rest."""
        self._first.wait()
        for ticket in self._started:
            ticket.wait()


class _Job(Ticket):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._span: tuple[float, float] | None = None

    @property
    def span(self) -> tuple[float, float] | None:
        return self._span

    def run(self) -> None:
        begin = time.perf_counter()
        try:
            if self._work is not None:
                self._work()
        except BaseException as error:  # handed to the waiter, whatever it is
            self._error = error
        finally:
            self._span = (begin, time.perf_counter())
            self._work = None  # the closure holds gradients: drop them before anyone wakes
            self._ended.set()

    def is_done_within(self, patience_s: float) -> bool:
        return self._ended.wait(patience_s)

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


_PATIENCE_S = 1.0  # for work that is under way when the script ends
_LIMIT_S = 5.0  # for it to end after it was interrupted
_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()  # those whose thread was started


class Lane:
    """One daemon thread and a queue of jobs, run strictly in order.

    `interrupt`, if given, makes a job that waits for other ranks raise; it is called when the script ends in the middle of one.
    """

    def __init__(self, name: str, interrupt: Callable[[], None] | None = None) -> None:
        self._name = name
        self._interrupt = interrupt
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Job | None = None
        weakref.finalize(self, self._jobs.put, None)  # a run that nobody closed takes its thread along

    def submit(self, work: Callable[[], None]) -> Ticket:
        """Queue `work`; its Ticket re-raises whatever it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
            _lanes.add(self)
        self._last = job = _Job(work)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=10.0)
            if not self._thread.is_alive():
                self._thread = None

    @property
    def is_running(self) -> bool:
        """Whether there is a thread to end."""
        return self._thread is not None and self._thread.is_alive()

    def interrupt(self, patience_s: float) -> None:
        """Unless what is queued ends within `patience_s`, have it raise."""
        if self._last is not None and not self._last.is_done_within(patience_s) and self._interrupt is not None:
            self._interrupt()

    def end(self) -> None:
        """End the thread, whatever its jobs came to."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=_LIMIT_S)


@atexit.register
def _end_lanes() -> None:
    """No thread of ours may be inside torch when the interpreter is finalized.

    Python ends a daemon thread when it next asks for the interpreter's lock, by unwinding its stack. Inside C++ code that may
    not be unwound this ends the process with SIGABRT.
    """
    lanes = [lane for lane in _lanes if lane.is_running]
    deadline = time.monotonic() + _PATIENCE_S
    for lane in lanes:
        lane.interrupt(max(deadline - time.monotonic(), 0.0))
    for lane in lanes:
        lane.end()


def _work_off(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
