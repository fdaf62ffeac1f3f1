"""`linear_cross_entropy` against `F.cross_entropy` of all logits: values, gradients, edge cases, mistakes, what is held."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from launching import run_program, without_launcher
from seen import Seen
from shardwise.errors import ConfigError, ModelError

CLASSES, FEATURES, TOKENS = 11, 8, (3, 5)
TINY = 4 * CLASSES * 8
"""Chunks of a few tokens."""
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype = torch.float64, *, classes: int = CLASSES, features: int = FEATURES) -> Inputs:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(*TOKENS, features, generator=g, dtype=torch.float64)
    weight = torch.randn(classes, features, generator=g, dtype=torch.float64)
    bias = torch.randn(classes, generator=g, dtype=torch.float64)
    return tuple(tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias))  # type: ignore[return-value]


def some_labels(*, classes: int = CLASSES, ignores: bool = True) -> torch.Tensor:
    labels = torch.randint(0, classes, TOKENS, generator=torch.Generator().manual_seed(1))
    if ignores:
        labels[0, 2] = labels[2, 4] = -100
    return labels


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    class_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    **options: Any,
) -> torch.Tensor:
    """The same with all logits."""
    logits = F.linear(hidden, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    flat = logits.reshape(-1, weight.shape[0])
    loss = F.cross_entropy(flat, labels.reshape(-1), weight=class_weight, reduction=reduction, **options)
    return loss.view(labels.shape) if reduction == "none" else loss


def agree(found: torch.Tensor, expected: torch.Tensor, sources: tuple[torch.Tensor, ...], rtol: float, atol: float) -> None:
    """Compare losses and, for an arbitrary upstream gradient, the gradients."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=found.dtype)
    for ours, theirs in zip(
        torch.autograd.grad(found, sources, upstream), torch.autograd.grad(expected, sources, upstream), strict=True
    ):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


OPTIONS = [
    dict(zip(("reduction", "label_smoothing", "class_weight", "soft_cap", "logit_scale"), values, strict=True))
    for values in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (False, True), (None, 2.5), (1.0, 0.7))
]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("ignores", [False, True])
def test_equal_to_all_logits_with_every_option(ignores: bool, recomputes: bool) -> None:
    hidden, weight, bias = sources = inputs()
    labels = some_labels(ignores=ignores)
    for options in OPTIONS:
        chosen = dict(options, class_weight=torch.rand(CLASSES, dtype=torch.float64) if options["class_weight"] else None)
        found = sw.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_bytes=TINY, recomputes=recomputes, **chosen)
        agree(found, plain(hidden, weight, bias, labels, **chosen), sources, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_gradcheck(recomputes: bool, reduction: str) -> None:
    labels = some_labels()

    def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return sw.linear_cross_entropy(
            hidden, weight, labels, bias=bias, label_smoothing=0.1, soft_cap=3.0, logit_scale=1.3, reduction=reduction,
            chunk_bytes=TINY, recomputes=recomputes,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, inputs())


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 4, 7, 100])
def test_any_chunk(tokens_per_chunk: int) -> None:
    """docs/numerics.md, row `linear_cross_entropy`."""
    hidden, weight, _ = inputs(torch.float32)
    labels = some_labels()
    found = sw.linear_cross_entropy(hidden, weight, labels, chunk_bytes=tokens_per_chunk * CLASSES * 4)
    agree(found, plain(hidden, weight, None, labels), (hidden, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_recomputing_gives_the_same_bits(reduction: str) -> None:
    sources, labels = inputs(torch.float32), some_labels()
    losses = [
        sw.linear_cross_entropy(
            *sources[:2], labels, bias=sources[2], chunk_bytes=TINY, reduction=reduction, recomputes=recomputes
        )
        for recomputes in (False, True)
    ]
    grads = [torch.autograd.grad(loss, sources, torch.tensor(3.0)) for loss in losses]
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype, recomputes: bool) -> None:
    """Products in 16 bits, everything else in fp32: docs/numerics.md."""
    sources, labels = inputs(dtype), some_labels()
    hidden, weight, bias = sources
    found = sw.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_bytes=TINY, recomputes=recomputes)
    assert found.dtype == torch.float32
    agree(found, plain(hidden, weight, bias, labels), sources, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_loss_scale_that_fp16_does_not_hold(recomputes: bool) -> None:
    hidden, weight, _ = inputs(torch.float16)
    labels = some_labels(ignores=False)
    factor = 2.0**17
    loss = sw.linear_cross_entropy(hidden * 2**-6, weight, labels, chunk_bytes=TINY, recomputes=recomputes)
    expected = plain(hidden * 2**-6, weight, None, labels)
    (found,) = torch.autograd.grad(loss * factor, hidden)
    (wanted,) = torch.autograd.grad(expected * factor, hidden)
    assert found.isfinite().all() and found.abs().max() > 100
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1.0)


