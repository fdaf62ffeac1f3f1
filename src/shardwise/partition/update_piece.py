"""What the optimizer updates: this rank's part of one parameter, with its master and its reduced gradient.

Made by a Unit for its span, given to the user's optimizer by `optim`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from shardwise.partition.layout import Piece
from shardwise.partition.raw import own_grad, set_own_grad


@dataclasses.dataclass(frozen=True)
class UpdatePiece:
    """One parameter's part inside this rank's span, as the optimizer sees it."""

    bounds: Piece
    master: nn.Parameter

    @property
    def slot(self) -> int:
        """The parameter's number in its Unit."""
        return self.bounds.slot_index

    @property
    def range(self) -> slice:
        """Where it lies in the span."""
        return slice(self.bounds.shard_start, self.bounds.shard_start + self.bounds.numel)

    @property
    def grad(self) -> torch.Tensor | None:
        """The Piece's reduced gradient."""
        return own_grad(self.master)

    def set_grad(self, grad: torch.Tensor | None) -> None:
        """Set the gradient that the optimizer reads."""
        set_own_grad(self.master, grad)
