"""When is it done? Every asynchronous operation returns a Ticket when it starts; `wait()` returns when it has ended.

A `Lane` is one background thread that runs its jobs in the order in which they were submitted. Jobs only move
bytes; they never call back into a Run.
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
    """An operation that was started. Call `wait()` where its result is needed."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the work is done, and raise its error if it failed. May be called more than once."""

    def is_done_within(self, patience_s: float) -> bool:
        """Wait up to `patience_s` for the work to end; return whether it has. Tickets that cannot tell return True."""
        return True

    @property
    def span(self) -> tuple[float, float] | None:
        """Start and end of the work (`time.perf_counter`), if it ran on a Lane and has ended; else None."""
        return None


class Done(Ticket):
    """A Ticket for work that is already done."""

    def wait(self) -> None:
        """Return at once."""


class Deferred(Ticket):
    """A Ticket whose `finish` function runs once, in the thread that waits."""

    def __init__(self, finish: Callable[[], None], is_done: Callable[[], bool] | None = None) -> None:
        """`is_done`, if given, returns whether `finish` can run without blocking."""
        self._finish: Callable[[], None] | None = finish
        self._is_done = is_done

    def is_done_within(self, patience_s: float) -> bool:
        """Poll `is_done` for up to `patience_s`."""
        if self._is_done is None or self._finish is None:
            return True
        deadline = time.monotonic() + patience_s
        while not self._is_done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)
        return True

    def wait(self) -> None:
        """Run `finish`, unless an earlier call has."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class Returning(Ticket):
    """Wraps a Ticket: when it has ended, with or without an error, `give_back` returns what was borrowed for it.

    After a KeyboardInterrupt `give_back` is not called, because the work may still be using what was borrowed.
    """

    def __init__(self, ticket: Ticket, give_back: Callable[[], None]) -> None:
        self._ticket = ticket
        self._give_back: Callable[[], None] | None = give_back

    @property
    def span(self) -> tuple[float, float] | None:
        """The span of the wrapped Ticket."""
        return self._ticket.span

    def is_done_within(self, patience_s: float) -> bool:
        """Ask the wrapped Ticket."""
        return self._ticket.is_done_within(patience_s)

    def wait(self) -> None:
        """Wait for the wrapped Ticket; the first call also returns what was borrowed."""
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
    """A Ticket, and the Tickets that its work starts while it runs."""

    def __init__(self, first: Ticket, started: Sequence[Ticket]) -> None:
        self._first = first
        self._started = started

    def is_done_within(self, patience_s: float) -> bool:
        """Whether all of them are done; waits up to `patience_s` for each."""
        return self._first.is_done_within(patience_s) and all(ticket.is_done_within(patience_s) for ticket in self._started)

    def wait(self) -> None:
        """Wait for the first Ticket, then for those that it started."""
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
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
        finally:
            self._span = (begin, time.perf_counter())
            self._work = None  # the closure holds gradients: free them before the waiting thread goes on
            self._ended.set()

    def is_done_within(self, patience_s: float) -> bool:
        return self._ended.wait(patience_s)

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


_PATIENCE_S = 1.0  # how long running jobs may go on after the script has ended
_LIMIT_S = 5.0  # how long an interrupted job may take to end
_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()  # Lanes whose thread was started


class Lane:
    """One daemon thread that runs the jobs of a queue strictly in order.

    `interrupt`, a bound method, is called when the script ends while a job runs. It must make a job that waits for other ranks
    raise. It is held weakly, because its object holds the Lane; jobs hold what they need.
    """

    def __init__(self, name: str, interrupt: Callable[[], None] | None = None) -> None:
        self._name = name
        self._interrupt = None if interrupt is None else weakref.WeakMethod(interrupt)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Job | None = None
        weakref.finalize(self, self._jobs.put, None)  # ends the thread if the Lane is collected without close()

    def submit(self, work: Callable[[], None]) -> Ticket:
        """Queue `work`. Waiting for its Ticket raises the error of `work`, if any."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
            _lanes.add(self)
        self._last = job = _Job(work)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=10.0)
            if not self._thread.is_alive():
                self._thread = None

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def interrupt(self, patience_s: float) -> None:
        """Wait up to `patience_s` for the queued jobs; make them raise if they have not ended by then."""
        interrupt = None if self._interrupt is None else self._interrupt()
        if self._last is not None and not self._last.is_done_within(patience_s) and interrupt is not None:
            interrupt()

    def end(self) -> None:
        """End the thread, whether or not its jobs succeeded."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=_LIMIT_S)


@atexit.register
def _end_lanes() -> None:
    """End all Lanes at exit: none of their threads may be inside torch when the interpreter is finalized.

    Python ends a daemon thread when it next requests the GIL, by unwinding its stack. In C++ code that must not be unwound
    this aborts the process (SIGABRT).
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
