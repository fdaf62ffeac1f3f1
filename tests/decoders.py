"""A decoder whose parts can be divided by tensor parallelism and cut into pipeline stages, with the plans that divide it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from cases import OPTIMIZERS, sharded

VOCABULARY, HIDDEN, HEADS, LAYERS = 50, 32, 4, 3


class Attention(nn.Module):
    """Heads are counted from what the projections give, because tensor parallelism divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        size = HIDDEN // HEADS
        q, k, v = (found.view(batch, found.shape[1], -1, size).transpose(1, 2) for found in (self.q(x), self.k(x), self.v(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o(mixed.transpose(1, 2).reshape(batch, q.shape[2], -1))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Decoder(nn.Module):
    """Modules that are None are left out, as in a stage of a pipeline; layers keep their names."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.table: nn.Embedding | None = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(HIDDEN)
        self.head: nn.Linear | None = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.table is None else self.table(x)
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


def plan(kind: str, layers: int = LAYERS) -> dict[str, Any]:
    """How to divide a Decoder: 'columns' (weights only), 'sequence' (norms too), 'classes' (also the loss)."""
    if kind == "columns":
        found: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
        found["table"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        for number in range(layers):
            at = f"layers.{number}."
            found |= {at + f"attention.{name}": ColwiseParallel() for name in "qkv"} | {at + "up": ColwiseParallel()}
            found |= {at + "attention.o": RowwiseParallel(), at + "down": RowwiseParallel()}
        return found
    found = {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel()}
    found["head"] = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1) if kind == "classes" else Replicate(), use_local_output=kind != "classes"
    )
    for number in range(layers):
        at = f"layers.{number}."
        found |= {at + f"attention.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"}
        found |= {
            at + "norm_1": SequenceParallel(),
            at + "norm_2": SequenceParallel(),
            at + "up": ColwiseParallel(input_layouts=Shard(1)),
        }
        found |= {
            at + "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            at + "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return found


def grid(shards: int = 2, tensors: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (shards, tensors), mesh_dim_names=("shard", "tensor"))


def decoder(mesh: DeviceMesh | None, kind: str = "columns", *, tied: bool = False, seed: int = 0) -> Decoder:
    """A Decoder, divided over the 'tensor' dimension of a mesh."""
    torch.default_generator.manual_seed(seed)
    model = Decoder()
    if mesh is not None:
        parallelize_module(model, mesh["tensor"], plan(kind))
    if tied:
        model.head.weight = model.table.weight  # type: ignore[union-attr, assignment]
    return model


def built(
    mesh: DeviceMesh, kind: str = "columns", optimizer: str = "adamw", *, tied: bool = False, **options: Any
) -> tuple[Any, ...]:
    """A sharded divided model, and the same one unsharded: (run, model, optimizer, plain, plain optimizer)."""
    model = decoder(mesh, kind, tied=tied)
    plain = decoder(mesh, kind, tied=tied)
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (model, plain)]
    return sharded(model, optimizers[0], mesh=mesh, **options), model, optimizers[0], plain, optimizers[1]


def tokens(number: int, data_rank: int, batch: int = 2, length: int = 9) -> torch.Tensor:
    """What a rank sees at a micro-step: the same on ranks that have parts of one model."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7919 * number + data_rank))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """The loss of a rank of a grid of two tensor ranks."""
    found = tokens(number, dist.get_rank() // 2)
    return F.cross_entropy(model(found[:, :-1]).flatten(0, 1), found[:, 1:].flatten())
