"""The models of the parity tests, each with the batch a rank sees at a micro-step."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comm import shared, transports
from shardwise.testing import ParityReport, compare_with_plain
from shardwise.testing.models import GPT, Branchy, ConvNet, FrozenBase, GPTConfig, LSTMModel, UnevenMLP


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(7919 * number + rank())


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=67, context=16, layers=3, heads=2, hidden=24))


def _paged_gpt() -> nn.Module:
    """Its Units' shards are whole pages, for two and for four ranks, so that their full vectors are overlaid."""
    return GPT(GPTConfig(vocabulary=1500, context=16, layers=2, heads=2, hidden=96))


def _linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))


def _tokens(vocabulary: int, length: int, number: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (2, length), generator=generator(number))


def _gpt_loss(model: nn.Module, number: int) -> torch.Tensor:
    tokens = _tokens(67, 10, number)
    return model(tokens[:, :-1], tokens[:, 1:])


def _conv_loss(model: nn.Module, number: int) -> torch.Tensor:
    g = generator(number)
    return model(torch.randn(3, 3, 6, 6, generator=g), torch.randint(0, 5, (3,), generator=g))


class _LowRank(nn.Module):
    """A frozen linear layer beside a trained product of two thin matrices, as LoRA has them."""

    def __init__(self, width: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) / 5)
        self.up = nn.Parameter(torch.randn(width, rank) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return out


class Adapted(nn.Module):
    """Blocks with adapters: frozen and trained parameters in every one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_LowRank(24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


CASES = {
    "gpt": Case(_gpt, _gpt_loss),
    "paged": Case(_paged_gpt, _gpt_loss),
    "paged-large": Case(_linears, lambda m, k: m(torch.ones(1, 1024)).sum()),
    "mlp": Case(UnevenMLP, lambda m, k: m(torch.randn(4, 13, generator=generator(k)))),
    "conv": Case(ConvNet, _conv_loss),
    "lstm": Case(LSTMModel, lambda m, k: m(_tokens(50, 7, k))),
    "lora": Case(Adapted, lambda m, k: m(torch.randn(5, 24, generator=generator(k)))),
    "frozen": Case(FrozenBase, lambda m, k: m(torch.randn(5, 19, generator=generator(k)))),
    "branchy": Case(Branchy, lambda m, k: m(torch.randn(4, 11, generator=generator(k)), None if k % 3 == 0 else k % 2)),
    "branchy-by-rank": Case(
        Branchy, lambda m, k: m(torch.randn(4, 11, generator=generator(k)), None if (k + rank()) % 3 == 0 else rank() % 3)
    ),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "lion": lambda p: Lion(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


class Lion(torch.optim.Optimizer):
    """A custom element-wise optimizer: the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(torch.sign(b1 * m + (1 - b1) * p.grad), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Patched:
    """An attribute of a module of the library, replaced on this rank for a while."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self._module, self._name, self._value = module, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._module, self._name)
        setattr(self._module, self._name, self._value)

    def __exit__(self, *exc: object) -> None:
        setattr(self._module, self._name, self._before)


def as_hosts(per_host: int) -> Patched:
    """Pretend that every `per_host` consecutive ranks are a host of their own."""
    return Patched(transports, "host_identity", lambda: (f"host {dist.get_rank() // per_host}", 0, 0))


class ByHost:
    """Sums the parity reference's gradients inside hosts first, as the combined transport does."""

    def __init__(self, per_host: int) -> None:
        self._per_host = per_host

    def __call__(self, parts: list[torch.Tensor]) -> torch.Tensor:
        sums = []
        for start in range(0, len(parts), self._per_host):
            total = parts[start].clone()
            for part in parts[start + 1 : start + self._per_host]:
                total = total + part
            sums.append(total)
        total = sums[0]
        for other in sums[1:]:
            total = total + other
        return total


def build(name: str, optimizer: str, seed: int = 0, **options: Any) -> tuple[Any, ...]:
    """A sharded model and its plain replica: (run, model, optimizer, plain, plain optimizer)."""
    torch.default_generator.manual_seed(seed)
    model = CASES[name].build()
    plain = copy.deepcopy(model)
    if optimizer == "groups":
        opts = [_grouped(m) for m in (model, plain)]
    else:
        opts = [OPTIMIZERS[optimizer](m.parameters()) for m in (model, plain)]
    precision = sw.Precision.of(options.get("precision"))
    if precision.param is not None and precision.compute is None:  # the reference computes in fp32, whatever this CPU is good at
        options["precision"] = dataclasses.replace(precision, compute=torch.float32)
    return sharded(model, opts[0], **options), model, opts[0], plain, opts[1]


JOINS = {"none": 0.0, "some": 0.67, "all": 1.0}
"""How small Units are joined: up to this share of the model's bytes."""


DEFAULT_JOINS = os.environ.get("SHARDWISE_TEST_JOINS", "none")


def sharded(
    model: nn.Module | list[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    joins: str = DEFAULT_JOINS,
    **options: Any,
) -> sw.Run:
    """`sw.shard`, and two things more.

    The transport "copied" is shared memory where gathers copy, as without the kernel's page records. By default small Units stay
    apart, as large ones do; `joins` is one of JOINS. SHARDWISE_TEST_JOINS=all runs the suite with users' default.
    """
    modules = [model] if isinstance(model, nn.Module) else model
    num_bytes = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    options.setdefault("min_unit_bytes", int(JOINS[joins] * num_bytes))
    if options.get("transport") != "copied":
        return sw.shard(model, optimizer, **options)
    with Patched(shared, "can_tell_own_pages", lambda: False):
        return sw.shard(model, optimizer, **{**options, "transport": "shared"})


def _grouped(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(decay, lr=1e-2, weight_decay=0.1)
    optimizer.add_param_group({"params": rest, "weight_decay": 0.0, "lr": 3e-3})
    return optimizer


def parity(
    name: str,
    *,
    optimizer: str = "adamw",
    steps: int = 10,
    accumulate: int = 1,
    max_norm: float | None = None,
    **options: Any,
) -> ParityReport:
    """Runs on a rank: train the case both ways and compare."""
    run, model, opt, plain, plain_opt = build(name, optimizer, **options)
    report = compare_with_plain(
        run, model, opt, plain, plain_opt, CASES[name].loss, steps=steps, accumulate=accumulate, max_norm=max_norm
    )
    run.close()
    return report
