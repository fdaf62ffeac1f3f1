"""How many bytes autograd keeps for the backward pass of one forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def saved_activation_bytes(is_parameter: Callable[[int], bool]) -> Iterator[Callable[[], int]]:
    """Count distinct storages saved inside the context; `is_parameter(data_ptr)` says what does not count.

    Meant for one measured forward, not for the hot path: torch then no longer checks saved tensors for
    in-place changes.
    """
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not is_parameter(storage.data_ptr()):
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach() if tensor.grad_fn is not None else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(storages.values())
