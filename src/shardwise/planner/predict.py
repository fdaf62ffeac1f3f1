"""How much memory does this model need, and does it fit a budget? Applies the memory formula to a model's Blueprints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import torch

from shardwise.activations import Keeping
from shardwise.config import ShardConfig
from shardwise.engine import Runtime
from shardwise.errors import MemoryBudgetError
from shardwise.observe import format_bytes
from shardwise.optim import num_moments
from shardwise.partition import Blueprint
from shardwise.planner.memory import (
    MemoryPlan,
    UnitSize,
    kept_activation_bytes,
    passing_activation_bytes,
    plan_memory,
)


def predict_memory(
    config: ShardConfig,
    blueprints: Sequence[Blueprint],
    *,
    overlaid: Sequence[bool] | None = None,
    num_moments: int,
    exchange_bytes: int,
    activation_bytes: int = 0,
    prefetch_bytes: int,
    accumulates: bool = False,
) -> MemoryPlan:
    """Apply the formula to these Units; `overlaid` says which of them are overlays (default: none)."""
    sizes = [
        UnitSize(
            path=unit.path,
            joined_paths=unit.joined_paths,
            full_numel=unit.layout.numel,
            shard_numel=unit.layout.shard_numel,
            stored_itemsize=unit.dtypes.stored.itemsize,
            compute_itemsize=unit.dtypes.compute.itemsize,
            master_itemsize=unit.dtypes.master.itemsize,
            is_trainable=unit.is_trainable,
            gathers_in_place=overlaid is not None and overlaid[number],
            shared_numel=unit.shared_numel,
            adds_in_place=unit.adds_in_place,
            is_tile=bool(unit.tile_of),
        )
        for number, unit in enumerate(blueprints)
    ]
    return plan_memory(
        sizes,
        stage=config.stage,
        num_moments=num_moments,
        exchange_bytes=exchange_bytes,
        activation_bytes=activation_bytes,
        prefetch_bytes=prefetch_bytes,
        offloaded=config.offload.offloaded_kinds(host_is_apart=blueprints[0].device.type != "cpu"),
        step_bytes=config.offload.step_bytes,
        accumulates=accumulates,
    )


@dataclasses.dataclass
class SavedBytes:
    """What autograd was seen to save outside of what is computed again."""

    most: int = 0
    """At once, at the end of a forward pass."""
    before: int = 0
    """Of these, before the last stretch that is computed again began."""


def predict_activations(keeping: Keeping | None, saved: SavedBytes) -> int:
    """Bytes of activations on the device's own tier: what was kept and computed again last, and what autograd saves besides."""
    stretches = () if keeping is None else keeping.sizes.stretches
    return kept_activation_bytes(stretches, saved_bytes=saved.most, saved_before_bytes=saved.before)


def predict_run(
    config: ShardConfig,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer | None,
    keeping: Keeping | None,
    activation_bytes: int,
) -> MemoryPlan:
    """Apply the formula to a model that is sharded."""
    runner = runtime.gathering.runner
    return predict_memory(
        config,
        [unit.blueprint for unit in runtime.units],
        overlaid=[unit.is_overlaid for unit in runtime.units],
        num_moments=len(runtime.offload.states) or num_moments(optimizer),
        exchange_bytes=runtime.transport.planned_exchange_bytes + (0 if keeping is None else _passing_bytes(keeping)),
        activation_bytes=activation_bytes,
        prefetch_bytes=0 if runner is None else runner.budget_bytes,
        accumulates=runtime.gradients.accumulated.was_used,
    )


def _passing_bytes(keeping: Keeping) -> int:
    """Bytes of buffers for activations on their way, on the device's own tier."""
    is_down_there = keeping.device.type != "cpu"  # buffers on the way to the disk are then in host memory
    return passing_activation_bytes(
        keeping.sizes.stretches, leaving_bytes=0 if is_down_there else keeping.leaving_bytes, ahead_bytes=keeping.ahead_bytes
    )


def admission(config: ShardConfig, optimizer: torch.optim.Optimizer | None) -> Callable[[Sequence[Blueprint]], None]:
    """Return a check that raises, before anything is changed, if the model exceeds the budget of host memory."""
    budget = config.offload.host_bytes

    def admit(blueprints: Sequence[Blueprint]) -> None:
        if budget is None or blueprints[0].device.type != "cpu":
            return  # with an accelerator the ledger checks the budget when host memory is reserved
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if budget > physical:
            raise MemoryBudgetError(
                f"Offload(host_bytes={budget}) is more than this machine's memory, {physical} bytes. Give a smaller budget, or "
                "None."
            )
        largest = max(blueprints, key=lambda unit: unit.full_bytes)
        plan = predict_memory(
            config,
            blueprints,
            num_moments=num_moments(optimizer),
            exchange_bytes=_exchange_bytes(config, blueprints),
            prefetch_bytes=largest.full_bytes if config.prefetch_bytes is None else config.prefetch_bytes,
        )
        if plan.total > budget:
            parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in plan.by_kind().items() if size)
            raise MemoryBudgetError(
                f"Offload(host_bytes={budget}) does not suffice: {plan.total} bytes are needed beside activations ({parts}). The "
                f"largest Unit, {largest.name!r}, takes {format_bytes(largest.full_bytes)} when gathered. Raise the budget, move "
                "more states to disk, lower Offload(step_bytes=...) or prefetch_bytes, or use smaller Units (max_unit_bytes)."
            )

    return admit


def _exchange_bytes(config: ShardConfig, blueprints: Sequence[Blueprint]) -> int:
    """Bytes of exchange buffers. A single rank needs none larger than its largest gradient."""
    if blueprints[0].layout.num_shards > 1:
        return config.exchange_bytes
    return min(config.exchange_bytes, max(unit.layout.shard_numel * unit.dtypes.reduce.itemsize for unit in blueprints))