@pytest.mark.parametrize("recomputes", [False, True])
def test_autocast(recomputes: bool) -> None:
    sources, labels = inputs(torch.float32), some_labels()
    hidden, weight, bias = sources
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sw.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_bytes=TINY, recomputes=recomputes)
        mixed = sw.linear_cross_entropy(hidden.bfloat16(), weight, labels, bias=bias, chunk_bytes=TINY)
        expected = plain(hidden, weight, bias, labels)
    in_fp32 = sw.linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert not torch.equal(found, in_fp32), "the products were not in bf16"
    torch.testing.assert_close(mixed, expected, rtol=2e-2, atol=2e-2)
    agree(found, expected, sources, rtol=2e-2, atol=2e-2)
    (exact,) = torch.autograd.grad(in_fp32, weight)
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        double = [source.detach().double() for source in sources]
        assert sw.linear_cross_entropy(double[0], double[1], labels).dtype == torch.float64


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", ["all ignored", "no tokens"])
def test_nothing_to_predict(case: str, reduction: str, recomputes: bool, smoothing: float) -> None:
    """As torch: the mean is NaN, and gradients are zero."""
    hidden, weight, bias = inputs(torch.float32)
    labels = torch.full(TOKENS, -100)
    if case == "no tokens":
        hidden, labels = hidden[:0], labels[:0]
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    found = sw.linear_cross_entropy(hidden, weight, labels, bias=bias, recomputes=recomputes, **options)
    expected = plain(hidden, weight, bias, labels, **options)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())
    for _ in range(2):
        grads = torch.autograd.grad(found.sum(), (hidden, weight, bias), retain_graph=True)
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_ignored_tokens_cost_nothing() -> None:
    hidden, weight, _ = inputs()
    labels = torch.full(TOKENS, 7)
    labels[1] = 3
    with Seen() as seen:
        sw.linear_cross_entropy(hidden.detach(), weight.detach(), labels, ignore_index=7)
    assert seen.products == [(5, CLASSES)]
    found = sw.linear_cross_entropy(hidden, weight, labels, ignore_index=7)
    agree(found, plain(hidden, weight, None, labels, ignore_index=7), (hidden, weight), rtol=1e-9, atol=1e-12)


def test_masked_classes() -> None:
    """A bias of minus infinity takes a class out; its row of the weight gets a gradient of zero."""
    hidden, weight, _ = inputs()
    bias = torch.zeros(CLASSES, dtype=torch.float64)
    bias[4] = -torch.inf
    labels = some_labels().clamp_max(3)
    found = sw.linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert found.isfinite() and torch.equal(torch.autograd.grad(found, weight)[0][4], torch.zeros(FEATURES).double())
    found = sw.linear_cross_entropy(hidden, weight, labels, bias=bias)
    agree(found, plain(hidden, weight, bias, labels), (hidden, weight), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("hidden", "weight"), ("bias",), ("hidden", "weight", "bias")])
