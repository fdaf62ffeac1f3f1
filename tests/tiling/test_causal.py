"""Causal models of transformers with the fused loss: the same loss and gradients, no logits, and refusals that say why."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from cases import generator, sharded
from seen import Seen
from shardwise.errors import ModelError
from shardwise.testing import ParityReport, RankPool, compare_with_plain

VOCABULARY = 97
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip


def make(kind: str) -> Any:
    import transformers as hf

    torch.manual_seed(3)
    if kind == "gpt2":  # tied, with dropout off
        options = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=1)
        return hf.GPT2LMHeadModel(hf.GPT2Config(**options, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    if kind == "opt":  # its forward calls the decoder, not the base model
        options = dict(vocab_size=VOCABULARY, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2)
        return hf.OPTForCausalLM(hf.OPTConfig(**options, word_embed_proj_dim=16, max_position_embeddings=32, dropout=0.0))
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
        "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 0.05}),
        "cohere": (hf.CohereForCausalLM, hf.CohereConfig, {"logit_scale": 0.0625}),
        "granite": (hf.GraniteForCausalLM, hf.GraniteConfig, {"logits_scaling": 8.0}),
        "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {"output_router_logits": True}),
    }
    model, config, more = classes[kind]
    return model(config(**SMALL, **more))


def batch(number: int = 0) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=generator(number))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def fused(kind: str, **options: Any) -> tuple[Any, Any, sw.tiling.CausalLoss]:
    model = make(kind)
    plain = copy.deepcopy(model)
    return model, plain, sw.tiling.fuse_causal_loss(model, chunk_bytes=VOCABULARY * 4 * 5, **options)


def grads_of(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def assert_alike(model: Any, plain: Any, **given: Any) -> Any:
    """docs/numerics.md, row `linear_cross_entropy`."""
    found, expected = model(**given), plain(**given)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    ours, theirs = grads_of(model, found.loss), grads_of(plain, expected.loss)
    assert ours.keys() == theirs.keys() and ours
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "cohere", "granite", "mixtral", "opt"])
def test_the_same_loss_and_gradients(kind: str, recomputes: bool) -> None:
    model, plain, _ = fused(kind, recomputes=recomputes)
    for number in range(3):
        found = assert_alike(model, plain, **batch(number))
        assert found.logits.shape == (2, 0 if number else 1, VOCABULARY)
    given = batch(3)
    assert_alike(model, plain, **given, num_items_in_batch=torch.tensor(7))
    assert_alike(model, plain, **given, num_items_in_batch=7)
    assert_alike(model, plain, input_ids=given["input_ids"], labels=given["labels"], shift_labels=given["labels"].roll(2, 1))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_no_tensor_of_tokens_times_vocabulary(kind: str) -> None:
    model, plain, _ = fused(kind)
    given = batch()
    numel = given["input_ids"].numel() * VOCABULARY
    for _ in range(2):
        with Seen() as seen:
            model(**given).loss.backward()
        assert 0 < seen.largest_numel < numel
    with Seen() as seen:
        plain(**given).loss.backward()
    assert seen.largest_numel == numel


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_calls_without_labels_do_not_change(kind: str) -> None:
    model, plain, _ = fused(kind)
    given = batch()
    model(**given)
    tokens = given["input_ids"]
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    assert torch.equal(model.generate(tokens, max_new_tokens=3), plain.generate(tokens, max_new_tokens=3))
    logits = model(tokens).logits
    assert torch.equal(model.loss_function(logits, tokens, VOCABULARY), plain.loss_function(logits, tokens, VOCABULARY))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_autocast_and_evaluation(kind: str) -> None:
    model, plain, _ = fused(kind)
    for number in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = model(**batch(number)).loss, plain(**batch(number)).loss
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        ours, theirs = grads_of(model, found), grads_of(plain, expected)
        assert all(ours[name].dtype == torch.float32 for name in theirs)
        torch.testing.assert_close(ours["lm_head.weight"], theirs["lm_head.weight"], rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch()).loss, plain.eval()(**batch()).loss, rtol=1e-5, atol=1e-6)


def test_logits_that_are_asked_for() -> None:
    model, plain, _ = fused("llama")
    for _ in range(2):
        found = model(**batch(), logits_to_keep=4)
        assert torch.equal(found.logits, plain(batch()["input_ids"], logits_to_keep=4).logits)
        torch.testing.assert_close(found.loss, plain(**batch()).loss)


def test_positional_arguments_and_tuples() -> None:
    model, plain, _ = fused("llama")
    given = batch()
    names = [
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "inputs_embeds",
        "labels",
        "use_cache",
        "logits_to_keep",
    ]
    arguments = [given.get(name) for name in names[:-1]] + [0]
    for _ in range(2):
        loss, logits = model(*arguments, return_dict=False)[:2]
        torch.testing.assert_close(loss, plain(**given).loss)
        assert logits.shape[1] <= 1


def test_copies_and_removal() -> None:
    model, plain, handle = fused("gpt2")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.1)
        for parameter in plain.parameters():
            parameter.mul_(1.1)
    assert_alike(copied, plain, **batch())
    handle.remove()
    found, expected = model(**batch()), make("gpt2")(**batch())
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.logits, expected.logits)
    assert not model._forward_hooks and not model.lm_head._forward_hooks and not model.transformer._forward_hooks
    sw.tiling.fuse_causal_loss(model)


def test_an_interrupted_call_leaves_nothing() -> None:
    model, plain, _ = fused("llama")
    with pytest.raises(ValueError, match="out of range"):
        model(batch()["input_ids"], labels=torch.full((2, 12), VOCABULARY))
    logits = plain(batch()["input_ids"]).logits
    assert torch.equal(model(batch()["input_ids"]).logits, logits)
    assert_alike(model, plain, **batch())


def test_a_new_head_after_resizing() -> None:
    model, plain, _ = fused("gpt2")
    for each in (model, plain):
        torch.manual_seed(0)
        each.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    assert_alike(model, plain, **batch())


def adapted(**options: Any) -> tuple[Any, Any]:
    import peft

    made = []
    for _ in range(2):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
        made.append(peft.get_peft_model(make("llama"), config))
    return made[0], made[1]


def test_adapters_on_a_frozen_head() -> None:
    model, plain = adapted()
    sw.tiling.fuse_causal_loss(model)
    for number in range(2):
        assert_alike(model, plain, **batch(number))


def test_an_adapted_head_is_refused() -> None:
    model, _ = adapted(modules_to_save=["lm_head"])
    with pytest.raises(ModelError, match=r"ModulesToSaveWrapper as its head; a torch\.nn\.Linear was expected"):
        sw.tiling.fuse_causal_loss(model)


class Tilted(nn.Module):
    """What a model might do to its hidden states in front of its head."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 1.01


