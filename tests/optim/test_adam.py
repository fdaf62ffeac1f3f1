"""The native Adam: the same bits at every vector width and cut, and torch's own bits but for its square root."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise import native
from shardwise.optim import adam

pytestmark = pytest.mark.skipif(native.library() is None, reason="built without a C++ compiler: torch's own step runs instead")
NUMEL = 10_007
SCALAR, AVX2, WIDEST = 0, 1, 2


def group(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: object) -> dict[str, object]:
    return kind([torch.nn.Parameter(torch.zeros(1))], **{"lr": 3e-3, "weight_decay": 0.05, **options}).param_groups[0]  # type: ignore[arg-type]


def train(
    settings: dict[str, object], steps: int, *, width: int = WIDEST, threads: int = 1, cuts: tuple[int, ...] = (0, NUMEL)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(NUMEL, generator=generator)
    mean, square = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(1, steps + 1):
        grad = torch.randn(NUMEL, generator=generator) * 10.0 ** (step % 5 - 2)
        for low, high in itertools.pairwise(cuts):
            parts = [t[low:high] for t in (master, mean, square, grad)]
            adam.update(settings, step, *parts, most_width=width, num_threads=threads)
    return master, mean, square


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"betas": (0.3, 0.95)}, {"maximize": True}, {"weight_decay": 0.0}])
def test_widths_threads_and_cuts_give_the_same_bits(kind: type[torch.optim.Optimizer], options: dict[str, object]) -> None:
    settings = group(kind, **options)
    expected = train(settings, 5, width=SCALAR)
    for width in (AVX2, WIDEST):
        for threads in (1, 3):
            for cuts in ((0, NUMEL), (0, 1, 1000, 1003, 9000, NUMEL)):
                found = train(settings, 5, width=width, threads=threads, cuts=cuts)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (width, threads, cuts)


def test_many_threads_on_a_long_vector() -> None:
    numel = 1_000_003
    values = [torch.randn(numel), torch.zeros(numel), torch.zeros(numel), torch.randn(numel)]
    copies = [v.clone() for v in values]
    adam.update(group(), 1, *values, num_threads=1)
    adam.update(group(), 1, *copies, num_threads=4)
    assert all(torch.equal(a, b) for a, b in zip(values, copies, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"betas": (0.3, 0.95)}, {"maximize": True}])
def test_a_hundred_steps_beside_torch(kind: type[torch.optim.Optimizer], options: dict[str, object]) -> None:
    """docs/numerics.md: CPUs round vector functions differently, so the distance is bounded, not how often there is one.

    A step may differ by a unit in the last place of an update, which is at most a few learning rates; a hundred of them, and the
    rounding of the sum, stay far below 1e-6.
    """
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(NUMEL, generator=generator))
    theirs = kind([param], lr=3e-3, weight_decay=0.05, **options)  # type: ignore[call-arg]
    for step in range(1, 101):
        param.grad = torch.randn(NUMEL, generator=generator) * 10.0 ** (step % 5 - 2)
        theirs.step()
    master, mean, square = train(group(kind, **options), 100)
    assert float((master - param.detach()).abs().max()) <= 1e-6
    for found, expected in ((mean, theirs.state[param]["exp_avg"]), (square, theirs.state[param]["exp_avg_sq"])):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [SCALAR, AVX2, WIDEST])
def test_16_bits_in_and_out_round_like_torch(dtype: torch.dtype, width: int) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    spread = torch.randn(100_000) * 10.0 ** (torch.rand(100_000) * 14 - 9)
    values = torch.cat([spread, every.float(), torch.nextafter(every.float(), torch.tensor(1.0))])
    still = group(lr=0.0, weight_decay=0.0)
    out = torch.empty(values.numel(), dtype=dtype)
    zeros = torch.zeros_like(values)
    adam.update(still, 1, values.clone(), zeros.clone(), zeros.clone(), zeros.to(dtype), out=out, most_width=width)
    expected = values.to(dtype)
    is_number = ~expected.isnan()
    assert torch.equal(out[is_number].view(torch.int16), expected[is_number].view(torch.int16))
    assert torch.equal(out.isnan(), expected.isnan())
    mean = torch.zeros(every.numel())
    adam.update({**still, "betas": (0.0, 0.0)}, 1, mean.clone(), mean, mean.clone(), every, most_width=width)
    finite = every.float().isfinite()
    assert torch.equal(mean[finite], every.float()[finite])


def test_the_gradient_is_scaled_on_the_way() -> None:
    factor = 0.37
    one = [torch.randn(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL), torch.randn(NUMEL)]
    other = [v.clone() for v in one]
    other[3].mul_(factor)
    adam.update(group(), 1, *one, grad_scale=factor)
    adam.update(group(), 1, *other)
    assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


def test_only_what_the_kernel_can_do_is_taken_over() -> None:
    param = [torch.nn.Parameter(torch.zeros(3))]
    fp32 = {torch.float32}
    assert adam.can_update(torch.optim.AdamW(param, fused=True), fp32)
    assert adam.can_update(torch.optim.Adam(param, fused=True), fp32)
    assert not adam.can_update(torch.optim.AdamW(param), fp32), "torch's bits are kept unless fused=True was asked for"
    assert not adam.can_update(torch.optim.AdamW(param, fused=True, amsgrad=True), fp32)
    assert not adam.can_update(torch.optim.AdamW(param, fused=True), {torch.float64})
    assert not adam.can_update(torch.optim.SGD(param), fp32)

    class Mine(torch.optim.AdamW):
        pass

    assert not adam.can_update(Mine(param, fused=True), fp32), "a subclass may do anything"
