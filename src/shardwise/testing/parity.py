"""Does a sharded run give the same values as plain replicated training? The reference, the comparison and its report.

The reference is ordinary autograd on a whole replica per rank; with tensor parallelism on a replica of this rank's part. After
every backward the replicas' gradients are averaged over ranks, summed in rank order, and accumulated; then the user's own
optimizer class steps on whole parameters. Where the run stores 16-bit parameters, the reference rounds at the same places.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm import Transport, World
from shardwise.config import Precision
from shardwise.engine import clip_factor
from shardwise.partition import full_of, like, local_grad, local_of, own_data


class SupportsParity(Protocol):
    """The part of a run that the comparison reads."""

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss; may be disabled."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the global gradient norm."""

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Sum gradients locally."""

    def iter_grads(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The full reduced gradients."""

    def iter_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full values that the optimizer updates."""

    @property
    def config(self) -> Any:
        """The configuration of the run."""

    @property
    def transport(self) -> Transport:
        """How its ranks combine."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest element-wise difference of one quantity, and the step where it is largest."""

    quantity: str
    step: int
    largest: float
    largest_ulps: float
    """The largest over all elements and steps in units of the last place of the reference element."""


@dataclasses.dataclass
class ParityReport:
    """Differences between a sharded run and plain training, largest first."""

    steps: int
    differences: list[Difference]
    compared_elements: int

    @property
    def is_bitwise(self) -> bool:
        """Whether every compared element was equal to the last bit."""
        return self.compared_elements > 0 and not self.differences

    @property
    def largest(self) -> float:
        """The largest absolute difference."""
        return max((d.largest for d in self.differences), default=0.0)

    @property
    def largest_ulps(self) -> float:
        """The largest difference in units of the last place."""
        return max((d.largest_ulps for d in self.differences), default=0.0)

    def __str__(self) -> str:
        if self.compared_elements == 0:
            return "parity: nothing was compared"
        head = f"parity over {self.steps} steps, {self.compared_elements} elements compared: "
        if self.is_bitwise:
            return head + "equal to the last bit"
        rows = [f"  {d.quantity} at step {d.step}: {d.largest:.3e} ({d.largest_ulps:.1f} ulp)" for d in self.differences[:10]]
        return "\n".join([head + f"{len(self.differences)} quantities differ", *rows])


AddUp = Callable[[list[torch.Tensor]], torch.Tensor]
"""Sums one gradient over ranks, given the gradients of all ranks."""


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum in rank order, as the transports on one host and the pairwise transport do."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def in_order_of(replicas: Sequence[Sequence[int]]) -> AddUp:
    """Sum inside each replica in the order of its ranks, then over replicas, as hybrid sharding does."""
    return lambda parts: in_rank_order([in_rank_order([parts[rank] for rank in ranks]) for ranks in replicas])


