"""Forgets what autograd would save of a forward call, and computes it again when backward asks for it.

While a call runs autograd saves numbered slots instead of tensors. When backward unpacks the first slot, the call runs again on
the inputs that were kept (`keeping.py`), and the tensors that autograd would save then are what the slots stand for. The graph is
the one that the first call built; nothing in the module tree changes.

Calls that follow each other can be one Stretch: only what none of them has made is kept of their inputs, and all of them are
computed again at once. Called by `Policy`.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.activations.caches import with_own_caches
from shardwise.activations.keeping import Keeping, Kept
from shardwise.activations.sizes import StretchSize
from shardwise.activations.surroundings import Surroundings
from shardwise.engine import map_tensors, tensors_in
from shardwise.errors import ModelError, StaleGraphError
from shardwise.tiers import Hold


class Call:
    """One forward call whose saved tensors are computed again."""

    def __init__(self, name: str, module: nn.Module, stretch: Stretch, inputs: Any, keeping: Keeping) -> None:
        """`inputs` are (args, kwargs)."""
        self.name = name
        self._module = module
        self._stretch = weakref.ref(stretch)  # which holds this call: a cycle would keep inputs until garbage is collected
        self._number = len(stretch.calls)
        self._surroundings = Surroundings(keeping.device)
        self._held = keeping.held
        self._inputs: dict[torch.Tensor, Kept | tuple[int, int]] = {}  # by placeholder; or (call, output) of the stretch
        self._template = with_own_caches(map_tensors(lambda tensor: self._keep(tensor, stretch, keeping), inputs))
        self._shapes: list[torch.Size] = []  # of everything that autograd has saved
        self._found: dict[int, dict[int, _Found]] = {}  # by backward: what was computed and not asked for yet
        self._hooks: contextlib.AbstractContextManager[Any] | None = None
        stretch.calls.append(self)

    def _keep(self, tensor: torch.Tensor, stretch: Stretch, keeping: Keeping) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        placeholder = torch.empty(0)
        self._inputs[placeholder] = stretch.maker_of(tensor) or keeping.keep(tensor, f"module {self.name!r}")
        return placeholder

    # -- the first time ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From now on autograd saves slots."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def end(self, output: Any) -> None:
        """The call has ended, or raised."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        stretch = self._stretch()
        if stretch is not None:
            stretch.made(self._number, output)

    def _pack(self, tensor: torch.Tensor) -> _Slot:
        stretch = self._stretch()
        assert stretch is not None
        self._shapes.append(tensor.shape)
        return _Slot(stretch, self._number, len(self._shapes) - 1)

    # -- in backward ------------------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        """Whether backward may ask for anything."""
        return bool(self._shapes)

    def take(self, backward: int, number: int) -> torch.Tensor | None:
        """What was computed for a slot, once; else None."""
        found = self._found.get(backward, {})
        if number not in found:
            return None
        tensor, version, _ = found.pop(number)
        if not found:
            del self._found[backward]
        if tensor._version != version:
            raise StaleGraphError(
                f"module {self.name!r} has changed a tensor of shape {list(tensor.shape)} in place that its backward needs. "
                "Change a copy instead."
            )
        return tensor

    def compute(self, backward: int, made: dict[tuple[int, int], torch.Tensor], *, is_last: bool) -> Any:
        """Run the call again and hold what autograd would save, for one backward. Returns the output, None if `is_last`."""
        found: dict[int, _Found] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            number = len(found)
            if number >= len(self._shapes) or tensor.shape != self._shapes[number]:
                raise self._differs(f"saves a tensor of shape {list(tensor.shape)} as number {number + 1}")
            found[number] = _Found(tensor.detach(), tensor._version, self._held.hold(tensor))
            if is_last and len(found) == len(self._shapes):
                raise _Enough
            return found[number].tensor  # detached, because a node that saved its own output would be a reference cycle

        def fill(placeholder: torch.Tensor) -> torch.Tensor:
            kept = self._inputs.get(placeholder)
            if kept is None:
                return placeholder  # a parameter
            return kept.fetch() if isinstance(kept, Kept) else made[kept]

        args, kwargs = with_own_caches(map_tensors(fill, self._template))
        output = None
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _itself)
        with contextlib.suppress(_Enough), self._surroundings.again(), torch.enable_grad(), hooks:
            output = self._module(*args, **kwargs)
        if len(found) != len(self._shapes):
            raise self._differs(f"saves {len(found)} tensors")
        self._found[backward] = found
        return None if is_last else output

    def held_bytes(self, backward: int) -> int:
        """What was computed and not asked for yet holds this much."""
        return sum(found.hold.num_bytes for found in self._found.get(backward, {}).values() if found.hold is not None)

    def _differs(self, what: str) -> ModelError:
        return ModelError(
            f"module {self.name!r} {what} when it is computed again for backward; the first time it saved {len(self._shapes)}. "
            "Its forward must do the same both times: it may use torch's random generators, but no other state that the first "
            "call has changed (a cache, a counter). Leave it out: Activations(checkpoint=lambda name, module: ...)."
        )


class Stretch:
    """Calls that follow each other and are computed again at once."""

    def __init__(self, size: StretchSize) -> None:
        self.calls: list[Call] = []
        self._size = size
        self._makers: dict[int, tuple[weakref.ref[torch.Tensor], int, tuple[int, int]]] = {}

    def made(self, call: int, output: Any) -> None:
        """A call has returned this: calls after it that get the same tensors need not keep them."""
        for number, tensor in enumerate(tensors_in(output)):
            self._makers[id(tensor)] = weakref.ref(tensor), tensor._version, (call, number)

    def maker_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Which (call, output) of this stretch a tensor is, if it is one and has not been changed since."""
        found = self._makers.get(id(tensor))
        return found[2] if found is not None and found[0]() is tensor and found[1] == tensor._version else None

    def tensor(self, call: int, number: int) -> torch.Tensor:
        """What a slot stands for. It is handed out once; whoever asks again has it computed again."""
        backward = torch._C._current_graph_task_id()
        found = self.calls[call].take(backward, number)
        if found is None:
            self._compute(backward)
            found = self.calls[call].take(backward, number)
        assert found is not None
        return found

    def _compute(self, backward: int) -> None:
        """Run all calls again."""
        made: dict[tuple[int, int], torch.Tensor] = {}
        last = max(number for number, call in enumerate(self.calls) if call.saves)
        for number, call in enumerate(self.calls[: last + 1]):
            output = call.compute(backward, made, is_last=number == last)
            for position, tensor in enumerate(tensors_in(output)):
                made[number, position] = tensor.detach().requires_grad_(tensor.requires_grad)
        self._size.again_bytes = max(self._size.again_bytes, sum(call.held_bytes(backward) for call in self.calls))


class _Found(NamedTuple):
    """A tensor that was computed again."""

    tensor: torch.Tensor
    version: int
    hold: Hold | None


class _Enough(Exception):
    """All that backward will ask for has been computed."""


class _Slot(NamedTuple):
    """What autograd saves instead of a tensor."""

    stretch: Stretch
    call: int
    number: int


def _unpack(slot: _Slot) -> torch.Tensor:
    return slot.stretch.tensor(slot.call, slot.number)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
