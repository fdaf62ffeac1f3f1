"""Graphs and loops that users write, as one table: what the model is, and how a micro-step gets its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases import generator, rank


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 9)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


class TiedAcrossCheckpoints(Checkpointed):
    """A nested backward contributes to a parameter that the outer one contributes to as well."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(use_reentrant)
        self.blocks[2][0].weight = self.blocks[0][0].weight


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[0]):
            x = torch.tanh(block(x))
        return x.square().mean()


class Elsewhere(nn.Module):
    """Parameters used outside their owner's forward, in containers the model returns, and stashed on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.full((8,), 0.7))
        self.side: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        x = F.embedding(tokens, self.table.weight)
        x = F.linear(x, self.blocks[0].weight) * self.scale
        self.side = self.blocks[1](x).square().mean()
        return {"nested": [(x @ self.table.weight.t()).logsumexp(-1).mean()]}

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens) * self.scale

    def calls_forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens)["nested"][0] * self.scale.sum() + self(tokens)["nested"][0]


class HugeTied(nn.Module):
    """A tied table in its own Unit, also touched directly."""

    def __init__(self, touches: bool) -> None:
        super().__init__()
        self.touches = touches
        self.table = nn.Embedding(6000, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.head = nn.Linear(48, 6000, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = self.head(x).logsumexp(-1).mean()
        return loss + (self.table.weight * self.table.weight).mean() if self.touches else loss


class ParameterBranch(nn.Module):
    """Besides its input, a block multiplies its own parameters: that branch must see them too in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_OwnBranch() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class _OwnBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.p, self.q = (nn.Parameter(torch.randn(6, 6) * 0.4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        detached = F.linear(x, self.w.detach()) + (self.w * self.w).sum()
        return x @ self.w.t() + self.q @ self.p.t() + detached


class CheckpointedBranch(ParameterBranch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=True))
        return x.square().mean()


class SixAndABranch(nn.Module):
    """One rank alone takes a branch in front of many others: nobody may wait for it in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.branch = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, takes_branch: bool) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if takes_branch:
            x = x + self.branch[0](x)
        return x.square().mean()


class TiedLookups(nn.Module):
    """A shared table that is only looked up, and a head that the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(6000, 48), nn.Sequential(nn.Embedding(6000, 48))
        self.right[0].weight = self.left.weight
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.left(tokens) + self.right(tokens))).square().mean()


class SkipsAll(nn.Module):
    """A frozen trunk and trainable layers that a rank may skip altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        x = self.trunk(x)
        for block in () if skips else self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class SharedInput(nn.Module):
    """Every block also reads one tensor that all of them share, and hands its own input on."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.memory = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_ReadsMemory() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.memory(x)
        for block in self.blocks:
            x, _ = block(x, memory)
        return x.square().mean()


class _ReadsMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.own(x) + self.cross(memory)), x


def batch(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(number))


def tokens(number: int, high: int = 30) -> torch.Tensor:
    return torch.randint(0, high, (2, 5), generator=generator(number))


def _elsewhere_loss(model: nn.Module, number: int) -> torch.Tensor:
    out = model(tokens(number))["nested"][0]
    return out + model.side if number % 2 else out


def _second_order(model: nn.Module, number: int) -> torch.Tensor:
    x = batch(number, 3, 8).requires_grad_()
    loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def _two_forwards(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number, 3, 8)) + 2 * model(batch(number + 100, 3, 8))


def _after_evaluation(model: nn.Module, number: int) -> torch.Tensor:
    with torch.no_grad():
        model(batch(number + 50, 2, 8))
    model.eval()
    with torch.inference_mode():
        model(batch(number + 51, 2, 8))
    model.train()
    return model(batch(number, 3, 8))


def _side_alone(model: nn.Module, number: int) -> torch.Tensor:
    """A loss made of a tensor that a forward left on the side, past every output."""
    model(tokens(number))
    assert model.side is not None
    return model.side


def _frozen_side() -> nn.Module:
    """The same through Units that are frozen."""
    model = Elsewhere()
    model.blocks.requires_grad_(False)
    return model


def _persistent_leaf(model: nn.Module, number: int) -> torch.Tensor:
    if not hasattr(model, "_leaf"):
        object.__setattr__(model, "_leaf", batch(0, 6, 6).requires_grad_())
    return model(model._leaf)


def _inference(model: nn.Module, x: torch.Tensor) -> float:
    with torch.inference_mode():
        model(x)
    return 0.0


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "checkpoint, non-reentrant": (lambda: Checkpointed(False), lambda m, k: m(batch(k, 4, 7))),
    "checkpoint, reentrant": (lambda: Checkpointed(True), lambda m, k: m(batch(k, 4, 7).requires_grad_())),
    "modules called twice": (CalledTwice, lambda m, k: m(batch(k, 3, 8))),
    "several forwards before a backward": (CalledTwice, _two_forwards),
    "evaluation in between": (CalledTwice, _after_evaluation),
    "second order": (CalledTwice, _second_order),
    "parameters used elsewhere": (Elsewhere, _elsewhere_loss),
    "a tied table of its own": (lambda: HugeTied(False), lambda m, k: m(tokens(k, 6000))),
    "a tied table touched directly": (lambda: HugeTied(True), lambda m, k: m(tokens(k, 6000))),
    "the whole model checkpointed": (
        CalledTwice,
        lambda m, k: checkpoint(m, batch(k, 3, 8).requires_grad_(), use_reentrant=bool(k % 2)),
    ),
    "a loss that bypasses every output": (Elsewhere, _side_alone),
    "a loss that bypasses every output, through frozen Units": (_frozen_side, _side_alone),
    "parameter-only branches": (ParameterBranch, lambda m, k: m(batch(k, 6, 6))),
    "parameter-only branches, leaf input": (ParameterBranch, _persistent_leaf),
    "parameter-only branches, reentrant": (CheckpointedBranch, lambda m, k: m(batch(k, 6, 6).requires_grad_())),
    "a branch that one rank takes": (SixAndABranch, lambda m, k: m(batch(k, 3, 8), rank() == k % 2)),
    "a shared table only looked up": (TiedLookups, lambda m, k: m(tokens(k, 6000))),
    "first used in inference mode": (
        CalledTwice,
        lambda m, k: (_inference(m, batch(k, 2, 8)) if k == 0 else 0) + m(batch(k, 3, 8)),
    ),
    "a rank without any gradient": (SkipsAll, lambda m, k: m(batch(k, 3, 8).requires_grad_(), rank() == k % 3)),
    "an input that all blocks share": (SharedInput, lambda m, k: m(batch(k, 3, 8))),
}
