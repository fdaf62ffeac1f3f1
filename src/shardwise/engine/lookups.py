"""Holds the gradient of a tied embedding table once instead of three times.

A table that an embedding and a head share gets its gradient in two parts: the head's, and the look-up's, which is zero but for
the rows that were looked up. Autograd makes the second part dense and adds the two out of place, so that three vectors of the
table's size are alive together. Here the look-up's backward hands over its rows instead, and they are added in place to the
head's part when that arrives.

The sums are the same to the last bit: rows that were looked up several times are added up first, as in the dense part, and the
parts are added in autograd's order. That order is known only for the look-up that was the first use of the table, because its
backward is the last; all others are left to autograd. Called by `Arrivals` and the runtime.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from shardwise.engine.saved import has_foreign_hooks
from shardwise.partition import Unit, is_dtensor

Grads = tuple[torch.Tensor | None, ...]
_num_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_will_execute: Callable[[object], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
IS_POSSIBLE = None not in (_num_uses, _keeps_graph, _will_execute) and hasattr(torch.Tensor, "_use_count")
"""Whether this torch tells what is needed; without it autograd adds the parts."""


def is_lookup(module: nn.Module) -> bool:
    """Whether a module only reads rows of its table: the backward of such a call does not read the table."""
    return type(module) is nn.Embedding and module.max_norm is None


def adds_in_place(module: nn.Module, holders: Sequence[Sequence[nn.Module]]) -> bool:
    """Whether the parts of a gradient are added in place, for a Unit of `module` whose parameters these modules hold."""
    if not IS_POSSIBLE or len(holders) != 1 or module in holders[0]:
        return False
    if any(is_dtensor(param) for param in holders[0][0]._parameters.values()):
        return False
    return sum(not is_lookup(holder) for holder in holders[0]) <= 1


class Openings(Protocol):
    """Counts how often a Unit was opened while gradients were recorded: the engine's `Use`."""

    num_opened: int


class SharedTable:
    """A parameter that an `nn.Embedding` shares with other modules."""

    def __init__(self, openings: Openings, begin_backward: Callable[[], None]) -> None:
        """`begin_backward` is called before rows are kept: it clears what a backward that raised has left."""
        self.begin_backward = begin_backward
        self.node_id = 0
        """The AccumulateGrad node whose gradients come here. `p.set_()` gives a parameter another one."""
        self._openings = openings
        self._num_known = 0  # openings whose graphs are gone
        self._alive: list[weakref.ref[_LookupHook]] = []  # look-ups in graphs that may still run, oldest first
        self._rows: list[Rows] = []  # handed over and not added yet
        _measure_alone()

    def watch(self, output: object) -> None:
        """After a look-up: have its backward hand over rows, if this was the first use of the table."""
        if not isinstance(output, torch.Tensor) or output.grad_fn is None:
            return
        node = output.grad_fn
        if node.name() != "EmbeddingBackward0" or node._saved_scale_grad_by_freq or node._saved_sparse:  # type: ignore[attr-defined]
            return
        target = node.next_functions[0][0]
        if target is None or id(target) != self.node_id or has_foreign_hooks():
            return
        if self._openings.num_opened == self._num_known + 1:
            hook = _LookupHook(self, target, node)
            self._alive.append(weakref.ref(hook))
            node.register_prehook(hook)

    def is_first(self, hook: _LookupHook) -> bool:
        """Whether no graph that may still run has an older look-up."""
        self._alive = [entry for entry in self._alive if entry() is not None]
        return bool(self._alive) and self._alive[0]() is hook

    def hand_over(self, rows: Rows) -> None:
        """Keep rows until the other parts arrive."""
        self._rows.append(rows)

    def forget(self, hook: _LookupHook) -> None:
        """The graph of a look-up was run and cannot be run again."""
        self._alive = [entry for entry in self._alive if entry() not in (None, hook)]
        if not self._alive:
            self._num_known = self._openings.num_opened

    def begin_afresh(self) -> None:
        """After a step: other graphs that have read the table are out of date."""
        self._rows.clear()
        self._num_known = self._openings.num_opened

    def abandon(self) -> None:
        """A backward raised: drop what it has handed over."""
        self._rows.clear()

    def complete(self, grads: Grads) -> torch.Tensor | None:
        """The table's whole gradient: what autograd has summed, and the rows that were handed over."""
        added, self._rows = self._rows, []
        if not added:
            return grads[0]
        total: torch.Tensor
        if grads[0] is None:
            first, *added = added
            total = first.dense()
        elif _is_exclusive(grads):
            total = grads[0]
        else:
            total = grads[0].clone(memory_format=torch.contiguous_format)
        for rows in added:
            rows.add_to(total)
        return total


