"""Fences, and all-gathers of small values, between the ranks of one host through shared memory.

In each round a rank writes its values, increments its counter, and reads the others' values when all counters have reached the
round. Rounds use two areas in turn: a rank that writes round k + 2 has seen every rank enter round k + 1, so all have read
round k.
"""

from __future__ import annotations

import torch

from shardwise.comm.segment import PAGE_BYTES, SharedSegments
from shardwise.comm.watch import Operation, Watch
from shardwise.comm.world import World

_AREA_BYTES = 4 * PAGE_BYTES


class Meeting:
    """Where the ranks of one host wait for each other."""

    def __init__(self, host: World, watch: Watch) -> None:
        self._host = host
        self._watch = watch
        self._segments = SharedSegments(host, PAGE_BYTES + 2 * _AREA_BYTES)
        self._words = [self._segments.words(rank, 0, 5) for rank in range(host.world_size)]  # round, (code, length) twice
        self._round = 0

    def fence(self, operation: Operation) -> None:
        """Wait until every rank has reached this fence."""
        self._meet(operation, 0)

    def collect(self, operation: Operation, values: torch.Tensor) -> torch.Tensor:
        """All-gather `values` (a flat tensor, equally long on all ranks); return one row per rank."""
        rows = torch.empty(self._host.world_size, values.numel(), dtype=values.dtype)
        step = _AREA_BYTES // values.element_size()
        for start in range(0, values.numel(), step):
            part = values[start : start + step]
            at = PAGE_BYTES + self._round % 2 * _AREA_BYTES
            self._segments.view(self._host.rank, at, part.numel(), part.dtype).copy_(part)
            self._meet(operation, values.numel())
            for rank in range(self._host.world_size):
                rows[rank, start : start + step] = self._segments.view(rank, at, part.numel(), part.dtype)
        return rows

    def _meet(self, operation: Operation, numel: int) -> None:
        label = 1 + self._round % 2 * 2
        self._round += 1
        target = self._round
        own = self._words[self._host.rank]
        own[label], own[label + 1] = operation.code, numel
        own[0] = target
        self._segments.wake(0)
        self._watch.until(
            lambda: all(words[0] >= target for words in self._words),
            operation,
            lambda: [self._host.ranks[rank] for rank, words in enumerate(self._words) if words[0] < target],
            [(self._segments.address(rank, 0), target) for rank in range(self._host.world_size)],
        )
        for rank, words in enumerate(self._words):
            if (words[label], words[label + 1]) != (operation.code, numel):
                other = self._watch.name(Operation.decode(operation.channel, operation.sequence, words[label]))
                cause = f"but that rank came for {other} ({words[label + 1]} values, not {numel}): they disagree"
                raise self._watch.failed(operation, [self._host.ranks[rank]], 0.0, cause)
