"""What is said about a run? Formats its report: bytes by kind, predicted and measured, placement, prefetch and traffic.

Called by `run.report()`. Reads the runtime and never changes it.
"""

from __future__ import annotations

import contextlib

import torch

from shardwise.activations import Keeping
from shardwise.comm import World
from shardwise.config import ShardConfig
from shardwise.engine import Runtime
from shardwise.observe import format_bytes, format_table, process_memory
from shardwise.planner import MemoryPlan
from shardwise.stages import Held
from shardwise.tiers import Kind, device_tier


def format_report(
    config: ShardConfig,
    runtime: Runtime,
    predicted: MemoryPlan,
    measured: dict[str, int],
    keeping: Keeping | None,
    loss_scale: float,
) -> str:
    """Return the report of this rank as text."""
    lines = [
        f"shardwise: stage {config.stage}, rank {_place(runtime.world)}, {len(runtime.units)} Units, "
        f"transport {runtime.transport.label}",
        _precision(config, runtime),
        "",
        _memory(predicted.by_kind(), measured),
    ]
    with contextlib.suppress(OSError):  # only Linux reports it
        now = format_bytes(process_memory().total)
        lines += ["", f"process memory now {now} (interpreter and libraries included)"]
    if runtime.world.threads:
        lines.append(f"threads {runtime.world.threads}")
    lines += [*runtime.offload.describe(), *runtime.tiles.describe()]
    if keeping is not None and keeping.sizes.stretches:
        lines.append(_activations(keeping, runtime))
    if runtime.transport.note and runtime.stage.params is Held.SHARD:
        lines.append(runtime.transport.note)
    runner = runtime.gathering.runner
    if runner is not None:
        lines.append(
            f"prefetch: {runner.depth.now} ahead within {format_bytes(runner.budget_bytes)}, "
            f"{runner.num_early} gathers started early, {runner.num_on_demand} on demand, "
            f"{runtime.stall_percent}% of the last step waited for gathers"
        )
    counters = runtime.transport.counters
    for operation in sorted(counters.calls):
        lines.append(
            f"{operation}: {counters.calls[operation]} calls, {counters.elements[operation]} elements "
            f"({format_bytes(counters.bytes[operation])}) sent"
        )
    if runtime.needs_scaling:
        lines.append(f"loss scale {loss_scale:g}, {runtime.num_skipped_steps} steps skipped")
    return "\n".join(lines)


def _place(world: World) -> str:
    """The rank's number, and where it is on each dimension of the mesh if there are several."""
    dimensions = [("pipe", world.pipe), ("tensor", world.tensor), ("replicate", world.across), ("shard", world.inside)]
    found = [f"{role} {there.rank} of {there.world_size}" for role, there in dimensions if there is not None]
    number = f"{world.label} of {world.whole.world_size}"
    return f"{number} ({', '.join(found)})" if len(found) > 1 else number


def _memory(predicted: dict[str, int], measured: dict[str, int]) -> str:
    rows = [[kind, format_bytes(predicted[kind]), format_bytes(measured[kind])] for kind in predicted]
    for column, figures, word in ((1, predicted, "not given"), (2, measured, "not measured")):
        if not figures["activation"]:
            rows[list(predicted).index("activation")][column] = word
    rows.append(["sum", format_bytes(sum(predicted.values())), format_bytes(sum(measured[kind] for kind in predicted))])
    return format_table(["bytes per rank", "predicted", "measured peak"], rows)


def _activations(keeping: Keeping, runtime: Runtime) -> str:
    """What the last forward pass kept, where, and what it takes to compute the largest part again."""
    sizes = keeping.sizes.stretches
    again = max(size.again_bytes for size in sizes)
    line = f"activations: {format_bytes(sum(size.kept_bytes for size in sizes))} kept in memory by the last forward pass"
    if keeping.tier is not device_tier(runtime.world.device):
        away, peak = sum(size.away_bytes for size in sizes), runtime.ledger.peak(keeping.tier, Kind.ACTIVATION)
        line += f", {format_bytes(away)} on {keeping.tier.value} (measured peak {format_bytes(peak)})"
    return line + (f"; computing again holds up to {format_bytes(again)}" if again else "")


def _precision(config: ShardConfig, runtime: Runtime) -> str:
    dtypes = runtime.units[0].dtypes
    line = (
        f"stored {_short(dtypes.stored)}, compute {_short(dtypes.compute)}, reduce {_short(dtypes.reduce)}, "
        f"master {_short(dtypes.master)}"
    )
    if config.precision.compute is None and dtypes.stored.itemsize < dtypes.compute.itemsize:
        line += f" (this CPU emulates {_short(dtypes.stored)} products, so compute runs in {_short(dtypes.compute)})"
    return line


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
