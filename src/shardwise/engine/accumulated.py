"""Local gradients that several backwards have summed and that no rank has reduced yet: `run.accumulating()`.

Owned by `Gradients`, which takes them out when a backward outside the context reduces. Sums are kept in the master dtype.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from shardwise.errors import OptimizerError, ShardwiseError
from shardwise.partition import Unit
from shardwise.tiers import Kind, Ledger, device_tier


class Accumulated:
    """The sums of one run, by Unit and slot."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._tier = device_tier(device)
        self._sums: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self.is_open = False
        """Whether a backward only adds to the sums: inside the context."""
        self.was_used = False
        """Whether the context was ever entered: then the sums of all Units take memory."""
        self.is_scaled = False
        """Whether a loss that led to the sums was scaled."""
        self._is_pending = False  # a backward inside the context has ended and none outside it; the same on every rank
        self._is_taken = False  # the backward that runs has taken sums out
        self._is_lost = False  # that backward raised

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The context around backwards that only add."""
        if self.is_open:
            raise ShardwiseError("run.accumulating() was entered twice. Enter it once, around whole backwards.")
        self.is_open = self.was_used = True
        try:
            yield
        finally:
            self.is_open = False

    def add(self, unit: Unit, slot: int, grad: torch.Tensor) -> None:
        """Add one parameter's gradient. A first one is copied, because autograd or a hook may still use it."""
        sums = self._sums[unit.index]
        if slot in sums:
            sums[slot].add_(grad)
        else:
            sums[slot] = grad.to(unit.dtypes.master, copy=True)
            self._ledger.reserve(self._tier, Kind.GRAD, sums[slot].nbytes)

    def sum_of(self, index: int, slot: int) -> torch.Tensor | None:
        """One parameter's sum, or None."""
        return self._sums.get(index, {}).get(slot)

    def replace(self, unit: Unit, slot: int, grad: torch.Tensor) -> None:
        """Set one parameter's sum, as `parameter.grad = grad` does in plain training."""
        earlier = self._sums[unit.index].get(slot)
        if earlier is not None and earlier.data_ptr() == grad.data_ptr():
            return  # `parameter.grad += x` sets what it has changed in place
        if earlier is not None:
            self._ledger.release(self._tier, Kind.GRAD, self._sums[unit.index].pop(slot).nbytes)
        self.add(unit, slot, grad)
        self._is_pending = True

    def end_backward(self, *, is_scaled: bool) -> None:
        """A backward inside the context has ended."""
        self._is_pending = True
        self.is_scaled |= is_scaled

    def take(self, index: int, slot: int) -> torch.Tensor | None:
        """Hand a sum, and the memory counted for it, to the backward that reduces."""
        sums = self._sums.get(index)
        if not sums or slot not in sums:
            return None
        self._is_taken = True
        return sums.pop(slot)

    def take_rest(self, index: int) -> dict[int, torch.Tensor]:
        """The same for every sum of a Unit that is left."""
        rest = self._sums.pop(index, {})
        self._is_taken |= bool(rest)
        return rest

    def has(self, index: int, slot: int) -> bool:
        """Whether a parameter has a sum."""
        return slot in self._sums.get(index, ())

    @property
    def has_any(self) -> bool:
        """Whether any parameter has one on this rank."""
        return any(self._sums.values())

    def finish(self) -> None:
        """A backward outside the context has reduced everything."""
        self._is_pending = self._is_taken = self.is_scaled = False

    def abandon(self) -> None:
        """A backward raised. If it had taken sums out they are lost, and the rest is worth nothing without them."""
        if self._is_taken:
            self._is_lost = True
            self.clear(lambda index, slot: True, set_to_none=True)
        self._is_taken = False

    def clear(self, is_chosen: Callable[[int, int], bool], *, set_to_none: bool) -> None:
        """What `zero_grad()` does to the sums of the chosen (Unit, slot) parameters."""
        for index, sums in self._sums.items():
            for slot in [slot for slot in sums if is_chosen(index, slot)]:
                if set_to_none:
                    self._ledger.release(self._tier, Kind.GRAD, sums.pop(slot).nbytes)
                else:
                    sums[slot].zero_()
        if set_to_none and not self.has_any:
            self._is_pending = self.is_scaled = False

    def begin_afresh(self) -> None:
        """`zero_grad()` was called: what was lost is not missed any more."""
        self._is_lost = False

    def require_reduced(self, what: str) -> None:
        """Raise if gradients are not complete, on all ranks alike; `what` names the caller."""
        if self._is_lost:
            raise OptimizerError(
                f"{what}: the backward that was to reduce the gradients accumulated inside run.accumulating() raised, and they "
                "are lost. Call optimizer.zero_grad() and repeat all backwards of this step."
            )
        if self._is_pending:
            raise OptimizerError(
                f"{what}: gradients were accumulated inside run.accumulating() and are not reduced over ranks yet. Run the last "
                "backward before the step outside that context, or call run.reduce()."
            )