def test_what_needs_no_gradient(frozen: tuple[str, ...], recomputes: bool) -> None:
    sources = dict(zip(("hidden", "weight", "bias"), inputs(), strict=True))
    for name in frozen:
        sources[name].requires_grad_(False)
    trained = [tensor for tensor in sources.values() if tensor.requires_grad]
    labels = some_labels()
    found = sw.linear_cross_entropy(**sources, labels=labels, chunk_bytes=TINY, recomputes=recomputes)
    assert found.requires_grad == bool(trained)
    if trained:
        agree(found, plain(**sources, labels=labels), tuple(trained), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recomputes", [False, True])
def test_backward_twice_with_different_factors(recomputes: bool) -> None:
    sources, labels = inputs(), some_labels()
    loss = sw.linear_cross_entropy(*sources[:2], labels, bias=sources[2], chunk_bytes=TINY, recomputes=recomputes)
    once = torch.autograd.grad(loss, sources, retain_graph=True)
    kept = [grad.clone() for grad in once]
    thrice = torch.autograd.grad(loss, sources, torch.tensor(3.0, dtype=torch.float64), retain_graph=True)
    last = torch.autograd.grad(loss, sources)  # releases the graph, and may use its memory
    for first, copy, second, third in zip(once, kept, thrice, last, strict=True):
        assert torch.equal(first, copy) and torch.equal(third, copy)
        torch.testing.assert_close(second, 3 * copy)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, sources)


def test_one_weight_in_two_losses() -> None:
    hidden, weight, _ = inputs()
    labels, others = some_labels(), some_labels(ignores=False).flip(0)

    def total(loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        return loss(hidden, labels) + 0.3 * loss(hidden.tanh(), others)

    found = total(lambda h, y: sw.linear_cross_entropy(h, weight, y, chunk_bytes=TINY))
    agree(found, total(lambda h, y: plain(h, weight, None, y)), (hidden, weight), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_second_derivative_raises(recomputes: bool) -> None:
    """once_differentiable would return constants here, because the upstream gradient needs none."""
    hidden, weight, _ = inputs()
    loss = sw.linear_cross_entropy(hidden, weight, some_labels(), recomputes=recomputes)
    (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
    (expected,) = torch.autograd.grad(plain(hidden, weight, None, some_labels()), hidden)
    torch.testing.assert_close(slope, expected)
    with pytest.raises(ModelError, match="no second derivative"):
        (hidden.square().sum() + slope.square().sum()).backward()


@pytest.mark.parametrize("recomputes", [False, True])
def test_create_graph_of_other_terms_works(recomputes: bool) -> None:
    """Only the loss itself has no second derivative: what it is added to is differentiated as often as one likes."""
    hidden, weight, other = inputs()
    loss = sw.linear_cross_entropy(hidden, weight, some_labels(), recomputes=recomputes) + other.pow(3).sum()
    _, slope = torch.autograd.grad(loss, (weight, other), create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), other)[0], 6 * other)


def test_labels_that_change_before_backward_are_noticed() -> None:
    hidden, weight, _ = inputs()
    labels = some_labels(ignores=False)
    loss = sw.linear_cross_entropy(hidden, weight, labels, recomputes=True)
    labels.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float32, {"soft_cap": 3.0}), (torch.bfloat16, {}), (torch.float32, {"reduction": "none"})],
)
def test_no_tensor_is_larger_than_a_chunk(dtype: torch.dtype, options: dict[str, Any]) -> None:
    classes, chunk_bytes = 4000, 40_000
    hidden, weight, _ = inputs(dtype, classes=classes, features=2)
    labels = some_labels(classes=classes, ignores=False)
    with Seen() as seen:
        sw.linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes, **options).sum().backward()
    assert seen.largest_bytes <= max(chunk_bytes, 4 * weight.numel())
    with Seen() as seen:
        plain(hidden, weight, None, labels, **options).sum().backward()
    assert seen.largest_numel == labels.numel() * classes


@pytest.mark.parametrize("is_recorded", [False, True])
def test_evaluation_forms_no_gradients(is_recorded: bool) -> None:
    hidden, weight, _ = inputs()
    with Seen() as seen, torch.set_grad_enabled(is_recorded):
        loss = sw.linear_cross_entropy(hidden, weight, some_labels(ignores=False))
    assert loss.requires_grad == is_recorded
    assert len(seen.products) == (3 if is_recorded else 1)


