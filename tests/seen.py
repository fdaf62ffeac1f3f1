"""What operations make while a piece of code runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Seen(TorchDispatchMode):
    """The largest tensor that any operation makes, and the shapes of products with the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = self.largest_numel = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
                self.largest_numel = max(self.largest_numel, tensor.numel())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products.append(tuple(made.shape))
        return made
