"""Which tensors does autograd save for backward, and for how long? Changes nothing that is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


class _Saved(NamedTuple):
    tensor: torch.Tensor
    version: int
    note: object


class _Note:
    """Packs a tensor as it is, with what `note` returned for it."""

    only_notes = True
    """Tells `engine.saved` that unpacking does nothing but return the tensor."""

    def __init__(self, note: Callable[[torch.Tensor], object]) -> None:
        self._note = note

    def __call__(self, tensor: torch.Tensor) -> _Saved:
        # Detached, because a node that saved its own output would be a reference cycle; it shares the version counter.
        return _Saved(tensor.detach() if tensor.requires_grad else tensor, tensor._version, self._note(tensor))


def _unpack(saved: _Saved) -> torch.Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
            f"{list(saved.tensor.shape)} is at version {saved.tensor._version}; expected version {saved.version} instead."
        )
    return saved.tensor


@contextlib.contextmanager
def noting_saved(note: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Inside the context, call `note` with every tensor that autograd saves; what it returns lives as long as that is saved."""
    with torch.autograd.graph.saved_tensors_hooks(_Note(note), _unpack):
        yield
