"""The two ends of a gradient reduction: this rank's local gradients as a source, this rank's gradient shard as a sink.

Made by `Gradients`, called by the transport with ranges of a Unit's flat vector, possibly on its Lane.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping

import torch

from shardwise.engine.refusals import check_unchanged
from shardwise.native import library
from shardwise.partition import Layout, Unit
from shardwise.ticket import Ticket

_SMALL_NUMEL = 1 << 15  # from this size on torch copies with several threads, and the cost of a call does not matter


class LocalGrad:
    """The gradients of one backward on this rank, read as the flat vector of their Unit; a missing one counts as zero."""

    def __init__(self, unit: Unit, grads: Mapping[int, torch.Tensor], versions: Mapping[int, int]) -> None:
        """`versions`: the tensor versions of the gradients when they arrived."""
        self._layout = unit.layout
        self._grads = grads
        self._versions = versions
        self._addresses: ctypes.Array[ctypes.c_void_p] | None = None
        self._is_native = _is_made_of_small(unit.layout) and library() is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the local gradients."""
        return sum(grad.nbytes for grad in self._grads.values())

    def check(self) -> None:
        """Raise if a gradient was changed in place after it arrived."""
        for slot, grad in self._grads.items():
            check_unchanged(self._layout.slots[slot].name, grad, self._versions[slot])

    def __call__(self, start: int, out: torch.Tensor) -> None:
        """Copy a range to `out`; it may span several parameters and padding."""
        if self._is_native and self._copy(start, out):
            return
        for slot, at, run_start, numel in self._layout.cover(start, start + out.numel()):
            part = out[run_start : run_start + numel]
            grad = None if slot is None else self._grads.get(slot)
            if slot is None or grad is None:
                part.zero_()
            else:
                _read_flat(grad, self._layout.slots[slot].stride, at, part)

    def _copy(self, start: int, out: torch.Tensor) -> bool:
        """Copy a range in one native call; False if a gradient has another dtype or stride than the vector needs."""
        if self._addresses is None:
            slots = self._layout.slots
            for slot, grad in self._grads.items():
                if grad.dtype != out.dtype or grad.stride() != slots[slot].stride or grad.device != out.device or grad.is_neg():
                    self._is_native = False
                    return False
            self._addresses = (ctypes.c_void_p * len(slots))()
            for slot, grad in self._grads.items():
                self._addresses[slot] = grad.data_ptr()
        native = library()
        assert native is not None
        table = self._layout.table
        native.sw_read_flat(self._addresses, table, len(self._addresses), out.element_size(), start, out.numel(), out.data_ptr())
        return True

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        """A range without a copy, if it lies inside one gradient with the strides of its parameter; else None."""
        slot, at, _, length = next(iter(self._layout.cover(start, start + numel)))
        grad = None if slot is None else self._grads.get(slot)
        if slot is None or grad is None or length < numel or grad.stride() != self._layout.slots[slot].stride:
            return None
        return grad.as_strided((grad.numel(),), (1,))[at : at + numel]


class GradShard:
    """This rank's slice of a Unit's reduced gradient: totals are added to slots that have a gradient and overwrite others."""

    def __init__(
        self,
        unit: Unit,
        grad: torch.Tensor,
        divisor: float,
        held: Collection[int],
        ready: Ticket | None,
        check: Callable[[], None],
    ) -> None:
        """`grad` is the span's vector. Slots in `held` accumulate; their values are in `grad` once `ready` is done. `check`
        is called before the last range is written.
        """
        self._layout = unit.layout
        self._own = unit.rank * unit.layout.shard_numel
        self._mine = grad[self._own - unit.span.start : self._own - unit.span.start + unit.layout.shard_numel]
        self._divisor = divisor
        self._held = held
        self._is_all_held = len(held) == len(unit.pieces)
        self._ready = ready
        self._check = check

    def place(self, start: int, numel: int) -> torch.Tensor | None:
        """Memory to form the sum in: the gradient itself if no slot accumulates, else None."""
        return None if self._held else self._mine[start : start + numel]

    def __call__(self, start: int, total: torch.Tensor) -> None:
        """Average a range of totals, and write or add it."""
        if start + total.numel() == self._mine.numel():
            self._check()
        if self._divisor != 1.0:
            total.div_(self._divisor)
        if self._ready is not None:
            self._ready.wait()
            self._ready = None
        stop = start + total.numel()
        target = self._mine[start:stop]
        if target.data_ptr() == total.data_ptr():
            return
        if not self._held:
            target.copy_(total)
        elif self._is_all_held:
            target.add_(total)
        else:
            for slot, _, at, numel in self._layout.cover(self._own + start, self._own + stop):
                if slot in self._held:
                    target[at : at + numel].add_(total[at : at + numel])
                else:
                    target[at : at + numel].copy_(total[at : at + numel])


def _is_made_of_small(layout: Layout) -> bool:
    """Whether parameters are so small that copying them one by one would cost more than the copies."""
    return layout.numel < _SMALL_NUMEL * len(layout.slots)


def _read_flat(grad: torch.Tensor, stride: tuple[int, ...], at: int, out: torch.Tensor) -> None:
    """Copy elements [at, at + len(out)) of a gradient, in the storage order of a parameter with `stride`."""
    if grad.stride() == stride:
        out.copy_(grad.as_strided((grad.numel(),), (1,))[at : at + out.numel()])
        return
    # The gradient has other strides (a transposed product, an expanded sum): copy the whole rows around the range, and
    # never the whole gradient.
    rows = grad.permute(sorted(range(grad.dim()), key=lambda dim: stride[dim], reverse=True))
    row_numel = max(grad.numel() // rows.shape[0], 1)
    first = at // row_numel
    last = -(-(at + out.numel()) // row_numel)
    block = rows[first:last].reshape(-1)
    out.copy_(block[at - first * row_numel : at - first * row_numel + out.numel()])
