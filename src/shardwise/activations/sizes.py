"""How many bytes did the last forward pass keep, stretch by stretch? The memory formula reads it; nothing else depends on it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Protocol


class _Taking(Protocol):
    """A tensor that is kept."""

    @property
    def taken_bytes(self) -> int: ...


@dataclasses.dataclass
class StretchSize:
    """Bytes on this rank that one stretch keeps, and holds when it is computed again.

    With `checkpoint=None` a whole forward pass counts as one stretch that is not computed again.
    """

    kept_bytes: int = 0
    """Kept on the device's own tier."""
    away_bytes: int = 0
    """Kept on a tier below."""
    again_bytes: int = 0
    """Held at once when it was computed again; 0 before the first backward."""
    saved_before_bytes: int = 0
    """What autograd had saved outside of stretches when it began, if that was being counted."""


class Sizes:
    """What the stretches of the last forward pass take, and those of earlier ones whose tensors are still kept."""

    def __init__(self) -> None:
        self._stretches: list[tuple[StretchSize, list[weakref.ref[_Taking]]]] = []
        self._has_ended = False

    @property
    def stretches(self) -> tuple[StretchSize, ...]:
        """In the order in which they were run."""
        return tuple(size for size, _ in self._stretches)

    def begin_stretch(self, saved_before_bytes: int) -> StretchSize:
        """A stretch begins."""
        if self._has_ended:  # this is the first one of a forward pass
            self._stretches = [entry for entry in self._stretches if any(kept() is not None for kept in entry[1])]
            self._has_ended = False
        self._stretches.append((StretchSize(saved_before_bytes=saved_before_bytes), []))
        return self._stretches[-1][0]

    def keep(self, kept: _Taking, *, is_away: bool) -> None:
        """The running stretch keeps a tensor."""
        size, tensors = self._stretches[-1]
        tensors.append(weakref.ref(kept))
        if is_away:
            size.away_bytes += kept.taken_bytes
        else:
            size.kept_bytes += kept.taken_bytes

    def end_forward(self) -> None:
        """The forward pass has ended."""
        self._has_ended = True