def test_the_weights_gradient_is_held_once() -> None:
    """What forward summed becomes `.grad` itself; neither scaling nor accumulation copies it."""
    hidden, weight, _ = inputs()
    loss = sw.linear_cross_entropy(hidden, weight, some_labels())
    address = loss.grad_fn.saved_tensors[1].data_ptr()  # type: ignore[union-attr]
    (2 * loss).backward()
    assert weight.grad is not None and weight.grad.data_ptr() == address


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "label too large": ({"labels": torch.full(TOKENS, CLASSES)}, f"label {CLASSES} is out of range: there are {CLASSES} classes"),
    "label negative": ({"labels": torch.full(TOKENS, -1)}, "label -1 is out of range.*ignore_index is -100"),
    "probabilities": ({"labels": torch.rand(*TOKENS)}, "labels must be classes in int64.*labels torch.float32"),
    "int32": ({"labels": torch.zeros(TOKENS, dtype=torch.int32)}, "labels torch.int32"),
    "too few labels": ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels must have the shape.*labels \[4\]"),
    "features": ({"weight": torch.zeros(CLASSES, 3)}, rf"last dimension of hidden.*weight \[{CLASSES}, 3\]"),
    "weight's shape": ({"weight": torch.zeros(FEATURES)}, r"weight must be \[classes, features\]"),
    "no classes": ({"weight": torch.zeros(0, FEATURES)}, "at least one class"),
    "bias's shape": ({"bias": torch.zeros(3)}, "bias must have one element per class"),
    "class weight's shape": ({"class_weight": torch.zeros(3)}, "class_weight must have one element per class"),
    "class weight is trained": ({"class_weight": torch.ones(CLASSES, requires_grad=True)}, "class_weight requires grad"),
    "dtypes": ({"weight": torch.zeros(CLASSES, FEATURES).bfloat16()}, "must have one dtype.*weight torch.bfloat16"),
    "integers": ({"hidden": torch.zeros(*TOKENS, FEATURES).int()}, "found hidden torch.int32"),
    "devices": ({"labels": torch.zeros(TOKENS, dtype=torch.int64, device="meta")}, "different devices.*labels meta"),
    "no tensor": ({"labels": [1, 2]}, "labels is a list"),
    "reduction": ({"reduction": "avg"}, "reduction='avg'"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
    "scale": ({"logit_scale": float("nan")}, "logit_scale=nan"),
    "cap": ({"soft_cap": 0.0}, "soft_cap=0.0 must be a positive number"),
    "chunk": ({"chunk_bytes": 0}, "chunk_bytes=0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    wrong, text = MISTAKES[mistake]
    good = {"hidden": torch.zeros(*TOKENS, FEATURES), "weight": torch.zeros(CLASSES, FEATURES), "labels": some_labels()}
    with pytest.raises(ConfigError, match=text):
        sw.linear_cross_entropy(**(good | wrong))


PEAK = """
import sys, torch
from torch.nn import functional as F
import shardwise as sw
from shardwise.observe import MemorySampler
torch.set_num_threads(1)
classes, features, tokens, chunk_bytes, kind = *map(int, sys.argv[1:5]), sys.argv[5]
weight, hidden = (torch.randn(n, features).mul_(0.02).requires_grad_() for n in (classes, tokens))
labels = torch.randint(0, classes, (tokens,))
torch.mm(weight.detach()[:64], weight.detach()[:64].t())  # the library's own buffers
with MemorySampler(0.001) as memory:
    before = memory.sample()
    if kind == "all logits":
        loss = F.cross_entropy(F.linear(hidden, weight), labels)
    else:
        loss = sw.linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes, recomputes=kind == "recomputes")
    between = memory.sample() - before
    loss.backward()
print(memory.peak_bytes - before, between)
"""


def test_peak_memory() -> None:
    """At most the chunk, the gradients that are returned, and 16 MiB of others; with all logits it is more than twice theirs."""
    classes, features, tokens, chunk_bytes = 16_000, 256, 2_048, 16 << 20
    bound = chunk_bytes + 4 * features * (classes + tokens) + (16 << 20)
    found = {}
    for kind in ("in forward", "recomputes", "all logits"):
        arguments = [str(value) for value in (classes, features, tokens, chunk_bytes)]
        done = run_program([sys.executable, "-c", PEAK, *arguments, kind], env=without_launcher())
        assert done.returncode == 0, done.stderr
        found[kind] = tuple(int(value) for value in done.stdout.split())
    assert 4 * features * classes < found["in forward"][0] < bound, found
    assert 4 * features * classes < found["recomputes"][0] < bound, found
    assert found["recomputes"][1] < 16 << 20, found  # nothing of the weight's size is kept for backward
    assert found["all logits"][0] > 2 * 4 * tokens * classes > bound, found
