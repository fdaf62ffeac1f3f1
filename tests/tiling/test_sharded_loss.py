"""The loss in chunks inside sharded models: the same bits as unsharded, and within tolerance of a model that makes all logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from cases import generator, sharded
from shardwise.engine import lookups
from shardwise.errors import ModelError, StaleGraphError
from shardwise.testing import ParityReport, RankPool, compare_with_plain

VOCABULARY, HIDDEN, CHUNK_BYTES = 61, 24, 61 * 4 * 5
STAGES = [0, 1, 2, 3]
UNIT_BYTES = 8192
"""Small enough for the head to be a Unit of its own."""


class ChunkedHead(nn.Module):
    """A head whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) / 5)
        self.bias = nn.Parameter(torch.randn(VOCABULARY) / 5)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        return sw.linear_cross_entropy(hidden, self.weight, labels, bias=self.bias, **options)


class Decoder(nn.Module):
    """Looks tokens up, transforms them, and predicts the next ones by one of several heads."""

    def __init__(self, kind: str, *, recomputes: bool = False, is_chunked: bool = True) -> None:
        super().__init__()
        self.kind, self.is_chunked = kind, is_chunked
        self.options = {"recomputes": recomputes, "chunk_bytes": CHUNK_BYTES, "reduction": "mean"}
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(3))
        self.head = ChunkedHead() if kind == "module" else nn.Linear(HIDDEN, VOCABULARY, bias=kind != "tied")
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.head.requires_grad_(False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.hidden(tokens)
        if not self.is_chunked:
            logits = F.linear(x, self.head.weight, self.head.bias)
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        if self.kind == "module":
            loss: torch.Tensor = self.head(x, labels, **self.options)
            return loss
        if self.kind == "checkpointed":
            loss = checkpoint(self._predict, x, labels, use_reentrant=False)
            return loss
        return self._predict(x, labels)

    def _predict(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = sw.linear_cross_entropy(x, self.head.weight, labels, bias=self.head.bias, **self.options)
        if self.options["reduction"] == "none":
            return (loss * torch.linspace(0.5, 1.5, labels.numel()).view(labels.shape)).mean()
        return loss


class Bare(Decoder):
    """Returns hidden states: the training loop calls the loss, with the head's parameters."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return self.hidden(tokens)


def loss_of(model: Any, number: int) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=generator(number))
    labels = tokens[:, 1:].clone()
    labels[0, :3] = -100
    if isinstance(model, Bare):
        return model._predict(model(tokens[:, :-1]), labels)
    return model(tokens[:, :-1], labels)


def trained(
    kind: str,
    stage: int,
    *,
    transport: str = "auto",
    recomputes: bool = False,
    reduction: str = "mean",
    against_logits: bool = False,
    optimizer: str = "adamw",
    **options: Any,
) -> ParityReport:
    """Runs on a rank: train a sharded and a plain model."""
    torch.manual_seed(0)
    make = Bare if kind == "outside" else Decoder
    model = make(kind, recomputes=recomputes)
    model.options["reduction"] = reduction
    plain = copy.deepcopy(model)
    plain.is_chunked = not against_logits
    steps = {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-2), "sgd": lambda p: torch.optim.SGD(p, lr=0.1)}[optimizer]
    optimizers = [steps([p for p in m.parameters() if p.requires_grad]) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=stage, transport=transport, **{"max_unit_bytes": UNIT_BYTES, **options})
    if options.get("joins", "none") == "none":
        assert ("head" in run.units) == (kind != "tied"), run.units  # freed when the loss is called
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss_of, steps=3, accumulate=2)
    run.close()
    return report


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["tied", "untied", "module", "frozen", "outside"])
def test_the_same_bits_as_unsharded(pool: RankPool, kind: str, stage: int, recomputes: bool) -> None:
    for report in pool.run(trained, kind, stage, recomputes=recomputes):
        assert report.is_bitwise, f"{kind} stage {stage}: {report}"


@pytest.mark.parametrize("transport", ["pairwise", "copied"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["tied", "untied", "module", "frozen", "outside"])
def test_the_same_bits_where_the_head_is_freed(pool: RankPool, kind: str, recomputes: bool, transport: str) -> None:
    """Without overlays a freed head has no values, and backward gathers it again if it needs it."""
    for report in pool.run(trained, kind, 3, recomputes=recomputes, transport=transport):
        assert report.is_bitwise, f"{kind} {transport}: {report}"


@pytest.mark.parametrize("transport", ["auto", "pairwise"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("tied", {"joins": "all"}),
        ("untied", {"reduction": "none"}),
        ("tied", {"reduction": "none"}),
        ("checkpointed", {}),
        ("checkpointed", {"recomputes": True}),
        ("untied", {"precision": sw.Precision(param=torch.bfloat16, compute=torch.float32)}),
        ("untied", {"offload": "disk"}),
        ("untied", {"activations": "units"}),
        ("module", {"activations": "units"}),  # the head's own call is computed again
        ("module", {"activations": "units", "recomputes": True}),
        ("tied", {"activations": sw.Activations(checkpoint=None, offload="host")}),
        ("untied", {"activations": sw.Activations(checkpoint=None, offload="disk"), "recomputes": True}),
    ],
)
def test_the_same_bits_with_other_options(pool: RankPool, kind: str, options: dict[str, Any], transport: str) -> None:
    for report in pool.run(trained, kind, 3, transport=transport, **options):
        assert report.is_bitwise, f"{kind} {options} {transport}: {report}"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["tied", "untied", "module", "frozen"])
def test_within_tolerance_of_all_logits(pool: RankPool, kind: str, stage: int) -> None:
    """docs/numerics.md, row `linear_cross_entropy`; SGD, because Adam divides by gradients that may be all rounding."""
    for report in pool.run(trained, kind, stage, against_logits=True, optimizer="sgd"):
        assert report.compared_elements > 0 and report.largest < 2e-6, str(report)


def order(kind: str, transport: str) -> list[str]:
    """What happens to the head in one forward and backward."""
    torch.manual_seed(0)
    model = (Bare if kind == "outside" else Decoder)(kind, recomputes=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sharded(model, optimizer, stage=3, transport=transport, prefetch_bytes=0, max_unit_bytes=UNIT_BYTES)
    loss_of(model, 0).backward()
    found = [
        event.kind for event in run.events if event.subject in ("head", "") and event.kind in ("gathered", "free", "backward")
    ]
    run.close()
    return found


@pytest.mark.parametrize("kind", ["untied", "module", "outside"])
@pytest.mark.parametrize("transport", ["pairwise", "copied"])
def test_a_head_is_free_between_forward_and_backward(pool: RankPool, kind: str, transport: str) -> None:
    """What is saved for recomputation is a Place: the head is gathered for the loss, freed, and gathered for its backward."""
    for found in pool.run(order, kind, transport):
        assert found == ["gathered", "free", "backward", "gathered", "free"]


def compiled(stage: int) -> ParityReport:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder("module")
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    run = sharded(model, optimizers[0], stage=stage, max_unit_bytes=UNIT_BYTES)
    model.compile(backend="eager")
    report = compare_with_plain(run, model, optimizers[0], plain, optimizers[1], loss_of, steps=3)
    run.close()
    return report


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_model(pool: RankPool, stage: int) -> None:
    for report in pool.run(compiled, stage):
        assert report.is_bitwise, str(report)


def stale(recomputes: bool) -> str:
    torch.manual_seed(0)
    model = Decoder("untied", recomputes=recomputes)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for param in (*model.embed.parameters(), *model.blocks.parameters()):
        param.requires_grad_(False)
    run = sharded(model, optimizer, stage=3, transport="pairwise", max_unit_bytes=UNIT_BYTES)
    kept = loss_of(model, 0)
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    try:
        kept.backward()
        return "ran"
    except StaleGraphError as error:
        return str(error)
    finally:
        run.close()


def test_a_step_before_backward(pool: RankPool) -> None:
    """Gradients that were formed in forward are those of its values; values that are gone are not replaced by others."""
    assert pool.run(stale, False) == ["ran", "ran"]
    assert all("head.weight" in text for text in pool.run(stale, True))


def twice_differentiated() -> str:
    torch.manual_seed(0)
    model = Decoder("untied")
    run = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, max_unit_bytes=UNIT_BYTES)
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator(0))
    x = model.embed(tokens).detach().requires_grad_()
    loss = sw.linear_cross_entropy(x, model.head.weight, tokens, bias=model.head.bias)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    try:
        slope.square().sum().backward()
        return "ran"
    except ModelError as error:
        return str(error)
    finally:
        run.close()


def test_second_derivatives_are_refused(pool: RankPool) -> None:
    assert all("no second derivative" in text for text in pool.run(twice_differentiated))


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_tied_tables_rows_are_added_in_place(recomputes: bool) -> None:
    """Nobody but autograd holds the gradient when it arrives, so `SharedTable.complete` needs no copy of it."""
    lookups._measure_alone()
    found = []
    weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
    node = torch.autograd.graph.get_gradient_edge(weight).node

    def arrive(grads: lookups.Grads) -> tuple[None]:
        found.append(lookups._is_exclusive(grads))
        return (None,)

    node.register_prehook(arrive)
    hidden = torch.randn(7, HIDDEN, requires_grad=True)
    sw.linear_cross_entropy(hidden, weight, torch.arange(7), recomputes=recomputes).backward()
    assert found == [True]
