"""Agreements with the ranks that hold the other parts of the model (tensor and pipeline parallelism): small values only.

What these ranks send each other in a forward or backward pass is torch's own business; gradients and parameters never cross.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.watch import Watch
from shardwise.comm.world import World


class Beside:
    """The ranks of the model axis, at the same place of their Worlds."""

    def __init__(self, world: World, watch: Watch) -> None:
        """`watch`: that of this rank's transport, which gives the limit and the step."""
        self.world = world
        self._of_run = watch
        self._watch = Watch(world, watch.timeout_s)
        self._watch.join(watch)

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """All-reduce a small tensor; bitwise the same on all of these ranks. If one does not come, the error names the call."""
        self._watch.step = self._of_run.step
        operation = self._watch.begin("meeting", "combine")
        work: Any = dist.all_reduce(values, op=op, group=self.world.group, async_op=True)
        if self.world.backend == "nccl":
            work.wait(timedelta(seconds=self._watch.timeout_s))
        else:
            self._watch.wait_all([(work, -1)], operation)
        return values
