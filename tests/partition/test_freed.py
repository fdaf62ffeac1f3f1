"""Touching a freed parameter outside a pass gives what it would give in plain training, or an error that names it and the
remedy."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cases import CASES, build
from shardwise.errors import FreedParameterError
from shardwise.partition import FreedParameter
from shardwise.testing import RankPool

NAME = "blocks.1.up.weight"

TOUCHES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "arithmetic": lambda m, p: p * 2 + 1,
    "matrix product": lambda m, p: torch.randn(2, p.shape[1]) @ p.t(),
    "functional": lambda m, p: torch.nn.functional.linear(torch.randn(2, p.shape[1]), p),
    "indexing": lambda m, p: p[0, 0],
    "data": lambda m, p: p.data,
    "view of data": lambda m, p: p.data.view(-1)[3:9].reshape(2, 3).t(),
    "write to data": lambda m, p: p.data[1:3].mul_(3.0),
    "slice written": lambda m, p: _no_grad(lambda: p.__setitem__((0, slice(1, 4)), 7.0)),
    "out": lambda m, p: torch.add(p.data, 1.0, out=p.data),
    "to vector": lambda m, p: _no_grad(lambda: nn.utils.parameters_to_vector(m.parameters())),
    "from vector": lambda m, p: nn.utils.vector_to_parameters(
        torch.linspace(0, 1, sum(q.numel() for q in m.parameters())), m.parameters()
    ),
    "setting data": lambda m, p: setattr(p, "data", torch.zeros(p.shape)),
    "item": lambda m, p: p.item(),
    "tolist": lambda m, p: p.tolist(),
    "numpy": lambda m, p: p.numpy(),
    "float": lambda m, p: float(p),
    "in place": lambda m, p: p.add_(1.0),
    "in place without grad": lambda m, p: _no_grad(lambda: p.mul_(0.5)),
    "init": lambda m, p: nn.init.normal_(p),
    "copy into": lambda m, p: _no_grad(lambda: p.copy_(torch.zeros(p.shape))),
    "copy out of": lambda m, p: torch.zeros(p.shape).copy_(p),
    "optimizer": lambda m, p: torch.optim.SGD([p], lr=0.1),
    "save": lambda m, p: torch.save(p, io.BytesIO()),
    "save model": lambda m, p: torch.save(m.state_dict(), io.BytesIO()),
    "state dict": lambda m, p: m.state_dict(),
    "deepcopy": lambda m, p: copy.deepcopy(p),
    "deepcopy model": lambda m, p: copy.deepcopy(m),
    "to": lambda m, p: p.to(torch.float64),
    "model to": lambda m, p: m.to(torch.float64),
    "half": lambda m, p: m.half(),
    "cat": lambda m, p: torch.cat([p, p]),
    "foreach": lambda m, p: torch._foreach_add([p], 1.0),
    "norm": lambda m, p: p.norm(),
    "equal": lambda m, p: torch.equal(p, p),
    "comparison": lambda m, p: p == 0,
    "storage": lambda m, p: p.untyped_storage(),
    "data_ptr": lambda m, p: p.data_ptr(),
    "iteration": lambda m, p: list(p),
    "aten": lambda m, p: torch.ops.aten.add(p, 1),
    "clone": lambda m, p: p.detach().clone(),
    "requires_grad": lambda m, p: p.requires_grad_(False).requires_grad_().requires_grad,
    "setting requires_grad": lambda m, p: setattr(p, "requires_grad", True),
    "to itself": lambda m, p: p.to("cpu", torch.float32) is p and m.to(torch.float32) is m and m.cpu() is m,
    "is shared": lambda m, p: p.is_shared(),
    "like": lambda m, p: (torch.zeros_like(p), torch.ones_like(p.data)),
    "leaf": lambda m, p: p.is_leaf,
    "penalty": lambda m, p: sum(q.pow(2).sum() for q in m.parameters()),
    "share memory": lambda m, p: p.share_memory_(),
}


def _no_grad(function: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return function()


REFUSED = {
    "save": "run.full_state_dict()",
    "save model": "run.full_state_dict()",
    "deepcopy": "with run.gathered()",
    "deepcopy model": "with run.gathered()",
    "model to": "before sw.shard()",
    "half": "before sw.shard()",
    "storage": "with run.gathered(module)",
    "data_ptr": "with run.gathered(module)",
    "share memory": "share tensors of your own",
}
"""What cannot be had from a freed parameter, and a part of the remedy."""


def _outcome(touch: Callable[[nn.Module, Any], Any], model: nn.Module, param: Any) -> tuple[str, Any]:
    try:
        result = touch(model, param)
    except FreedParameterError as error:
        return "refused", str(error)
    except Exception as error:  # as plain torch does, of an operation that makes no sense
        return "raised", type(error).__name__
    if isinstance(result, dict):
        return "value", {key: value.detach().clone() for key, value in result.items()}
    if isinstance(result, torch.Tensor):
        return "value", result.detach().clone()
    if isinstance(result, (list, tuple)) and result and isinstance(result[0], torch.Tensor):
        return "value", [value.detach().clone() for value in result]
    return "value", result if isinstance(result, (list, int, float, bool)) else type(result).__name__


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list) and one and isinstance(one[0], torch.Tensor):
        return len(one) == len(other) and all(map(torch.equal, one, other))
    return bool(one == other)


def touch_everything(transport: str) -> dict[str, str]:
    run, model, opt, plain, _ = build("gpt", "adamw", stage=3, transport=transport)
    outcomes = {}
    for what, touch in TOUCHES.items():
        param, other = dict(model.named_parameters())[NAME], dict(plain.named_parameters())[NAME]
        run._runtime.gathering.discard_kept()  # as the next pass does: graphs of the last touch kept theirs
        assert isinstance(param, FreedParameter)
        torch.manual_seed(5)
        kind, found = _outcome(touch, model, param)
        if kind == "refused":
            outcomes[what] = found
            continue
        torch.manual_seed(5)
        expected = _outcome(touch, plain, other)
        same = (kind, found) == expected if kind == "raised" else kind == expected[0] and _equal(found, expected[1])
        outcomes[what] = "equal" if same else f"{kind} {found} against {expected}"
    values = {name: torch.equal(run.master(name), value) for name, value in plain.named_parameters()}
    assert all(values.values()), f"values after all touches differ: {values}"
    CASES["gpt"].loss(model, 0).backward()  # and training still works
    opt.step()
    run.close()
    return outcomes


@pytest.mark.parametrize("transport", ["shared", "pairwise"])
def test_every_touch_gives_what_plain_torch_gives_or_names_the_remedy(pool: RankPool, transport: str) -> None:
    assert len(TOUCHES) >= 30
    for outcomes in pool.run(touch_everything, transport):
        assert set(outcomes) == set(TOUCHES)
        for what, text in outcomes.items():
            if what not in REFUSED:
                assert text == "equal", f"{what}: {text}"
                continue
            assert REFUSED[what] in text, f"{what}: {text}"
            is_whole_model = what in ("save model", "deepcopy model", "model to", "half")
            assert is_whole_model or repr(NAME) in text, f"{what}: {text}"


def metadata() -> dict[str, Any]:
    run, model, _, plain, _ = build("conv", "adamw", stage=3)
    found = {}
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        found[name] = (
            p.shape == q.shape and p.dtype == q.dtype and p.device == q.device and p.numel() == q.numel()
            and p.requires_grad == q.requires_grad and p.dim() == q.dim() and p.size(0) == q.size(0)
            and p.stride() == q.stride() and p.is_contiguous() == q.is_contiguous() and p.element_size() == 4
            and isinstance(p, nn.Parameter) and p.grad is None and {p: 1}[p] == 1 and hash(p) == id(p)
        )  # fmt: skip
    text = repr(next(iter(model.parameters())))
    print(model)
    run.close()
    return {"found": found, "text": text, "names": [n for n, _ in model.named_parameters()]}


def test_metadata_is_answered_and_printing_describes(pool: RankPool) -> None:
    for answer in pool.run(metadata):
        assert all(answer["found"].values()), answer["found"]
        assert answer["text"].startswith("FreedParameter('stages.0.0.weight', shape=[7, 3, 3, 3]")


def below_python() -> bool:
    """Code that reaches a tensor below Python's dispatch sees NaN in bounds: no crash, no plausible number."""
    run, model, _, _, _ = build("gpt", "adamw", stage=3)
    param = dict(model.named_parameters())[NAME]
    with torch._C.DisableTorchFunctionSubclass():
        seen = param.detach().clone()
        with pytest.raises(RuntimeError, match="single memory location"):
            param.detach().add_(1.0)
    run.close()
    return bool(seen.isnan().all()) and seen.shape == param.shape


def test_reading_below_python_sees_nan(pool: RankPool) -> None:
    assert pool.run(below_python) == [True, True]


def gradients_on_parameters(stage: int) -> str:
    run, model, _, _, _ = build("gpt", "adamw", stage=stage)
    assert all(p.grad is None for p in model.parameters())
    CASES["gpt"].loss(model, 0).backward()
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        text = "answered"
    except FreedParameterError as error:
        text = str(error)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert run.grad(NAME) is None
    CASES["gpt"].loss(model, 1).backward()
    for param in model.parameters():
        param.grad = None
    assert run.grad(NAME) is None
    run.close()
    return text


def test_clipping_by_hand_is_refused_instead_of_doing_nothing(pool: RankPool) -> None:
    for stage in (1, 2, 3):
        for text in pool.run(gradients_on_parameters, stage):
            assert "run.clip_grad_norm_" in text


def test_stage_0_gradients_are_ordinary(pool: RankPool) -> None:
    assert pool.run(gradients_on_parameters, 0) == ["answered", "answered"]
