"""Computes the norm of all reduced gradients; clips, unscales and checks them. All ranks must call, and get the same results."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm import Transport, World
from shardwise.engine.gradients import Gradients
from shardwise.errors import NonFiniteGradientError, OptimizerError
from shardwise.stages import Held, Stage


class Norms:
    """Reads gradients from their home, and all-reduces the results."""

    def __init__(self, gradients: Gradients, world: World, transport: Transport, stage: Stage, *, needs_scaling: bool) -> None:
        self._gradients = gradients
        self._units = gradients.units
        self._home = gradients.home
        self._needs_scaling = needs_scaling
        self._device = world.device
        self._transport = transport
        self._is_partitioned = stage.states is Held.SHARD  # else every rank has the full gradient

    def norm(self, norm_type: float) -> torch.Tensor:
        """The norm of all gradients, computed in fp64 and rounded to fp32.

        Squares of fp32 values are exact in fp64, and their sum has a relative error of about 1e-15. So the partition changes the
        order of summation, but very rarely the rounded result (`docs/numerics.md` says how rarely).
        """
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        if norm_type == float("inf"):
            for _, _, grad in self._home.each(self._units.values()):
                if grad.numel():
                    total = torch.maximum(total, grad.abs().amax().double().reshape(1))
            return self._combined(total, dist.ReduceOp.MAX).to(torch.float32).squeeze(0)
        for part in self._home.power_sums(self._units, norm_type):
            total += part
        return self._combined(total, dist.ReduceOp.SUM).pow(1.0 / norm_type).to(torch.float32).squeeze(0)

    def _combined(self, total: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Over the shards of every part of the model."""
        return self._over_parts(self._transport.inside.all_reduce(total, op) if self._is_partitioned else total, op)

    def _over_parts(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """All-reduce over the ranks with the other parts of the model, if it is divided."""
        beside = self._transport.beside
        return values if beside is None else beside.all_reduce(values, op)

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before."""
        if self._gradients.is_scaled:
            raise OptimizerError(
                "clip_grad_norm_: gradients are still multiplied by the loss scale. Call run.scaler.unscale_(optimizer) first."
            )
        self._gradients.accumulated.require_reduced("clip_grad_norm_()")
        norm = self.norm(norm_type)
        if bool(torch.isfinite(norm)):
            self._home.scale(self._units.values(), clip_factor(norm, max_norm))
        elif not self._needs_scaling:  # else the scaler has seen the overflow and will skip the step
            names = self.non_finite()
            raise NonFiniteGradientError(
                f"clip_grad_norm_: the gradient norm is {norm.item()} at step {self._transport.watch.step}; infinite or NaN "
                f"gradients in {', '.join(repr(n) for n in names[:5]) or 'no single parameter (the sum overflowed)'}"
                f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}. Gradients and parameters are unchanged: "
                "skip this step (optimizer.zero_grad()) or find the cause."
            )
        return norm

    def unscale(self, factor: float) -> bool:
        """Multiply all gradients by `factor`; return whether they were finite on all ranks before."""
        self._gradients.accumulated.require_reduced("run.scaler")
        is_finite = self.is_finite()
        self._home.scale(self._units.values(), torch.tensor(factor, dtype=torch.float64))
        self._gradients.is_scaled = False
        return is_finite

    def is_finite(self) -> bool:
        """Whether every gradient on every rank is finite, by one small all-reduce."""
        bad = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for part in self._home.power_sums(self._units, 2.0):
            if not bool(torch.isfinite(part)):  # in fp64 a sum of squares of fp32 values is finite exactly if all of them are
                bad[0] = 1
        return not bool(self._over_parts(self._transport.all_reduce(bad, dist.ReduceOp.MAX), dist.ReduceOp.MAX).item())

    def non_finite(self) -> list[str]:
        """Names of parameters with an infinite or NaN gradient on any rank."""
        places = [(unit.index, slot) for unit in self._units.values() for slot in range(len(unit.params))]
        position = {place: number for number, place in enumerate(places)}
        flags = torch.zeros(max(len(places), 1), dtype=torch.uint8, device=self._device)
        for unit, piece, grad in self._home.each(self._units.values()):
            if not bool(torch.isfinite(grad).all()):
                flags[position[unit.index, piece.slot]] = 1
        found = self._transport.all_reduce(flags, dist.ReduceOp.MAX).tolist()
        names = [self._units[index].layout.slots[slot].name for index, slot in places if found[position[index, slot]]]
        beside = self._transport.beside
        everywhere = [names] if beside is None else beside.world.gather_objects(names)
        return list(dict.fromkeys(name for listed in everywhere for name in listed))


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor for all gradients, by the formula of `torch.nn.utils.clip_grad_norm_`; at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
