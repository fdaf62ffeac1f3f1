"""Reduces several vectors as one. Rank r's slice of the bucket is its slice of each of them, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.comm.transport import Sink, Source


class _Bucket:
    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._total = sum(lengths)

    def _cover(self, start: int, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """Split a range of the bucket into (part, start in the part's vector, start in the range, length)."""
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


class BucketSource(_Bucket):
    """Full gradients of several Units, joined. Their shards have `lengths` elements."""

    def __init__(self, sources: Sequence[Source], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self._sources = sources

    def __call__(self, start: int, out: torch.Tensor) -> None:
        """Write a range of the bucket into `out`."""
        for number, at, offset, numel in self._cover(start, out.numel()):
            self._sources[number](at, out[offset : offset + numel])

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        """A view of a range, if it lies inside one part; else None."""
        number, at, _, length = next(self._cover(start, numel))
        return self._sources[number].view(at, numel) if length == numel else None


class BucketSink(_Bucket):
    """Gradient shards of several Units, joined."""

    def __init__(self, sinks: Sequence[Sink], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self._sinks = sinks

    def place(self, start: int, numel: int) -> torch.Tensor | None:
        """Memory for a range, if it lies inside one part; else None."""
        number, at, _, length = next(self._cover(start, numel))
        return self._sinks[number].place(at, numel) if length == numel else None

    def __call__(self, start: int, total: torch.Tensor) -> None:
        """Pass each part of the sum to its sink."""
        for number, at, offset, numel in self._cover(start, total.numel()):
            self._sinks[number](at, total[offset : offset + numel])
