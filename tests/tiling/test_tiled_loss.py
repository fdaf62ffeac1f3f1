"""The loss of a head whose weight is cut into tiles, and causal models of transformers with tiles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from cases import rank, sharded
from shardwise.testing import RankPool
from shardwise.tiers import Kind, Tier

VOCABULARY, HIDDEN = 96, 32


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) / 3)
        self.bias = nn.Parameter(torch.randn(VOCABULARY) / 3)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        return sw.linear_cross_entropy(hidden, self.weight, labels, bias=self.bias, **options)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "ignore_index": 5},
    {"reduction": "none", "label_smoothing": 0.1},
    {"label_smoothing": 0.2, "class_weight": torch.linspace(0.1, 2.0, VOCABULARY)},
    {"soft_cap": 3.0, "logit_scale": 0.5},
    {"soft_cap": 3.0, "label_smoothing": 0.1, "chunk_bytes": 1000, "recomputes": True},
]


def compared(**shard_options: Any) -> None:
    torch.manual_seed(0)
    model = Head()
    plain = copy.deepcopy(model)
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), tiling=4096, **shard_options)
    assert sum("[" in unit for unit in run.units) == 3
    hidden = torch.randn(4, 7, HIDDEN)
    labels = torch.randint(0, VOCABULARY, (4, 7))
    labels[0, :3] = -100
    for options in OPTIONS:
        if options.get("ignore_index") == 5:
            labels = labels.where(labels != -100, 5)
        found, wanted = ([h.clone().requires_grad_()] for h in (hidden, hidden))
        ignored = options.get("ignore_index", -100)
        usable = labels if ignored == 5 else labels.where(labels != 5, -100)
        loss = model(found[0], usable, options)
        expected = plain(wanted[0], usable, options)
        assert torch.allclose(loss, expected, rtol=1e-5, atol=1e-5), options
        weights = torch.linspace(0.5, 1.5, loss.numel()).view_as(loss)
        (loss * weights).sum().backward()
        (expected * weights).sum().backward()
        assert torch.allclose(found[0].grad, wanted[0].grad, rtol=1e-4, atol=1e-6), options
        for name, param in plain.named_parameters():
            assert torch.allclose(run.grad(name), param.grad, rtol=1e-4, atol=1e-5), (options, name)
            param.grad = None
        model.zero_grad()
    assert not run._runtime.tiles.gathered_whole
    with torch.no_grad():
        assert torch.allclose(model(hidden, usable, {}), plain(hidden, usable, {}), rtol=1e-5)
    run.close()


@pytest.mark.parametrize(
    "way", [{"stage": 2}, {"stage": 3}, {"stage": 3, "transport": "copied"}, {"stage": 3, "offload": "disk"}], ids=str
)
def test_the_loss_of_a_tiled_head(pool: RankPool, way: dict[str, Any]) -> None:
    pool.run(compared, **way)


def test_the_loss_of_a_tiled_head_has_one_tile_in_memory() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=3, tiling=64 * 256 * 4, transport="pairwise", offload="disk", prefetch_bytes=0)
    hidden, labels = torch.randn(20, 64, requires_grad=True), torch.randint(0, 4096, (20,))
    sw.linear_cross_entropy(hidden, model.weight, labels).backward()
    run.ledger.reset_peak()
    sw.linear_cross_entropy(hidden, model.weight, labels).backward()
    assert run.ledger.peak(Tier.HOST, Kind.GRAD) <= 2 << 20, "a few buckets of 1 MiB at most"
    optimizer.step()
    run.close()


LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 200}
EXPERTS = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 200, "n_positions": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CAUSAL: dict[str, Callable[[Any], Any]] = {
    "gpt2": lambda library: library.GPT2LMHeadModel(library.GPT2Config(**GPT2, **NO_DROPOUT)),
    "llama": lambda library: library.LlamaForCausalLM(library.LlamaConfig(**LLAMA, intermediate_size=96)),
    "mixtral": lambda library: library.MixtralForCausalLM(library.MixtralConfig(**LLAMA, **EXPERTS)),
}


def causal(name: str, **options: Any) -> tuple[list[float], list[float], dict[Any, int]]:
    """Losses of three steps of a small causal model of transformers: tiled with the fused loss, and plain."""
    import transformers

    torch.manual_seed(0)
    model = CAUSAL[name](transformers)
    if name == "mixtral":
        model.set_experts_implementation("eager")  # a loop over experts; grouped products use a copy of the whole
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    run = sharded(model, optimizers[0], tiling=13000 if name == "mixtral" else 5000, **options)
    sw.tiling.fuse_causal_loss(model)
    losses: list[list[float]] = [[], []]
    for step in range(3):
        tokens = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(step))
        for number, (net, optimizer) in enumerate(zip((model, plain), optimizers, strict=True)):
            loss = net(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[number].append(loss.item())
    model.eval()
    with torch.no_grad():
        plain.eval()
        logits, expected = (net(input_ids=tokens).logits for net in (model, plain))
    assert torch.allclose(logits, expected, atol=1e-4)
    wholes = dict(run._runtime.tiles.gathered_whole)
    run.close()
    return *losses, wholes


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("way", [{"stage": 3, "offload": "disk"}, {"stage": 3, "activations": "units"}, {"stage": 1}], ids=str)
def test_causal_models_with_tiles(pool: RankPool, name: str, way: dict[str, Any]) -> None:
    for found, expected, wholes in pool.run(causal, name, **way):
        assert found == pytest.approx(expected, rel=2e-5), (name, way, rank())
        assert not wholes, wholes
