"""What a save in the background has not written yet: whoever changes a Unit's states waits here until they have been.

Made by a save on the training thread, advanced by the saving thread, asked by everything that writes masters or optimizer states.
"""

from __future__ import annotations

import threading


class Unsaved:
    """Units are written in the order of their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_written = 0
        self._has_ended = False
        self.failure: Exception | None = None
        """Why the save has failed, once it has ended."""
        self.was_told = False
        """Whether the failure was raised on this rank."""

    def advance(self, unit: int) -> None:
        """All states of Units up to this one have been written."""
        with self._changed:
            self._num_written = unit + 1
            self._changed.notify_all()

    def end(self, failure: Exception | None) -> None:
        """Nothing will be read any more."""
        with self._changed:
            self._has_ended = True
            self.failure = failure
            self._changed.notify_all()

    def wait_for(self, unit: int) -> None:
        """Wait until a Unit's states have been written, or never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._num_written > unit)

    def has_ended_within(self, patience_s: float | None) -> bool:
        """Wait up to `patience_s` for the end of the save, or (None) until it has ended; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_ended, patience_s)
