"""Models of transformers, unmodified: caches that their blocks fill, attention of both kinds, their own checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import shardwise as sw
from cases import Patched, sharded
from shardwise.activations import keeping as keeping_module


def tiny(kind: str, attention: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=3, n_head=2, n_embd=32, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0
        )
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=97, max_position_embeddings=32,
        )  # fmt: skip
    config._attn_implementation = attention
    make = transformers.GPT2LMHeadModel if kind == "gpt2" else transformers.LlamaForCausalLM
    return make(config).train()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("checkpoint", ["units", 2])
def test_gradients_have_the_bits_of_the_plain_model(kind: str, attention: str, checkpoint: Any) -> None:
    model = tiny(kind, attention)
    plain = copy.deepcopy(model)
    with Patched(keeping_module, "SMALL_BYTES", 1):
        optimizer = torch.optim.AdamW(model.parameters())
        asked = sw.Activations(checkpoint=checkpoint, offload="host")
        run = sharded(model, optimizer, stage=3, units=_block_of(model), activations=asked)
        tokens = torch.randint(0, 97, (2, 11))
        for net in (model, plain):
            torch.manual_seed(5)  # dropout
            net(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).loss.backward()
        grads = dict(run.iter_grads())
        assert all(torch.equal(param.grad, grads[name]) for name, param in plain.named_parameters())
        run.close()


def test_their_own_checkpoints_inside_ours() -> None:
    model = tiny("gpt2", "sdpa")
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run = sharded(model, torch.optim.AdamW(model.parameters()), stage=3, activations=sw.Activations())
    tokens = torch.randint(0, 97, (2, 11))
    for net in (model, plain):
        torch.manual_seed(5)
        net(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    grads = dict(run.iter_grads())
    assert all(torch.equal(param.grad, grads[name]) for name, param in plain.named_parameters())
    run.close()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_cache_that_blocks_fill_is_as_it_was(kind: str, attention: str) -> None:
    """transformers fills a cache by default, in training too: a block that runs again would add to it."""
    model = tiny(kind, attention)
    plain = copy.deepcopy(model)
    run = sharded(model, torch.optim.AdamW(model.parameters()), stage=3, activations=sw.Activations())
    tokens = torch.randint(0, 97, (2, 11))
    for net in (model, plain):
        torch.manual_seed(5)
        net(input_ids=tokens, labels=tokens).loss.backward()
    grads = dict(run.iter_grads())
    assert all(torch.equal(param.grad, grads[name]) for name, param in plain.named_parameters())
    run.close()


def _block_of(model: Any) -> type:
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    return type(blocks[0])
