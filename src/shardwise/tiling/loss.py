"""The cross-entropy of a linear head, computed on a few tokens at a time: all logits never exist, nor does their gradient.

Called by user code inside a model's forward, and by `causal.py`. By default the gradients of hidden states, weight and bias are
formed in forward, from the same logits as the loss, and backward only scales them: three matrix products, as with all logits at
once. With `recomputes=True` backward computes the logits again, a fourth product, and nothing of the weight's size is kept.
The reasons are in `docs/decisions/0020-loss-in-chunks.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.errors import ModelError
from shardwise.tiling.arguments import check_arguments, check_labels
from shardwise.tiling.chunks import Batch, Head, run_head

CHUNK_BYTES = 128 << 20
"""Bytes of logits that exist at a time, unless the caller says otherwise."""
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
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
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)` that holds a few tokens' logits at a time.

    Args:
        hidden: what the head is applied to, [..., H].
        weight: of the head, [V, H]. A sharded parameter is gathered, as by any operation; a tiled one tile by tile.
        labels: classes, [...], int64.
        bias: of the head, [V].
        ignore_index: the label of tokens that do not count. They cost nothing.
        label_smoothing: as in `F.cross_entropy`.
        reduction: 'mean', 'sum' or 'none', as in `F.cross_entropy`.
        class_weight: what `F.cross_entropy` calls `weight`, [V].
        logit_scale: a factor on the logits.
        soft_cap: c in c * tanh(logits / c), which is applied after the factor. None: no cap.
        chunk_bytes: most bytes of logits and their gradient at a time; at least one token's.
        recomputes: compute the logits again in backward, and keep nothing of the weight's size between forward and backward.
            With reduction='none' it is always so.

    Returns: the loss in fp32 (fp64 for fp64 inputs); a scalar, or [...] with reduction='none'.
    """
    sources = (hidden, weight, labels, bias, class_weight)
    if has_torch_function(sources):  # a freed parameter: its owner gathers it and calls again
        loss: torch.Tensor = handle_torch_function(
            linear_cross_entropy,
            sources,
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            class_weight=class_weight,
            logit_scale=logit_scale,
            soft_cap=soft_cap,
            chunk_bytes=chunk_bytes,
            recomputes=recomputes,
        )
        return loss
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
    check_labels(targets, weight.shape[0], ignore_index)
    head = Head(product_dtype(hidden), float(logit_scale), soft_cap, float(label_smoothing), chunk_bytes)
    states, rows = hidden.reshape(flat.numel(), hidden.shape[-1]), kept if is_partial else None
    plan = _Plan(head, reduction, recomputes or reduction == "none", torch.is_grad_enabled())
    found: torch.Tensor = _Loss.apply(states, weight, bias, targets, rows, class_weight, plan)  # type: ignore[no-untyped-call]
    return found.view(labels.shape) if reduction == "none" else found


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of the matrix products: the inputs' own, or autocast's, which leaves fp64 alone."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def without_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off on a tensor's device."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else contextlib.nullcontext()


class _Plan(NamedTuple):
    """How the node of autograd's graph works."""

    head: Head
    reduction: str
    recomputes: bool
    is_recorded: bool
    """Whether a backward may follow; without it no gradient is formed."""


class _Loss(torch.autograd.Function):
    """The loss as one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        rows: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        plan: _Plan,
    ) -> torch.Tensor:
        batch = Batch(hidden, weight, bias, targets, rows, class_weight)
        wanted = [plan.is_recorded and not plan.recomputes and need for need in ctx.needs_input_grad[:3]]
        with without_autocast(hidden):
            losses, sums = run_head(plan.head, batch, wanted)
        ctx.plan, ctx.dtypes = plan, [None if source is None else source.dtype for source in batch[:3]]
        # A sharded weight is saved as a Place, so that its Unit can be freed until backward.
        ctx.save_for_backward(*(batch if plan.recomputes else sums))
        if plan.reduction == "none":
            ctx.denominator = None
            every = torch.zeros(hidden.shape[0], dtype=losses.dtype, device=losses.device)
            return losses if rows is None else every.index_copy_(0, rows, losses)
        total = losses.sum()
        ctx.denominator = batch.denominator(total.dtype) if plan.reduction == "mean" else torch.ones_like(total)
        ctx.is_empty = targets.numel() == 0
        mean: torch.Tensor = total / ctx.denominator
        return mean

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Scale the gradients that forward has formed, or form them now."""
        plan, needed = ctx.plan, ctx.needs_input_grad[:3]
        with torch.no_grad():
            sums = _gradients(ctx, grad) if plan.recomputes else ctx.saved_tensors
            factor = None
            if ctx.denominator is not None:  # without tokens the mean is NaN, but torch's gradients are zero
                factor = torch.zeros_like(grad) if ctx.is_empty else grad / ctx.denominator
            in_place = plan.recomputes or not _keeps_graph()  # else a later backward needs the sums again
            found = [
                _scaled(total, factor, dtype, in_place=in_place) if need and total is not None else None
                for total, dtype, need in zip(sums, ctx.dtypes, needed, strict=True)
            ]
        return *(once(total) for total in found), None, None, None, None


def _gradients(ctx: Any, grad: torch.Tensor) -> list[torch.Tensor | None]:
    """Compute the logits again, and from them what forward has not formed."""
    batch = Batch(*ctx.saved_tensors)
    factors = None
    if ctx.denominator is None:
        factors = grad if batch.rows is None else grad.index_select(0, batch.rows)
    with without_autocast(grad):
        _, sums = run_head(ctx.plan.head, batch, ctx.needs_input_grad[:3], factors)
    return sums


def _scaled(total: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype, *, in_place: bool) -> torch.Tensor:
    if factor is not None:
        if total.dtype.itemsize < factor.dtype.itemsize:  # fp16 may not hold the factor, which contains a loss scale
            total = total.to(factor.dtype).mul_(factor)
        else:
            total = total.mul_(factor) if in_place else total * factor
    return total.to(dtype)


def once(grad: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient that backward returns. With create_graph=True it must not look like a constant: it raises if it is used."""
    if grad is None or not torch.is_grad_enabled():
        return grad
    found: torch.Tensor = _NotTwice.apply(grad.requires_grad_())  # type: ignore[no-untyped-call]
    return found


class _NotTwice(torch.autograd.Function):
    """A gradient whose own gradient is not known: asking for it raises."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ModelError(
            "linear_cross_entropy was differentiated twice: a gradient that create_graph=True computed is used in a loss. "
            "It has no second derivative. Use F.cross_entropy(F.linear(hidden, weight), labels) there."
        )