class PlainTrainer:
    """One rank of plain replicated training, with the same rounding as a run of the given precision."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        add_up: AddUp | None = None,
        *,
        broadcasts: bool = True,
        world: World | None = None,
    ) -> None:
        """`broadcasts`: buffers are broadcast from rank 0 after each backward. `world`: the replicas; None: all ranks."""
        self.model = model
        self._group = dist.group.WORLD if world is None else world.group
        self._world_size = _world_size() if world is None else world.world_size
        self._broadcasts = broadcasts
        self._add_up = add_up or in_rank_order
        self.optimizer = optimizer
        self._stored = precision.param
        self._wire = precision.reduce
        self.masters: dict[str, nn.Parameter] = {}
        self._held: dict[str, torch.Tensor] = {}  # accumulated mean gradients
        swap: dict[int, nn.Parameter] = {}
        self._params = dict(model.named_parameters())
        for name, param in self._params.items():
            rounds = self._stored is not None and self._stored != param.dtype
            if rounds and not param.requires_grad:  # a frozen parameter has no master, only a stored value
                param.data.copy_(param.data.to(self._stored))
                rounds = False
            swap[id(param)] = nn.Parameter(param.detach().clone()) if rounds else param
            self.masters[name] = swap[id(param)]
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param in optimizer.state and swap[id(param)] is not param:  # it has stepped before
                    optimizer.state[swap[id(param)]] = optimizer.state.pop(param)
            group["params"] = [swap[id(p)] for p in group["params"]]
        self._round()

    def _round(self) -> None:
        """Copy the masters into the model, rounded as the run stores them."""
        with torch.no_grad():
            for name, param in self._params.items():
                if self.masters[name] is not param:
                    param.copy_(self.masters[name].to(self._stored))

    def backward(self, loss: torch.Tensor, *, reduces: bool = True) -> None:
        """Run a local backward, average gradients over ranks, accumulate them, and broadcast buffers from rank 0.

        Without `reduces` autograd sums locally, and the next backward that reduces averages the sum.
        """
        loss.backward()
        if not reduces:
            return
        params = {name: param for name, param in self._params.items() if param.requires_grad}
        local = {name: param.grad for name, param in params.items()}
        for param in self._params.values():
            param.grad = None
        for name, mean in self._averages(params, local).items():
            self._held[name] = mean if name not in self._held else self._held[name] + mean
        if self._broadcasts and self._world_size > 1 and (buffers := list(self.model.buffers())):
            values = [buffer.detach().contiguous().view(-1).view(torch.uint8) for buffer in buffers]
            together = torch.cat(values)
            dist.broadcast(together, group_src=0, group=self._group)
            with torch.no_grad():
                for buffer, part in zip(buffers, together.split([len(value) for value in values]), strict=True):
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _averages(self, params: dict[str, nn.Parameter], local: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The mean over ranks of every gradient that any rank has; gradients of one dtype are sent together."""
        local = {name: None if grad is None else local_grad(params[name], grad) for name, grad in local.items()}
        if self._world_size == 1:
            return {name: grad for name, grad in local.items() if grad is not None}
        is_used = torch.tensor([int(grad is not None) for grad in local.values()])
        dist.all_reduce(is_used, op=dist.ReduceOp.MAX, group=self._group)
        used = [name for name, flag in zip(local, is_used.tolist(), strict=True) if flag]
        found: dict[str, torch.Tensor] = {}
        for dtype in dict.fromkeys(self._wire or params[name].dtype for name in used):
            names = [name for name in used if (self._wire or params[name].dtype) == dtype]
            mine = [torch.zeros_like(local_of(params[n])) if (grad := local[n]) is None else grad.detach() for n in names]
            flat = torch.cat([grad.to(dtype).reshape(-1) for grad in mine])
            parts = [torch.empty_like(flat) for _ in range(self._world_size)]
            dist.all_gather(parts, flat, group=self._group)
            total = self._add_up([part.float() if dtype.itemsize == 2 else part for part in parts]) / self._world_size
            sizes = [grad.numel() for grad in mine]
            found |= {n: part.view(grad.shape) for n, grad, part in zip(names, mine, total.split(sizes), strict=True)}
        return {name: found[name] for name in local if name in found}

    def gradient(self, name: str) -> torch.Tensor | None:
        """The accumulated mean gradient of a whole parameter."""
        held = self._held.get(name)
        return None if held is None else full_of(self._params[name], held)

    def step(self, max_norm: float | None) -> None:
        """Clip if asked, update, and start the next accumulation."""
        if max_norm is not None:
            factor = clip_factor(plain_norm([full_of(self._params[name], grad) for name, grad in self._held.items()]), max_norm)
            for grad in self._held.values():
                grad.mul_(factor)
        for name, grad in self._held.items():
            self.masters[name].grad = like(self.masters[name], grad)
        self.optimizer.step()
        updated = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, master in self.masters.items():
            master.grad = None
            if id(master) in updated:  # like zero_grad(): other gradients keep accumulating
                self._held.pop(name, None)
        self._round()


def _seed(number: int) -> None:
    """`torch.manual_seed` for the devices in use: for the others it formats and keeps a stack trace each time (milliseconds)."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def plain_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of a list of tensors, formed in fp64 and rounded to fp32."""
    total = torch.zeros(1, dtype=torch.float64)
    for grad in grads:
        total += grad.double().square().sum()
    return total.sqrt().to(torch.float32).squeeze(0)


