"""A tied table's gradient: bitwise what autograd forms, in every way a graph can use the table, and held once where it may be."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.engine.lookups import SharedTable, adds_in_place

ROWS, WIDTH = 13, 4


class Tied:
    """A table with a look-up and a head; its gradient arrives through a SharedTable, or (`is_plain`) by autograd alone."""

    def __init__(self, *, is_plain: bool, padding: int | None = None) -> None:
        torch.manual_seed(0)
        self.param = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.padding = padding
        self.openings = types.SimpleNamespace(num_opened=0)
        self.table = None if is_plain else SharedTable(self.openings, lambda: None)
        self.was_in_place: list[bool] = []
        self._sum: torch.Tensor | None = None
        if self.table is not None:
            self.node = torch.autograd.graph.get_gradient_edge(self.param).node
            self.node.register_prehook(self._arrive)
            self.table.node_id = id(self.node)

    def _arrive(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None]:
        before = None if grads[0] is None else grads[0].data_ptr()
        assert self.table is not None
        total = self.table.complete(grads)
        self.was_in_place.append(total is not None and total.data_ptr() == before)
        if total is not None:
            self._sum = total if self._sum is None else self._sum + total
        return (None,)

    @property
    def grad(self) -> torch.Tensor:
        found = self.param.grad if self.table is None else self._sum
        assert found is not None
        return found

    def clear(self) -> None:
        self.param.grad = self._sum = None

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        self.openings.num_opened += 1
        out = F.embedding(indices, self.param, padding_idx=self.padding)
        if self.table is not None:
            self.table.watch(out)
        return out

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        self.openings.num_opened += 1
        return F.linear(hidden, self.param)

    def loss(self, seed: int = 1) -> torch.Tensor:
        torch.manual_seed(seed)
        indices = torch.randint(ROWS, (3, 5))
        return self.head(torch.tanh(self.look_up(indices)) * torch.randn(3, 5, WIDTH)).square().sum()


def one_backward(tied: Tied) -> list[torch.Tensor]:
    tied.loss().backward()
    return [tied.grad]


def micro_batches(tied: Tied) -> list[torch.Tensor]:
    for seed in range(3):
        tied.loss(seed).backward()
    return [tied.grad]


def two_forwards(tied: Tied) -> list[torch.Tensor]:
    (tied.loss(1) + tied.loss(2)).backward()
    return [tied.grad]


def forwards_then_backwards(tied: Tied) -> list[torch.Tensor]:
    first, second = tied.loss(1), tied.loss(2)
    second.backward()
    first.backward()
    return [tied.grad]


def step_by_step(tied: Tied) -> list[torch.Tensor]:
    """A decoder that looks up what it has just predicted."""
    torch.manual_seed(3)
    state, token = torch.randn(2, WIDTH), torch.tensor([1, 5])
    total = torch.zeros(())
    for _ in range(4):
        state = torch.tanh(state + tied.look_up(token))
        logits = tied.head(state)
        total = total + logits.square().sum()
        token = logits.argmax(-1)
    total.backward()
    return [tied.grad]


def two_look_ups(tied: Tied) -> list[torch.Tensor]:
    """An encoder and a decoder over one table."""
    torch.manual_seed(4)
    source, target = tied.look_up(torch.randint(ROWS, (2, 6))), tied.look_up(torch.randint(ROWS, (2, 6)))
    tied.head(source.tanh() * target).square().sum().backward()
    return [tied.grad]


def one_graph_dropped(tied: Tied) -> list[torch.Tensor]:
    """The first look-up's graph is dropped, but a head that was used in between is not."""
    torch.manual_seed(9)
    x = torch.tanh(tied.look_up(torch.randint(ROWS, (4,))))
    first = tied.head(x.detach()).square().sum()
    x = torch.tanh(tied.look_up(torch.randint(ROWS, (4,))))
    (first + tied.head(x).square().sum()).backward()
    return [tied.grad]


