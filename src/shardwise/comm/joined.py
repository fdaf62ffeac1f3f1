"""Several vectors reduced as one: rank r's slice of the whole is the slices that rank r owns of each, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.comm.transport import Sink, Source


class _Joined:
    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._total = sum(lengths)

    def _cover(self, start: int, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """(part, start in the part's own vector, start in the range, length) of everything a range touches."""
        done = 0
        while done < numel:
            rank, at = divmod(start + done, self._total)
            for number, length in enumerate(self._lengths):
                if at < length:
                    run = min(length - at, numel - done)
                    yield number, rank * length + at, done, run
                    done += run
                    break
                at -= length


class JoinedSource(_Joined):
    """Full gradients of several Units, with shards of `lengths` elements."""

    def __init__(self, sources: Sequence[Source], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self._sources = sources

    def __call__(self, start: int, out: torch.Tensor) -> None:
        """Write a range of the whole into `out`."""
        for number, at, offset, numel in self._cover(start, out.numel()):
            self._sources[number](at, out[offset : offset + numel])

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        """A range that lies inside one part."""
        number, at, _, length = next(self._cover(start, numel))
        return self._sources[number].view(at, numel) if length == numel else None


class JoinedSink(_Joined):
    """Gradient shards of several Units, one after the other."""

    def __init__(self, sinks: Sequence[Sink], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self._sinks = sinks

    def place(self, start: int, numel: int) -> torch.Tensor | None:
        """A range that lies inside one part."""
        number, at, _, length = next(self._cover(start, numel))
        return self._sinks[number].place(at, numel) if length == numel else None

    def __call__(self, start: int, total: torch.Tensor) -> None:
        """Hand each part its piece of the sum."""
        for number, at, offset, numel in self._cover(start, total.numel()):
            self._sinks[number](at, total[offset : offset + numel])
