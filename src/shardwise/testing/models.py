"""Small models of many kinds, for parity tests, examples and `shardwise train`."""

from __future__ import annotations

import dataclasses
import itertools

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    hidden: int = 128

    @property
    def num_parameters(self) -> int:
        """Parameters of the tied model, biases and norms included."""
        h = self.hidden
        return h * (self.vocabulary + self.context) + self.layers * (12 * h * h + 13 * h) + 2 * h


class GPTBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual attention, then residual feed-forward."""
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """A decoder with tied input and output embeddings; `forward` returns the loss when given targets."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.hidden)
        self.wpe = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.apply(self._init)
        self.head.weight = self.wte.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, or the mean cross-entropy against `targets`."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class UnevenMLP(nn.Module):
    """Layers of odd sizes, which need padding, a scalar parameter and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [13, 37, 5, 101, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean square of the scaled output."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.gain * x).square().mean() + self.nothing.sum()


class ConvNet(nn.Module):
    """Convolutions in channels-last order with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 7), (7, 7), (7, 12)))
        )
        self.head = nn.Linear(12, 5)
        self.stages.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Classification loss."""
        return F.cross_entropy(self.head(self.stages(images).mean((2, 3))), labels)


class LSTMModel(nn.Module):
    """A two-layer LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.lstm = nn.LSTM(12, 17, num_layers=2, batch_first=True)
        self.head = nn.Linear(17, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Next-token loss."""
        out, _ = self.lstm(self.embed(tokens[:, :-1]))
        return F.cross_entropy(self.head(out).flatten(0, 1), tokens[:, 1:].flatten())


class AdaptedLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank correction."""

    def __init__(self, size: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, size) * 0.1)
        self.up = nn.Parameter(torch.randn(size, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Base plus correction."""
        out: torch.Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return out


class FrozenBase(nn.Module):
    """Adapters on a frozen base: some parameters have no gradient, no master, no moments."""

    def __init__(self, size: int = 19, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AdaptedLinear(size) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean square of the output."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Branchy(nn.Module):
    """A model with branches that only some steps, or some ranks, use."""

    def __init__(self, size: int = 11) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.branches = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.last = nn.Linear(size, 1)

    def forward(self, x: torch.Tensor, branch: int | None) -> torch.Tensor:
        """Use one branch, or none."""
        x = torch.tanh(self.first(x))
        if branch is not None:
            x = x + self.branches[branch](x)
        out: torch.Tensor = self.last(x).square().mean()
        return out
