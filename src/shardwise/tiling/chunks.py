"""Computes a head's losses and their gradients on a few tokens at a time. It knows nothing of autograd; `loss.py` calls it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch


class Head(NamedTuple):
    """How logits and losses are computed: the options of `linear_cross_entropy`."""

    dtype: torch.dtype
    """Dtype of the matrix products."""
    logit_scale: float
    soft_cap: float | None
    label_smoothing: float
    chunk_bytes: int

    @property
    def wide(self) -> torch.dtype:
        """Dtype of everything that is not a matrix product."""
        return torch.promote_types(self.dtype, torch.float32)

    def bytes_per_logit(self, *, wants_grad: bool) -> int:
        """What one logit and its gradient need at the same time."""
        narrow = 0 if self.dtype == self.wide else self.dtype.itemsize
        slope = self.wide.itemsize if wants_grad and self.soft_cap is not None else 0
        return self.wide.itemsize + narrow + slope

    def tokens_per_chunk(self, num_tokens: int, num_classes: int, *, wants_grad: bool) -> int:
        """Tokens whose logits fit, in chunks of nearly equal length."""
        most = max(1, self.chunk_bytes // max(1, num_classes * self.bytes_per_logit(wants_grad=wants_grad)))
        return max(1, math.ceil(num_tokens / max(1, math.ceil(num_tokens / most))))


class Batch(NamedTuple):
    """What the head is applied to."""

    hidden: torch.Tensor
    """[tokens, features]"""
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    """The classes of the tokens that count."""
    rows: torch.Tensor | None
    """Which rows of `hidden` the targets belong to; None: all, in order."""
    class_weight: torch.Tensor | None

    def denominator(self, dtype: torch.dtype) -> torch.Tensor:
        """What a sum of losses is divided by for their mean: the number of tokens, or their classes' weights."""
        if self.class_weight is None:
            return torch.full((), self.targets.numel(), dtype=dtype, device=self.targets.device)
        return self.class_weight.to(dtype).index_select(0, self.targets).sum()


