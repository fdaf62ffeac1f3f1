"""One forward call and its way back: which Units it opened, and how autograd says when its backward begins and ends.

Autograd runs ready nodes in reverse order of creation. A hook on a call's outputs therefore runs before anything the call
computed. For the end, every input that needs a gradient is passed on as a view: the view's node is older than everything the call
computes and younger than everything upstream, and it is this call's own even if the input is a leaf or shared with other calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from shardwise.engine.nested import map_tensors, tensors_in
from shardwise.errors import FreedParameterError
from shardwise.partition import ShardedParameter, Unit


class BackwardListener(Protocol):
    """Who is told when the backward of a forward call begins and ends."""

    def before_backward(
        self, units: Sequence[tuple[Unit, int]], nested: Sequence[tuple[Unit, int]], passage: Passage | None
    ) -> None:
        """Autograd is about to run the backward of a call; Units come with the version its graph was built on."""

    def begin_backward(self) -> None:
        """Autograd runs."""

    def announce(self, units: Iterable[Unit]) -> None:
        """Gradients of these Units are about to come, without their parameters being read."""

    def release(self, units: Iterable[Unit], passage: Passage) -> None:
        """The backward of a call is over."""


class Passage:
    """A forward call's way back: Units are gathered when its outputs' gradients come, released when its inputs' are there."""

    def __init__(self, listener: BackwardListener) -> None:
        self._listener = listener
        self._units: tuple[tuple[Unit, int], ...] = ()
        self._nested: tuple[tuple[Unit, int], ...] = ()
        self._watched: list[torch.Tensor] = []
        self._num_inputs = 0
        self._num_missing = 0

    def watch(self, inputs: Any, unscale: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
        """End when all inputs that need a gradient have theirs (or, without any, with the whole backward).

        `unscale` is applied to the gradients that leave through the inputs. Returns the inputs to use instead.
        """

        def own_view(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, ShardedParameter) or not tensor.requires_grad:
                return tensor
            view = tensor.view_as(tensor)
            view.register_hook(self._end)
            if unscale is not None:
                view.register_hook(unscale)
            self._watched.append(view)
            return view

        inputs = map_tensors(own_view, inputs)
        self._num_inputs = self._num_missing = len(self._watched)
        return inputs

    def guard(self, output: Any, units: Sequence[Unit], nested: Sequence[Unit], *, reads_params: bool) -> None:
        """Have autograd call before it runs the backward of anything this call computed."""
        self._units = tuple((unit, unit.version) for unit in units)
        self._nested = tuple((unit, unit.version) for unit in nested)
        handed_through = {id(tensor) for tensor in self._watched}
        self._watched = []
        for tensor in tensors_in(output):
            if tensor.requires_grad and id(tensor) not in handed_through:
                tensor.register_hook(self._begin if reads_params else self._announce)

    def _begin(self, _: torch.Tensor) -> None:
        if not any(self in unit.passages for unit, _ in self._units):
            self._num_missing = self._num_inputs  # a retained graph may be run again
        self._listener.before_backward(self._units, self._nested, self)

    def _announce(self, _: torch.Tensor) -> None:
        self._listener.announce(unit for unit, _ in (*self._units, *self._nested))

    def _end(self, _: torch.Tensor) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._listener.release((unit for unit, _ in self._units), self)


class Inside:
    """Called when the backward of a call begins that ran inside an open Unit: usually the outer call has seen to it already.

    It is there for outputs that reach the loss on the side, past the outer call's own outputs.
    """

    __slots__ = ("_listener", "_units")

    def __init__(self, listener: BackwardListener, units: tuple[tuple[Unit, int], ...]) -> None:
        self._listener = listener
        self._units = units

    def __call__(self, _: Any) -> None:
        """The gradient of an output is there."""
        self._listener.begin_backward()
        for unit, version in self._units:
            if not (unit.was_opened and unit.is_gathered and unit.version == version) or torch.is_grad_enabled():
                self._listener.before_backward((), self._units, None)
                return


class Frame:
    """One forward call that is running now."""

    __slots__ = ("is_inside", "is_root", "is_scaled", "nested", "opened", "passage", "units")

    def __init__(self, passage: Passage | None, *, is_root: bool = False, is_inside: bool = False) -> None:
        self.is_inside = is_inside  # an outer call has opened all its Units
        self.passage = passage
        self.is_root = is_root  # the whole model's own forward
        self.is_scaled = False  # the loss scale enters at this call's outputs and leaves at its inputs
        self.opened: list[Unit] = []  # every Unit whose scopes this call counts in
        self.units: list[Unit] = []  # Units this call opened: released when its backward is over
        self.nested: list[Unit] = []  # Units some outer call has open anyway


class _Saved(NamedTuple):
    """What autograd keeps of a computation inside `run.gathered`."""

    tensor: torch.Tensor
    version: int
    unit: Unit | None


def saving_for_inside(units: Sequence[Unit]) -> contextlib.AbstractContextManager[None]:
    """A graph that is built in this context may read parameters of `units` in backward only while they are gathered."""
    places = {unit.full.untyped_storage().data_ptr(): unit for unit in units if not unit.is_always_full}

    def pack(tensor: torch.Tensor) -> _Saved:
        with torch._C.DisableTorchFunctionSubclass():
            return _Saved(tensor, tensor._version, places.get(tensor.untyped_storage().data_ptr()))

    def unpack(saved: _Saved) -> torch.Tensor:
        tensor, version, unit = saved
        if unit is not None and not unit.is_gathered:
            raise FreedParameterError(
                f"backward reached parameters of Unit {unit.name!r} (rank {unit.rank}) that were used inside `with "
                "run.gathered(...):`, which has ended. Call backward inside the context, or compute this part of the loss in a "
                "module's forward."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if tensor._version != version:
                raise RuntimeError("a tensor needed for backward, saved inside `with run.gathered(...):`, was changed in place.")
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
