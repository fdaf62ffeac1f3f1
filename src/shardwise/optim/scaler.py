"""Loss scaling for fp16: a `torch.amp.GradScaler` whose ranks decide together.

Users get it as `run.scaler`. `scale`, `unscale_`, `step`, `update` and `state_dict` are used as in torch. What differs: gradients
are unscaled where they live (also on disk), and an overflow on one rank is an overflow on all.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from shardwise.config import LossScale


class Scaled(Protocol):
    """What a scaler needs of the gradients. The runtime implements it."""

    def scaled(self) -> None:
        """The backward of a scaled loss has begun."""

    def unscale(self, factor: float) -> bool:
        """Multiply all reduced gradients by `factor`; return whether they are finite on all ranks."""

    def skip_step(self) -> None:
        """The step is skipped because of an overflow."""


class GradScaler(torch.amp.GradScaler):
    """Scales the loss of one sharded model. Optimizers of other models are treated as torch's own scaler would."""

    def __init__(self, policy: LossScale | None, gradients: Scaled, optimizer: torch.optim.Optimizer | None, device: str) -> None:
        settings = LossScale() if policy is None else policy
        super().__init__(
            device,
            init_scale=settings.initial,
            growth_factor=settings.growth,
            backoff_factor=settings.backoff,
            growth_interval=settings.interval,
            enabled=policy is not None,
        )
        self._minimum = settings.minimum
        self._gradients = gradients
        self._optimizer = optimizer

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or losses, by the scale; the runtime is told when their backward begins."""
        scaled = super().scale(outputs)
        if self._enabled:
            self._watch(scaled)
        return scaled

    def _watch(self, outputs: Any) -> None:
        if isinstance(outputs, torch.Tensor):
            if outputs.requires_grad:
                outputs.register_hook(self._begin)
            return
        for output in outputs:
            self._watch(output)

    def _begin(self, _: torch.Tensor) -> None:
        self._gradients.scaled()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if optimizer is not self._optimizer:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        is_finite = self._gradients.unscale(float(inv_scale))
        return {found_inf.device: torch.full_like(found_inf, 0.0 if is_finite else 1.0)}

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and check whether any rank's overflowed."""
        super().unscale_(self._own(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, unless a gradient overflowed on any rank."""
        optimizer = self._own(optimizer)
        if not self._enabled or optimizer is not self._optimizer:
            return super().step(optimizer, *args, **kwargs)
        # With the flag off, torch itself skips the step after an overflow instead of leaving that to the optimizer.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            taken = self._num_overflows(optimizer)
            result = super().step(optimizer, *args, **kwargs)
            if self._num_overflows(optimizer) or taken:
                self._gradients.skip_step()
            return result
        finally:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _num_overflows(self, optimizer: torch.optim.Optimizer) -> float:
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return float(sum(flag.item() for flag in found.values()))

    def _own(self, optimizer: Any) -> Any:
        """The sharded optimizer, if `optimizer` is a wrapper around it; else `optimizer`."""
        return self._optimizer if getattr(optimizer, "optimizer", None) is self._optimizer else optimizer

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Grow or back off, never below the policy's minimum."""
        super().update(new_scale)
        if self._enabled and self._scale is not None:
            self._scale.clamp_(min=self._minimum)
