"""What a save in the background has not read yet: whoever changes a Unit's states waits here until they have been read.

Made by a save on the training thread, advanced by the saving thread, asked by everything that writes masters or optimizer states.
"""

from __future__ import annotations

import threading


class Unsaved:
    """Units are read in the order of their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_read = 0
        self._has_ended = False
        self._problem: Exception | None = None

    def advance(self, unit: int) -> None:
        """All states of Units up to this one have been read."""
        with self._changed:
            self._num_read = unit + 1
            self._changed.notify_all()

    def end(self, problem: Exception | None) -> None:
        """Nothing will be read any more; `problem` is why the save failed."""
        with self._changed:
            self._has_ended = True
            self._problem = problem
            self._changed.notify_all()

    def wait_for(self, unit: int) -> None:
        """Wait until a Unit's states have been read, or never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._num_read > unit)

    def has_ended_within(self, patience_s: float | None) -> bool:
        """Wait up to `patience_s` for the end of the save, or (None) until it has ended; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_ended, patience_s)

    def take_problem(self) -> Exception | None:
        """Why the save failed; None if it did not, runs still, or was asked before."""
        with self._changed:
            problem, self._problem = self._problem, None
            return problem
