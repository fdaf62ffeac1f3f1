"""How many bytes does autograd save in one forward for its backward?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def saved_activation_bytes(is_parameter: Callable[[int], bool]) -> Iterator[Callable[[], int]]:
    """Sum the bytes of distinct storages saved inside the context, except those for which `is_parameter(data_ptr)` is True.

    Use it for one measured forward only: inside the context torch does not check saved tensors for in-place changes.
    """
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not is_parameter(storage.data_ptr()):
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach() if tensor.grad_fn is not None else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(storages.values())