class Lookups:
    """The shared tables of one run, by Unit."""

    def __init__(self, units: Sequence[Unit], openings: Sequence[Openings], listener: BackwardListener) -> None:
        begin_backward = _Weakly(listener)
        covered = [unit for unit in units if unit.is_covered and IS_POSSIBLE and not is_dtensor(unit.params[0])]
        self.tables = {unit.index: SharedTable(openings[unit.index], begin_backward) for unit in covered}

    def watch(self, units: Sequence[Unit], output: object) -> None:
        """After a look-up's forward."""
        for unit in units:
            if unit.index in self.tables:
                self.tables[unit.index].watch(output)

    def begin_afresh(self) -> None:
        """After a step."""
        for table in self.tables.values():
            table.begin_afresh()

    def abandon(self) -> None:
        """After a backward that raised."""
        for table in self.tables.values():
            table.abandon()


class BackwardListener(Protocol):
    """Is told that a backward runs: the runtime."""

    def begin_backward(self) -> None:
        """Note that a backward runs."""


class _Weakly:
    """Calls `begin_backward` of a listener that it does not keep alive, because graphs hold it."""

    def __init__(self, listener: BackwardListener) -> None:
        self._listener = weakref.ref(listener)

    def __call__(self) -> None:
        listener = self._listener()
        if listener is not None:
            listener.begin_backward()


class Rows(NamedTuple):
    """The gradient of one look-up's output, and which rows of the table it belongs to."""

    indices: torch.Tensor
    grad: torch.Tensor
    num_rows: int
    padding: int

    def dense(self) -> torch.Tensor:
        """The gradient of the whole table, as autograd would form it."""
        return torch.ops.aten.embedding_dense_backward(self.grad, self.indices, self.num_rows, self.padding, False)  # type: ignore[no-any-return]

    def add_to(self, total: torch.Tensor) -> None:
        """Add the rows in place; a row that was looked up several times is summed first, in the same order."""
        distinct, places = torch.unique(self.indices, return_inverse=True)
        padding = torch.searchsorted(distinct, self.padding).item() if self.padding in distinct else -1
        sums = torch.ops.aten.embedding_dense_backward(self.grad, places, distinct.numel(), padding, False)
        total.index_add_(0, distinct, sums.to(total.dtype))


class _LookupHook:
    """The prehook of one look-up's node: autograd calls it with the gradient of the look-up's output."""

    __slots__ = ("__weakref__", "_indices", "_num_rows", "_padding", "_table", "_target")

    def __init__(self, table: SharedTable, target: torch.autograd.graph.Node, node: torch.autograd.graph.Node) -> None:
        """`target`: the table's AccumulateGrad node. `node`: the look-up's own, which is not kept: it will hold this hook."""
        self._table = table
        self._target = target
        self._indices = node._saved_indices  # type: ignore[attr-defined]
        self._num_rows = node._saved_weight_sym_argsize_0  # type: ignore[attr-defined]
        padding = node._saved_padding_idx  # type: ignore[attr-defined]
        self._padding = padding if 0 <= padding < self._num_rows else -1  # autograd shows -1 as an unsigned number

    def __call__(self, grads: Grads) -> Grads | None:
        assert _keeps_graph is not None
        self._table.begin_backward()
        is_taken = grads[0] is not None and self._table.is_first(self) and self._is_wanted()
        if is_taken:
            assert grads[0] is not None
            self._table.hand_over(Rows(self._indices, grads[0], self._num_rows, self._padding))
        if not _keeps_graph():
            self._table.forget(self)
        return (None,) if is_taken else None  # None: autograd goes on as usual

    def _is_wanted(self) -> bool:
        """Whether the gradient will arrive here: not with create_graph or `autograd.grad`, nor if hooks would see a part."""
        assert _will_execute is not None
        if torch.is_grad_enabled() or self._target.variable._backward_hooks:  # type: ignore[attr-defined]
            return False
        try:
            return _will_execute(self._target)
        except RuntimeError:  # autograd.grad() returns this gradient
            return False


def _counts(grads: Grads) -> tuple[int, ...]:
    """Who holds a gradient: references to it, to the tensor that it is a view of, and to their memory."""
    grad = grads[0]
    assert grad is not None and _num_uses is not None
    base = grad._base
    uses = (sys.getrefcount(grad), grad._use_count(), _num_uses(grad.untyped_storage()._cdata))  # type: ignore[attr-defined]
    return uses if base is None else (*uses, sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]


_alone: set[tuple[int, ...]] = set()  # counts of gradients that only autograd holds


def _is_exclusive(grads: Grads) -> bool:
    """Whether only autograd holds a gradient, so that it may be changed in place."""
    is_alone = _counts(grads) in _alone  # first of all: a name for the gradient would count as a holder
    grad = grads[0]
    assert grad is not None
    return is_alone and (grad.is_contiguous() or grad.t().is_contiguous())


@functools.cache
def _measure_alone() -> None:
    """Count the holders of gradients that nobody else can hold: of a product, and of a transposed product."""

    def see(grads: Grads) -> None:
        _alone.add(_counts(grads))

    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        for is_transposed in (False, True):
            leaf = torch.zeros(2, 2, requires_grad=True)
            product = torch.ones(2, 2) @ (leaf.t() if is_transposed else leaf)
            torch.autograd.graph.get_gradient_edge(leaf).node.register_prehook(see)
            torch.autograd.backward(product, torch.ones(2, 2))