@pytest.mark.parametrize("where", ["cap", "scale", "hidden"])
def test_other_logits_are_noticed_at_the_first_call(where: str) -> None:
    """The configuration says nothing of these; without the comparison the loss would be silently another one."""
    if where == "hidden":
        model = make("llama")
        model.lm_head.register_forward_pre_hook(lambda head, args: (Tilted()(args[0]),))
        sw.tiling.fuse_causal_loss(model)
    else:
        model = make("gemma2" if where == "cap" else "cohere")
        sw.tiling.fuse_causal_loss(model, **({"soft_cap": 0.06} if where == "cap" else {"logit_scale": 0.0626}))
    with pytest.raises(ModelError, match="changes its hidden states" if where == "hidden" else "does not only scale its logits"):
        model(**batch())


def refusal_of(model: Any) -> str:
    with pytest.raises(ModelError) as caught:
        sw.tiling.fuse_causal_loss(model)
    return str(caught.value)


def test_refusals() -> None:
    import transformers as hf

    assert "Linear has no config, base_model" in refusal_of(nn.Linear(2, 2))
    model, _, _ = fused("llama")
    assert "has a fused loss already" in refusal_of(model)
    model = make("llama")
    model.loss_function = hf.loss.loss_utils.ForMaskedLMLoss
    assert "has the loss ForMaskedLMLoss" in refusal_of(model)
    assert "has no argument labels and no logits_to_keep" in refusal_of(make("llama").model)
    classifier = hf.LlamaForSequenceClassification(hf.LlamaConfig(**SMALL))
    assert "LlamaForSequenceClassification has the loss ForSequenceClassificationLoss" in refusal_of(classifier)


@pytest.mark.parametrize("number", [0, 1])
def test_the_pages_snippets_run(number: int) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "large-vocabularies.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    exec(blocks[number], {"__name__": "page"})


def trained(
    kind: str, stage: int, transport: str, is_before: bool, against_logits: bool, **more: Any
) -> tuple[ParityReport, list[str]]:
    """Runs on a rank: train a sharded model; and what happens to its head in one more forward and backward."""
    model = make(kind)
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"chunk_bytes": VOCABULARY * 4 * 5}
    if not against_logits:
        sw.tiling.fuse_causal_loss(plain, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    if is_before:
        sw.tiling.fuse_causal_loss(model, **options)
    run = sharded(model, optimizers[0], stage=stage, transport=transport, prefetch_bytes=0, max_unit_bytes=7000, **more)
    if not is_before:
        sw.tiling.fuse_causal_loss(model, **options)
    loss = lambda m, k: m(**batch(k)).loss  # noqa: E731
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss, steps=3, accumulate=2)
    num_events = len(list(run.events))
    loss(model, 7).backward()
    kinds = ("gathered", "free", "backward")
    found = [e.kind for e in list(run.events)[num_events:] if e.subject in ("lm_head", "") and e.kind in kinds]
    run.close()
    return report, found


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize(
    ("stage", "transport"),
    [
        pytest.param(0, "auto", marks=pytest.mark.slow),
        (1, "auto"),
        pytest.param(2, "auto", marks=pytest.mark.slow),
        (3, "auto"),
        (3, "pairwise"),
    ],
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_same_bits_as_unsharded(pool: RankPool, kind: str, stage: int, transport: str, is_before: bool) -> None:
    for report, found in pool.run(trained, kind, stage, transport, is_before, False):
        assert report.is_bitwise, f"{kind} stage {stage}: {report}"
        if kind == "llama" and transport == "pairwise":  # once per step: backward does not read the head's weight
            assert found == ["gathered", "free", "backward"]


@pytest.mark.parametrize("activations", ["units", sw.Activations(checkpoint=None, offload="host")])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_same_bits_with_activations_elsewhere(pool: RankPool, kind: str, activations: Any) -> None:
    for report, _ in pool.run(trained, kind, 3, "auto", True, False, activations=activations):
        assert report.is_bitwise, str(report)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_within_tolerance_of_all_logits(pool: RankPool, kind: str, stage: int) -> None:
    """docs/numerics.md, row `linear_cross_entropy`."""
    for report, _ in pool.run(trained, kind, stage, "auto", False, True):
        assert report.compared_elements > 0 and report.largest < 2e-6, str(report)