def checkpointed(tied: Tied) -> list[torch.Tensor]:
    """Reading what a node has saved would run the call again here."""
    torch.manual_seed(10)
    calls = []

    def body(indices: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return tied.look_up(indices) * torch.rand(6, WIDTH)

    x = checkpoint(body, torch.randint(ROWS, (6,)), use_reentrant=False, preserve_rng_state=False)
    assert len(calls) == 1
    after = torch.rand(1)
    tied.head(x).square().sum().backward()
    return [after]


def head_before(tied: Tied) -> list[torch.Tensor]:
    torch.manual_seed(5)
    first = tied.head(torch.randn(3, WIDTH)).square().sum()
    (tied.loss() + first).backward()
    return [tied.grad]


def look_ups_alone(tied: Tied) -> list[torch.Tensor]:
    torch.manual_seed(6)
    (tied.look_up(torch.randint(ROWS, (9,))) * torch.randn(9, WIDTH)).sum().backward()
    return [tied.grad]


def head_alone(tied: Tied) -> list[torch.Tensor]:
    torch.manual_seed(7)
    tied.head(torch.randn(3, WIDTH)).square().sum().backward()
    return [tied.grad]


def retained(tied: Tied) -> list[torch.Tensor]:
    loss = tied.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    return [tied.grad]


def retained_and_another(tied: Tied) -> list[torch.Tensor]:
    first = tied.loss(1)
    first.backward(retain_graph=True)
    (first + tied.loss(2)).backward()
    return [tied.grad]


def by_autograd_grad(tied: Tied) -> list[torch.Tensor]:
    loss = tied.loss()
    return list(torch.autograd.grad(loss, tied.param, retain_graph=True)) + one_backward(tied)


def for_inputs(tied: Tied) -> list[torch.Tensor]:
    tied.loss().backward(inputs=[tied.param])
    return [tied.grad]


def twice_differentiated(tied: Tied) -> list[torch.Tensor]:
    (grad,) = torch.autograd.grad(tied.loss(), tied.param, create_graph=True)
    (tied.loss(2) + grad.square().sum()).backward()
    return [tied.grad]


def differentiable_backward(tied: Tied) -> list[torch.Tensor]:
    loss = tied.loss()
    loss.backward(create_graph=True)
    first = tied.grad
    (second,) = torch.autograd.grad(first.sum(), tied.param)
    tied.clear()
    return [first.detach(), second]


def hooked(tied: Tied) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.clone())
        return grad * 2

    tied.param.register_hook(hook)
    return [*one_backward(tied), *seen]


def raised_in_between(tied: Tied) -> list[torch.Tensor]:
    torch.manual_seed(8)
    rows = tied.look_up(torch.randint(ROWS, (4,)))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("fails")

    other = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="fails"):
        (rows.sum() + Fails.apply(other * 2)).backward()
    if tied.table is not None:
        tied.table.abandon()
    tied.clear()
    return one_backward(tied)


USES = [
    one_backward,
    micro_batches,
    two_forwards,
    forwards_then_backwards,
    step_by_step,
    two_look_ups,
    head_before,
    one_graph_dropped,
    checkpointed,
    look_ups_alone,
    head_alone,
    retained,
    retained_and_another,
    by_autograd_grad,
    for_inputs,
    twice_differentiated,
    differentiable_backward,
    hooked,
    raised_in_between,
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("padding", [None, 0, 5])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_every_use_gives_autograds_gradient(use: Callable[[Tied], list[torch.Tensor]], padding: int | None) -> None:
    expected, found = use(Tied(is_plain=True, padding=padding)), use(Tied(is_plain=False, padding=padding))
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("use", [one_backward, micro_batches, for_inputs], ids=lambda use: use.__name__)
def test_rows_are_added_to_the_heads_part_in_place(use: Callable[[Tied], list[torch.Tensor]]) -> None:
    tied = Tied(is_plain=False)
    use(tied)
    assert all(tied.was_in_place)


class Hands(torch.autograd.Function):
    """Returns a gradient that somebody else holds too."""

    kept: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, table):
        ctx.save_for_backward(table)
        return table.sum()

    @staticmethod
    def backward(ctx, grad):
        (table,) = ctx.saved_tensors
        Hands.kept = torch.ones_like(table) * grad
        return Hands.kept


@pytest.mark.parametrize("kind", ["kept", "given twice", "expanded", "a view of what is kept"])
def test_a_gradient_that_others_hold_is_not_changed(kind: str) -> None:
    tied, plain = Tied(is_plain=False), Tied(is_plain=True)
    kept: list[torch.Tensor] = []
    for one in (tied, plain):
        rows = one.look_up(torch.tensor([1, 1, 2])).sum()
        if kind == "kept":
            other = Hands.apply(one.param)
        elif kind == "given twice":
            addend = torch.zeros(ROWS, WIDTH, requires_grad=True)
            other = ((one.param + addend) * 3).sum()
        elif kind == "expanded":
            other = one.param.sum()
        else:
            turned = one.param.t()
            turned.register_hook(lambda grad: kept.append(grad))
            other = (torch.ones(2, WIDTH) @ turned).sum()
        (rows + other).backward()
        if kind == "kept":
            assert torch.equal(Hands.kept, torch.ones(ROWS, WIDTH))
        if kind == "given twice":
            assert torch.equal(addend.grad, torch.full((ROWS, WIDTH), 3.0))
    assert all(torch.equal(grad, torch.full_like(grad, 2.0)) for grad in kept)
    assert torch.equal(tied.grad, plain.grad)
    assert kind == "given twice" or not any(tied.was_in_place)  # the other holder may have taken its copy before


def test_when_parts_are_added_in_place() -> None:
    model = nn.ModuleDict({"look_up": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "other": nn.Linear(3, 5)})
    look_up, head, other = model.values()
    assert adds_in_place(model, [[look_up, head]])
    assert adds_in_place(model, [[look_up, nn.Embedding(5, 3)]])
    assert not adds_in_place(model, [[look_up, head, other]])
    assert not adds_in_place(model, [[look_up, head], [other]])
    assert not adds_in_place(head, [[look_up, head]])
    assert not adds_in_place(model, [[nn.Embedding(5, 3, max_norm=1.0), head]])
