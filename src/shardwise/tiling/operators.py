"""Which operations can be done to a parameter tile by tile, and how.

Called by `engine.Tiles` with the arguments of an operation that has met a tiled parameter. A tile is some rows of the parameter.
Where rows are outputs (`F.linear`, look-ups, stacked experts), results of tiles are put side by side, as exact as the whole
operation; where rows are what is summed over (`x @ weight`), results of tiles are added up. In both cases autograd records one
operation per tile, so that its backward too has one tile at a time. An operation returns NotImplemented for arguments with which
it cannot be done so; then it runs on a copy of the whole parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.engine import Find, Operators, Tiled
from shardwise.errors import ModelError
from shardwise.tiling.vocabulary import tiled_cross_entropy


def linear(find: Find, input: torch.Tensor, weight: Any, bias: Any = None) -> Any:
    """`F.linear`: tiles give columns of the output, or are summed over if the weight is a transposed view."""
    tiled = find(weight)
    if tiled is None or find(input) is not None or find(bias) is not None or len(tiled.shape) != 2:
        return NotImplemented
    if tiled.is_transposed:
        product = _summed(tiled, input)
        return product if bias is None else product + bias
    return _columns(tiled, input, bias)


def matmul(find: Find, input: Any, other: Any) -> Any:
    """`torch.matmul`, `torch.mm` and `@`, with the tiled parameter on either side."""
    left, right = find(input), find(other)
    if right is None:
        return NotImplemented if left is None else _from_left(left, other)
    if left is not None or input.dim() == 0:
        return NotImplemented
    if len(right.shape) == 3:
        return _stacked(right, input) if not right.is_transposed and input.dim() == 3 else NotImplemented
    if len(right.shape) != 2:
        return NotImplemented
    return _columns(right, input, None) if right.is_transposed else _summed(right, input)


def mm(find: Find, input: Any, mat2: Any) -> Any:
    """`torch.mm`."""
    return matmul(find, input, mat2)


def bmm(find: Find, input: Any, mat2: Any) -> Any:
    """`torch.bmm` with stacked weights, as of experts: tiles give slices of the output."""
    return matmul(find, input, mat2)


def addmm(find: Find, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """`torch.addmm`, as transformers' Conv1D calls it with a weight of [inputs, outputs]."""
    tiled = find(mat2)
    if tiled is None or find(input) is not None or find(mat1) is not None:
        return NotImplemented
    if tiled.is_transposed:
        is_cut = input.dim() > 0 and input.shape[-1] == tiled.shape[0]
        added = tiled.cut(input, -1) if is_cut else [input] * len(tiled.tiles)
        parts = [
            tile.run(lambda leaf, a, x: torch.addmm(a, x, leaf.t(), beta=beta, alpha=alpha), a, mat1)
            for tile, a in zip(tiled.tiles, added, strict=True)
        ]
        return torch.cat(parts, -1)
    total = input
    for number, (tile, x) in enumerate(zip(tiled.tiles, tiled.cut(mat1, -1), strict=True)):
        keep = beta if number == 0 else 1
        total = tile.run(lambda leaf, t, x, keep=keep: torch.addmm(t, x, leaf, beta=keep, alpha=alpha), total, x)
    return total


def embedding(
    find: Find,
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`F.embedding`: every tile gives the rows that it has; their gradient is handed over as rows."""
    tiled = find(weight)
    if tiled is None or tiled.is_transposed or scale_grad_by_freq or sparse or len(tiled.shape) != 2:
        return NotImplemented
    if max_norm is not None:
        raise ModelError(
            f"embedding with max_norm={max_norm} on a table of {list(tiled.shape)} that is cut into tiles: it changes the rows "
            "that it looks up, which cannot be done tile by tile. Raise Tiling(max_bytes=...) above this table's bytes."
        )
    num_rows, width = tiled.shape
    flat = input.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_rows:
        raise IndexError(f"embedding: indices from {int(flat.min())} to {int(flat.max())}, but the table has {num_rows} rows.")
    values: list[torch.Tensor] = []

    def look_up(leaf: torch.Tensor, low: int, high: int) -> None:
        if not values:
            values.append(torch.empty(*input.shape, width, dtype=leaf.dtype, device=leaf.device))
        mine = ((flat >= low) & (flat < high)).nonzero().squeeze(-1)
        values[0].view(-1, width).index_copy_(0, mine, leaf.index_select(0, flat[mine] - low))

    with torch.no_grad():
        for tile in tiled.tiles:
            tile.run(look_up, tile.low, tile.high)
    found = values[0]
    if tiled.attach is None:
        return found
    padding = -1 if padding_idx is None else padding_idx % num_rows
    return tiled.attach(found, input, padding)


def _columns(tiled: Tiled, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` with the weight's rows as outputs: columns of the result side by side."""
    biases = [None] * len(tiled.tiles) if bias is None else tiled.cut(bias, 0)
    parts = [tile.run(lambda leaf, x, b: F.linear(x, leaf, b), input, b) for tile, b in zip(tiled.tiles, biases, strict=True)]
    return torch.cat(parts, -1)


def _summed(tiled: Tiled, input: torch.Tensor) -> torch.Tensor:
    """`input @ weight` with the weight's rows as what is summed over."""
    flat = input.reshape(-1, input.shape[-1])
    total: torch.Tensor | None = None
    for tile, x in zip(tiled.tiles, tiled.cut(flat, -1), strict=True):
        if total is None:
            total = tile.run(lambda leaf, x: torch.mm(x, leaf), x)
        else:
            total = tile.run(lambda leaf, t, x: torch.addmm(t, x, leaf), total, x)
    assert total is not None
    return total.reshape(*input.shape[:-1], tiled.shape[1])


def _stacked(tiled: Tiled, input: torch.Tensor) -> Any:
    """`torch.bmm(input, weight)` with as many matrices on both sides."""
    if input.shape[0] != tiled.shape[0]:
        return NotImplemented
    return torch.cat([tile.run(lambda leaf, x: torch.bmm(x, leaf), x) for tile, x in _pairs(tiled, input)], 0)


def _from_left(tiled: Tiled, other: torch.Tensor) -> Any:
    """`weight @ other`: rows of the output below each other."""
    if tiled.is_transposed or len(tiled.shape) != 2 or not 1 <= other.dim() <= 2:
        return NotImplemented
    return torch.cat([tile.run(lambda leaf, x: leaf @ x, other) for tile in tiled.tiles], 0)


def _pairs(tiled: Tiled, input: torch.Tensor) -> Any:
    return zip(tiled.tiles, tiled.cut(input, 0), strict=True)


OPERATORS: Operators = {
    "linear": linear,
    "matmul": matmul,
    "__matmul__": matmul,
    "__rmatmul__": lambda find, input, other: matmul(find, other, input),
    "mm": mm,
    "bmm": bmm,
    "addmm": addmm,
    "embedding": embedding,
    "linear_cross_entropy": tiled_cross_entropy,
}
"""By the names that operations have in torch."""
