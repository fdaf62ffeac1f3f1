"""Moves away what autograd saves, without computing anything again."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from shardwise.activations import keeping as keeping_module
from shardwise.activations.keeping import Keeping, Kept
from shardwise.engine import Runtime
from shardwise.tiers import own_part


class _Still:
    """A tensor that stays where it is."""

    def __init__(self, tensor: torch.Tensor, keeping: Keeping) -> None:
        self.tensor, self.version = tensor.detach() if tensor.requires_grad else tensor, tensor._version
        self._hold = keeping.held.hold(tensor)
        keeping.sizes.keep(self, is_away=False)

    @property
    def taken_bytes(self) -> int:
        """What it takes of the device's tier."""
        return 0 if self._hold is None else self._hold.num_bytes


class Elsewhere:
    """Saved-tensor hooks that move large tensors away. Parameters, views and small tensors stay."""

    def __init__(self, keeping: Keeping, runtime: Runtime) -> None:
        self._keeping = keeping
        self._units = runtime.units

    def begin(self) -> contextlib.AbstractContextManager[Any]:
        """From now on."""
        self._keeping.begin_stretch()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        return hooks

    def _pack(self, tensor: torch.Tensor) -> Kept | _Still:
        storage = own_part(tensor).untyped_storage()
        address = storage.data_ptr()
        num_bytes = own_part(tensor).numel() * tensor.element_size()
        is_view, is_small = storage.nbytes() != num_bytes, num_bytes < keeping_module.SMALL_BYTES
        if is_view or is_small or any(unit.has_address(address) for unit in self._units):
            return _Still(tensor, self._keeping)
        return self._keeping.keep(tensor, "a forward pass")


def _unpack(kept: Kept | _Still) -> torch.Tensor:
    if isinstance(kept, Kept):
        return kept.fetch()
    if kept.tensor._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
            f"{list(kept.tensor.shape)} is at version {kept.tensor._version}; expected version {kept.version} instead."
        )
    return kept.tensor