def run_head(
    head: Head, batch: Batch, wanted: Sequence[bool], factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Each token's loss, and the gradients of their sum with respect to hidden, weight and bias where they are `wanted`.

    `factors`: by which each token's loss counts in the gradients; None: 1.
    """
    hidden, weight, bias, targets, rows, class_weight = batch
    class_weight = None if class_weight is None else class_weight.to(head.wide)
    wants_grad, num_tokens = any(wanted), targets.numel()
    length = head.tokens_per_chunk(num_tokens, weight.shape[0], wants_grad=wants_grad)
    buffers = _Buffers(head, weight, bias, min(length, num_tokens))
    sums = _Gradients(head, hidden, weight, is_partial=rows is not None, wanted=wanted)
    losses = torch.empty(num_tokens, dtype=head.wide, device=hidden.device)
    for start in range(0, num_tokens, length):
        chunk = slice(start, min(start + length, num_tokens))
        states = (hidden[chunk] if rows is None else hidden.index_select(0, rows[chunk])).to(head.dtype)
        logits = buffers.logits(states)
        loss = _loss_and_slope(head, logits, targets[chunk].unsqueeze(-1), class_weight, wants_grad=wants_grad)
        losses[chunk] = loss.squeeze(-1)
        if wants_grad:
            if factors is not None:
                logits.mul_(factors[chunk].unsqueeze(-1))
            sums.add(buffers, logits, states, chunk if rows is None else rows[chunk])
    return losses, [sums.hidden, sums.weight, sums.bias]


def chunk_logits(
    head: Head, batch: Batch, *, wants_grad: bool
) -> Iterator[tuple[slice, torch.Tensor, tuple[_Buffers, torch.Tensor, torch.Tensor | None]]]:
    """(tokens, their logits as the loss sees them, what `chunk_gradients` needs) chunk by chunk; valid until the next one."""
    num_tokens = len(batch.hidden)
    length = head.tokens_per_chunk(num_tokens, len(batch.weight), wants_grad=wants_grad)
    buffers = _Buffers(head, batch.weight, batch.bias, min(length, num_tokens))
    for start in range(0, num_tokens, length):
        chunk = slice(start, min(start + length, num_tokens))
        states = batch.hidden[chunk].to(head.dtype)
        logits = buffers.logits(states)
        yield chunk, logits, (buffers, states, _scale_and_cap(head, logits, wants_grad=wants_grad))


def chunk_gradients(
    head: Head, batch: Batch, wanted: Sequence[bool], slopes: Callable[[slice, torch.Tensor], None]
) -> list[torch.Tensor | None]:
    """The gradients of hidden, weight and bias where they are `wanted`. `slopes` turns logits into their gradient, in place."""
    sums = _Gradients(head, batch.hidden, batch.weight, is_partial=False, wanted=wanted)
    for chunk, logits, (buffers, states, slope) in chunk_logits(head, batch, wants_grad=True):
        slopes(chunk, logits)
        _through_scale_and_cap(head, logits, slope)
        sums.add(buffers, logits, states, chunk)
    return [sums.hidden, sums.weight, sums.bias]


class _Buffers:
    """The weight as the products need it, and memory for one chunk's logits.

    It is used again for every chunk: new memory would be given by the system, and cleared, again and again.
    """

    def __init__(self, head: Head, weight: torch.Tensor, bias: torch.Tensor | None, num_tokens: int) -> None:
        self.weight = weight.to(head.dtype)
        self._bias = None if bias is None else bias.to(head.dtype)
        self._narrow = torch.empty(num_tokens, weight.shape[0], dtype=head.dtype, device=weight.device)
        self._wide = self._narrow if head.dtype == head.wide else torch.empty_like(self._narrow, dtype=head.wide)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The head's output for some tokens, in the wide dtype; valid until the next call."""
        out = self._narrow[: len(states)]
        if self._bias is None:
            torch.mm(states, self.weight.t(), out=out)
        else:
            torch.addmm(self._bias, states, self.weight.t(), out=out)
        return out if self._wide is self._narrow else self._wide[: len(states)].copy_(out)

    def narrowed(self, logits: torch.Tensor) -> torch.Tensor:
        """What `logits` has become, in the dtype of the products."""
        return logits if self._wide is self._narrow else self._narrow[: len(logits)].copy_(logits)


class _Gradients:
    """Sums of gradients over chunks; None where they are not wanted. The weight's is summed in fp32 or wider."""

    def __init__(
        self, head: Head, hidden: torch.Tensor, weight: torch.Tensor, *, is_partial: bool, wanted: Sequence[bool]
    ) -> None:
        """`is_partial`: some rows of `hidden` get no gradient."""
        self.hidden: torch.Tensor | None = None
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self._slice_bytes = head.chunk_bytes // 4
        if wanted[0]:
            make = torch.zeros if is_partial else torch.empty
            self.hidden = make(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        if wanted[1]:
            dtype = torch.promote_types(weight.dtype, head.wide)
            self.weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        if wanted[2]:
            self.bias = torch.zeros(weight.shape[0], dtype=head.wide, device=weight.device)

    def add(self, buffers: _Buffers, slopes: torch.Tensor, states: torch.Tensor, place: slice | torch.Tensor) -> None:
        """Add one chunk's part: `slopes` is the gradient of the head's output."""
        if self.bias is not None:
            self.bias.add_(slopes.sum(0))
        slopes = buffers.narrowed(slopes)
        if self.hidden is not None:
            self.hidden[place] = (slopes @ buffers.weight).to(self.hidden.dtype)
        if self.weight is not None and self.weight.dtype == slopes.dtype:
            self.weight.addmm_(slopes.t(), states)
        elif self.weight is not None:  # a 16-bit product is formed for some classes at a time, and added in fp32
            length = max(1, self._slice_bytes // max(1, states.shape[-1] * states.element_size()))
            for start in range(0, self.weight.shape[0], length):
                self.weight[start : start + length].add_(slopes[:, start : start + length].t() @ states)


def _loss_and_slope(
    head: Head, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, *, wants_grad: bool
) -> torch.Tensor:
    """Each token's loss, [n, 1]; `logits` become the gradient of the loss with respect to the head's output.

    With q the distribution over classes that the label, smoothing and class `weights` make, and Q its sum, the loss is
    Q * log(sum(exp(z))) - sum(q * z), and its gradient is Q * softmax(z) - q. Both are formed after the row's largest logit was
    subtracted, which changes neither.
    """
    slope = _scale_and_cap(head, logits, wants_grad=wants_grad)
    logits.sub_(logits.amax(-1, keepdim=True))
    smooth = head.label_smoothing / logits.shape[-1]
    hit = torch.full_like(labels, 1.0 - head.label_smoothing, dtype=head.wide)
    if weights is not None:
        hit.mul_(weights[labels])
    expected = hit * logits.gather(-1, labels)
    mass = hit
    if smooth:
        spread = logits.sum(-1, keepdim=True) if weights is None else (logits @ weights).unsqueeze(-1)
        expected = expected + smooth * spread
        mass = hit + (head.label_smoothing if weights is None else smooth * weights.sum())
    norm = logits.exp_().sum(-1, keepdim=True)
    losses = mass * norm.log() - expected
    if wants_grad:
        logits.mul_(mass / norm)
        logits.scatter_add_(-1, labels, -hit)
        if smooth:
            logits.sub_(smooth if weights is None else smooth * weights)
        _through_scale_and_cap(head, logits, slope)
    return losses


def _scale_and_cap(head: Head, logits: torch.Tensor, *, wants_grad: bool) -> torch.Tensor | None:
    """Turn a head's output into logits, in place; returns the derivative of the cap if there is one and it will be needed."""
    if head.logit_scale != 1.0:
        logits.mul_(head.logit_scale)
    if head.soft_cap is None:
        return None
    logits.div_(head.soft_cap).tanh_()
    slope = logits.square().neg_().add_(1.0) if wants_grad else None
    logits.mul_(head.soft_cap)
    return slope


def _through_scale_and_cap(head: Head, slopes: torch.Tensor, slope: torch.Tensor | None) -> None:
    """Turn a gradient of logits into one of the head's output, in place."""
    if slope is not None:
        slopes.mul_(slope)
    if head.logit_scale != 1.0:
        slopes.mul_(head.logit_scale)