def compare_with_plain(
    run: SupportsParity,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plain: nn.Module,
    plain_optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    *,
    steps: int,
    max_norm: float | None = None,
    accumulate: int = 1,
    sums_locally: bool = False,
    seed: int = 1234,
    add_up: AddUp | None = None,
) -> ParityReport:
    """Train both for `steps` steps on the same data and compare losses, gradients and values after each.

    `loss_of(model, micro_step)` returns this rank's loss. Random numbers drawn inside are the same for both. With `sums_locally`
    all backwards of a step but the last are inside `run.accumulating()`. `add_up` sums the reference's gradients over ranks;
    None means as the run does: in rank order, inside replicas first.
    """
    rank = run.transport.world.rank  # ranks beside each other have the same data
    add_up = add_up or in_order_of(run.transport.world.replicas)
    world = run.transport.world
    reference = PlainTrainer(
        plain, plain_optimizer, run.config.precision, add_up, broadcasts=run.config.buffers == "broadcast", world=world
    )
    comparison = _Comparison()
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        for step in range(steps):
            for micro in range(accumulate):
                number = step * accumulate + micro
                _seed(seed + 1000 * number + rank)
                loss = loss_of(model, number)
                _seed(seed + 1000 * number + rank)
                expected = loss_of(plain, number)
                comparison.add("loss", step, local_of(loss.detach()), local_of(expected.detach()))
                reduces = not sums_locally or micro == accumulate - 1
                with contextlib.nullcontext() if reduces else run.accumulating():
                    run.scaler.scale(loss).backward()
                reference.backward(expected, reduces=reduces)
            run.scaler.unscale_(optimizer)
            if max_norm is not None:
                run.clip_grad_norm_(max_norm)  # clipped gradients are compared through the updated values
            else:
                for name, grad in run.iter_grads():
                    if reference.masters[name].numel():
                        comparison.add_grad(name, step, grad, reference.gradient(name))
            run.scaler.step(optimizer)
            run.scaler.update()
            optimizer.zero_grad()
            reference.step(max_norm)
            for name, master in run.iter_masters():
                expected = reference.masters[name]
                comparison.add(f"parameter {name}", step, master, full_of(expected, own_data(expected)))
    return comparison.report(steps)


class _Comparison:
    def __init__(self) -> None:
        self._worst: dict[str, Difference] = {}
        self._elements = 0

    def add_grad(self, name: str, step: int, found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
        if (found is None) != (expected is None):
            have, lack = ("plain training", "the run") if found is None else ("the run", "plain training")
            self._worst[f"gradient {name}"] = Difference(
                f"gradient {name} ({have} has one, {lack} has none)", step, float("inf"), float("inf")
            )
        elif found is not None and expected is not None:
            self.add(f"gradient {name}", step, found, expected)

    def add(self, quantity: str, step: int, found: torch.Tensor, expected: torch.Tensor) -> None:
        self._elements += expected.numel()
        if found.dtype == expected.dtype and torch.equal(found, expected):
            return
        dtype = expected.dtype
        found, expected = found.double(), expected.double()
        if found.shape != expected.shape:
            self._worst[quantity] = Difference(f"{quantity} (shape)", step, float("inf"), float("inf"))
            return
        if torch.equal(found, expected) or expected.numel() == 0:
            return
        gap = (found - expected).abs()
        gap = torch.where(torch.isnan(gap), torch.full_like(gap, float("inf")), gap)
        gap = torch.where(torch.isnan(found) & torch.isnan(expected), torch.zeros_like(gap), gap)
        largest = float(gap.max())
        if largest == 0.0:
            return
        finfo = torch.finfo(dtype)
        ulp = torch.exp2(torch.floor(torch.log2(expected.abs().clamp_min(finfo.tiny)))) * finfo.eps
        worst = self._worst.get(quantity, Difference(quantity, step, 0.0, 0.0))
        self._worst[quantity] = Difference(
            quantity,
            step if largest > worst.largest else worst.step,
            max(largest, worst.largest),
            max(float((gap / ulp).max()), worst.largest_ulps),
        )

    def report(self, steps: int) -> ParityReport:
        ordered = sorted(self._worst.values(), key=lambda d: d.largest, reverse=True)
        return ParityReport(steps, ordered, self._elements)
