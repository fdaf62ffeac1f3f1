"""The cross-entropy of a linear head whose weight is cut into tiles: some classes and some tokens at a time.

`linear_cross_entropy` comes here when its weight is a tiled parameter. With z the logits, a token's loss needs the logarithm of
the sum of exp(z), the logit of its label and, with label smoothing, a sum of all logits. Every tile gives its part of each, as
one node of autograd's graph; the parts are combined by ordinary operations on a few numbers per token. A tile's backward
computes its logits again, so that nothing of the weight's size is kept, and the weight's gradient is formed tile by tile.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine import Find
from shardwise.tiling.arguments import check_arguments, check_labels
from shardwise.tiling.chunks import Batch, Head, chunk_gradients, chunk_logits
from shardwise.tiling.loss import CHUNK_BYTES, once, product_dtype, without_autocast


def tiled_cross_entropy(
    find: Find,
    hidden: torch.Tensor,
    weight: Any,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    class_weight: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    recomputes: bool = False,
) -> Any:
    """`linear_cross_entropy` for a tiled weight; logits are always computed again in backward."""
    tiled = find(weight)
    if tiled is None or tiled.is_transposed or any(find(value) is not None for value in (hidden, labels, bias, class_weight)):
        return NotImplemented
    check_arguments(
        hidden,
        weight,
        labels,
        bias,
        class_weight,
        label_smoothing=label_smoothing,
        reduction=reduction,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        chunk_bytes=chunk_bytes,
    )
    flat = labels.reshape(-1)
    kept = (flat != ignore_index).nonzero().squeeze(-1)
    is_partial = kept.numel() < flat.numel()
    targets = flat.index_select(0, kept) if is_partial else flat
    check_labels(targets, tiled.shape[0], ignore_index)
    head = Head(product_dtype(hidden), float(logit_scale), soft_cap, float(label_smoothing), chunk_bytes)
    states = hidden.reshape(flat.numel(), hidden.shape[-1])
    states = states.index_select(0, kept) if is_partial else states
    biases = [None] * len(tiled.tiles) if bias is None else tiled.cut(bias, 0)
    weights = None if class_weight is None else class_weight.to(head.wide)
    parts = []
    for tile, b in zip(tiled.tiles, biases, strict=True):
        own = None if weights is None else weights[tile.low : tile.high]
        parts.append(
            tile.run(lambda leaf, x, b, low=tile.low, own=own: _Classes.apply(x, leaf, b, targets - low, own, head), states, b)  # type: ignore[no-untyped-call]
        )
    logs, hits, spreads = (torch.stack(found) for found in zip(*parts, strict=True))
    losses = _combined(head, logs, hits, spreads, targets, weights, tiled.shape[0])
    if reduction == "none":
        found = torch.zeros(flat.numel(), dtype=losses.dtype, device=losses.device).index_copy(0, kept, losses)
        return found.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    batch = Batch(hidden, hidden, None, targets, None, class_weight)
    return losses.sum() / batch.denominator(losses.dtype)


def _combined(
    head: Head,
    logs: torch.Tensor,
    hits: torch.Tensor,
    spreads: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    num_classes: int,
) -> torch.Tensor:
    """Each token's loss from the parts of all tiles: the formula of `chunks.py`."""
    hit = torch.full_like(hits[0], 1.0 - head.label_smoothing)
    if weights is not None:
        hit = hit * weights[targets]
    expected, mass = hit * hits.sum(0), hit
    if head.label_smoothing:
        smooth = head.label_smoothing / num_classes
        expected = expected + smooth * spreads.sum(0)
        mass = hit + (head.label_smoothing if weights is None else smooth * weights.sum())
    return mass * torch.logsumexp(logs, 0) - expected


class _Classes(torch.autograd.Function):
    """What the classes of one tile contribute: per token log(sum(exp(z))), the label's z or 0, and the sum of all z."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        class_weight: torch.Tensor | None,
        head: Head,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = Batch(states, weight, bias, targets, None, class_weight)
        logs, hits, spreads = (torch.empty(len(targets), dtype=head.wide, device=states.device) for _ in range(3))
        with without_autocast(states):
            for chunk, logits, _ in chunk_logits(head, batch, wants_grad=False):
                torch.logsumexp(logits, -1, out=logs[chunk])
                inside, at = _own(targets[chunk], len(weight))
                found = logits.gather(-1, at.unsqueeze(-1)).squeeze(-1)
                hits[chunk] = found.where(inside, 0)  # not a product: a masked class has -inf
                spreads[chunk] = logits.sum(-1) if class_weight is None else logits @ class_weight
        ctx.head = head
        ctx.save_for_backward(states, weight, bias, targets, class_weight, logs)
        return logs, hits, spreads

    @staticmethod
    def backward(ctx: Any, grad_logs: torch.Tensor, grad_hits: torch.Tensor, grad_spreads: torch.Tensor) -> Any:
        states, weight, bias, targets, class_weight, logs = ctx.saved_tensors
        batch, head = Batch(states, weight, bias, targets, None, class_weight), ctx.head
        logs = logs.masked_fill(logs == float("-inf"), 0.0)  # no class of this tile is possible: exp(-inf) is 0

        def slopes(chunk: slice, logits: torch.Tensor) -> None:
            logits.sub_(logs[chunk].unsqueeze(-1)).exp_().mul_(grad_logs[chunk].unsqueeze(-1))
            inside, at = _own(targets[chunk], len(weight))
            logits.scatter_add_(-1, at.unsqueeze(-1), (grad_hits[chunk] * inside).unsqueeze(-1))
            if head.label_smoothing:
                spread = grad_spreads[chunk].unsqueeze(-1)
                logits.add_(spread if class_weight is None else spread * class_weight)

        with torch.no_grad(), without_autocast(states):
            found = chunk_gradients(head, batch, ctx.needs_input_grad[:3], slopes)
        sources = (states, weight, bias)
        grads = [None if total is None else total.to(source.dtype) for total, source in zip(found, sources, strict=True)]
        return *(once(grad) for grad in grads), None, None, None


def _own(targets: torch.Tensor, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels are classes of a tile, and their numbers there (0 for the others)."""
    inside = (targets >= 0) & (targets < num_classes)
    return inside, targets.where(inside, 0)
