"""Has autograd save a `Place` instead of a view of a parameter, so that a Unit can be freed between forward and backward.

While a forward pass runs, every tensor that autograd saves passes through here (`torch.autograd.graph.saved_tensors_hooks`).
A view of a Unit's full vector is saved as a `Place`, and its Unit is gathered when backward unpacks that. This works for every
graph; the hooks on a call's outputs only start gathers earlier (`docs/decisions/0011-saved-places.md`). Any other tensor is saved
as it is, or passed to the saved-tensor hooks that were installed before.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from shardwise.errors import StaleGraphError
from shardwise.partition import Form, ShardedParameter, Unit, address_of, is_dtensor, local_of

_top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_is_enabled: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Place(NamedTuple):
    """A view of a Unit's full vector, with the version and epoch (`Writes.epochs`) that its parameter had when it was saved."""

    unit: Unit
    slot: int
    version: int
    epoch: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def check(self) -> None:
        """Raise if the parameter no longer has the values that were saved."""
        unit = self.unit
        if self.version != _version_of(unit, self.slot) or self.epoch != unit.writes.epochs[self.slot]:
            raise StaleGraphError(
                f"backward needs the values that parameter {unit.layout.slots[self.slot].name!r} (Unit {unit.name!r}, rank "
                f"{unit.rank}) had in the forward pass, but they have changed since (an optimizer step, or a write by hand). Run "
                "the forward pass again before this backward."
            )

    def view(self) -> torch.Tensor:
        """The view itself; valid while the Unit is gathered."""
        full = self.unit.full if self.unit.full.dtype == self.dtype else self.unit.full.view(self.dtype)
        return full.as_strided(self.shape, self.stride, full.storage_offset() + self.offset)


class _Divided(NamedTuple):
    """A DTensor whose local tensor is a view of a Unit's full vector."""

    place: Place
    form: Form


class _Passed(NamedTuple):
    """A tensor that was packed by other saved-tensor hooks."""

    unpack: Callable[[Any], torch.Tensor]
    value: Any


def has_foreign_hooks() -> bool:
    """Whether saved-tensor hooks of others are installed, whose unpacking may do more than return a tensor (checkpoints)."""
    top: Hooks | None = None if _top is None else _top(False)
    if top is not None and isinstance(top[0], _Pack):
        top = top[0].outer
    return top is not None and not getattr(top[0], "only_notes", False)


def is_inside_checkpoint() -> bool:
    """Whether torch's non-reentrant checkpoint forgets what is saved now, to compute it again."""
    top: Hooks | None = None if _top is None else _top(False)
    return top is not None and "_checkpoint_hook" in getattr(top[0], "__qualname__", "")


class SavedPlaces:
    """Knows the addresses of all full vectors, and installs saved-tensor hooks on top of existing ones."""

    def __init__(self, restore: Callable[[Place], torch.Tensor]) -> None:
        """`restore` gathers the Unit of a Place and returns the view."""
        self._restore = restore
        self._starts: list[int] = []
        self._entries: list[tuple[int, int, Unit]] = []  # (start, end, Unit) of full vectors, by address
        self._known: set[int] = set()
        self._slots: dict[int, int] = {}  # slot by its first address: nearly every saved view begins with its parameter
        self.low = self.high = 0  # all full vectors lie between these addresses
        self._pack: Callable[[torch.Tensor], Any] = _Pack(self, None)

    def know(self, unit: Unit) -> None:
        """Record the address of a Unit's full vector, which never changes."""
        if unit.index not in self._known:
            self._known.add(unit.index)
            start = unit.full.data_ptr()
            bisect.insort(self._entries, (start, start + unit.full_bytes, unit), key=lambda entry: entry[0])
            self._starts = [entry[0] for entry in self._entries]
            self.low, self.high = self._starts[0], max(entry[1] for entry in self._entries)
            itemsize = unit.dtypes.compute.itemsize
            self._slots |= {start + slot.offset * itemsize: number for number, slot in enumerate(unit.layout.slots) if slot.numel}

    def unit_at(self, address: int) -> Unit | None:
        """The Unit whose full vector contains an address, or None."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            _, end, unit = self._entries[at]
            if address < end:
                return unit
        return None

    def begin(self) -> contextlib.AbstractContextManager[Any] | None:
        """Install the hooks. Returns the context to exit, or None if they are installed; LookupError if hooks are disabled."""
        top: Hooks | None = None if _top is None else _top(False)
        if top is not None and isinstance(top[0], _Pack) and top[0].places is self:
            return None
        if not _is_enabled():
            raise LookupError("saved tensor hooks are disabled here, as inside torch.func transforms")
        context = torch.autograd.graph.saved_tensors_hooks(self._pack if top is None else _Pack(self, top), self.unpack)
        context.__enter__()
        return context

    @contextlib.contextmanager
    def keeping(self) -> Iterator[bool]:
        """Install the hooks for one operation or context; yields False if hooks are disabled here."""
        is_allowed, context = True, None
        try:
            context = self.begin() if torch.is_grad_enabled() else None
        except LookupError:
            is_allowed = False
        try:
            yield is_allowed
        finally:
            if context is not None:
                context.__exit__(None, None, None)

    def place(self, unit: Unit, tensor: torch.Tensor, address: int) -> Place:
        """The Place of a tensor that lies in a Unit's full vector."""
        start = address - unit.full.data_ptr()
        slot = self._slots.get(address)
        if slot is None:
            slot = unit.layout.slot_at(start // unit.dtypes.compute.itemsize)
        epoch, offset = unit.writes.epochs[slot], start // tensor.element_size()
        return Place(unit, slot, unit.params[slot]._version, epoch, tensor.shape, tensor.stride(), offset, tensor.dtype)

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return a saved tensor to autograd; the Unit of a Place is gathered."""
        kind = type(kept)
        if kind is tuple:
            tensor, version = kept
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"{tensor.type()} of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} "
                    "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
                    "torch.autograd.set_detect_anomaly(True)."
                )
            kept = tensor
        elif kind is Place:
            kept.check()
            kept = self._restore(kept)
        elif kind is _Divided:
            kept.place.check()
            kept = kept.form.wrap(self._restore(kept.place))
        elif kind is _Passed:
            kept = kept.unpack(kept.value)
        found: torch.Tensor = kept
        return found


class _Pack:
    """Called by autograd with every tensor it saves."""

    __slots__ = ("outer", "places")

    def __init__(self, places: SavedPlaces, outer: Hooks | None) -> None:
        """`outer`: the hooks that were installed before."""
        self.places = places
        self.outer = outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a freed parameter, or a wrapper without memory of its own
            address = 0
            if isinstance(tensor, ShardedParameter):
                with torch._C.DisableTorchFunctionSubclass():
                    address = tensor.data_ptr()
        is_wrapper = not address and is_dtensor(tensor)
        if is_wrapper:
            address = address_of(tensor)
        places = self.places
        unit = places.unit_at(address) if places.low <= address < places.high else None
        if unit is not None and not unit.is_overlaid:
            with torch._C.DisableTorchFunctionSubclass():
                if is_wrapper:
                    return _Divided(places.place(unit, local_of(tensor), address), Form.of(tensor))
                return places.place(unit, tensor, address)
        if self.outer is not None:
            return _Passed(self.outer[1], self.outer[0](tensor))
        # Detached, because a node that saved its own output would be a reference cycle; it shares the version counter.
        return (tensor.detach() if tensor.requires_grad else tensor), tensor._version


def _version_of(unit: Unit, slot: int) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return unit.params[slot]._version
