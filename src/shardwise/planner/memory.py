"""How much memory does a rank need? The formula: bytes per rank and kind, from sizes alone.

The report prints predicted and measured bytes, and tests compare them. Pure arithmetic: no tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from shardwise.activations import StretchSize
from shardwise.engine import MAX_EVICTIONS, MAX_IN_FLIGHT
from shardwise.optim import NUM_SETS
from shardwise.partition import fill_buckets, needs_own_master
from shardwise.stages import STAGES, Held


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitSize:
    """What the formula needs to know of one Unit. Lengths are in elements, padding included."""

    path: str
    """Where in the module tree the Unit is opened; a Unit stays gathered while anything below it runs."""
    joined_paths: tuple[str, ...] = ()
    """If several Units were joined: where each of them is opened instead."""
    full_numel: int
    shard_numel: int
    stored_itemsize: int
    compute_itemsize: int
    master_itemsize: int
    is_trainable: bool = True
    gathers_in_place: bool = False
    """Gathering needs no memory: the full vector is an overlay of the ranks' shards."""
    shared_numel: int = 0
    """Elements of the largest parameter that several modules use: autograd holds its gradients while it adds them."""
    is_tile: bool = False
    """It is one tile of a parameter: gathered by an operation, one at a time."""
    adds_in_place: bool = False
    """The parts of that parameter's gradient are added in place, into the part that comes first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Predicted bytes per rank."""

    param: int
    master: int
    grad: int
    moment: int
    buffer: int
    activation: int

    @property
    def total(self) -> int:
        """The sum of all kinds: what one rank needs in addition to the interpreter and its libraries."""
        return self.param + self.master + self.grad + self.moment + self.buffer + self.activation

    def by_kind(self) -> dict[str, int]:
        """Kind to bytes, in the order of the report."""
        return dataclasses.asdict(self)


def plan_memory(
    units: Sequence[UnitSize],
    *,
    stage: int,
    num_moments: int,
    exchange_bytes: int = 0,
    activation_bytes: int = 0,
    reductions_in_flight: int = MAX_IN_FLIGHT + 1,
    prefetch_bytes: int = 0,
    offloaded: Collection[str] = (),
    step_bytes: int = 0,
    accumulates: bool = False,
) -> MemoryPlan:
    """Bytes of memory per rank for a stage.

    Parameters are full below stage 3. Masters need memory only where they are separate from the stored parameters. Gradients
    are the reduced span plus the local gradients that are not reduced yet: all of them below stage 2, a few buckets from there
    on. Two more are counted for a parameter that several modules use: autograd keeps both parts while it forms their sum. If
    they are added in place, the first part is alive for the whole backward. What is `offloaded` ('params', 'grads', 'optimizer')
    needs only buffers. `accumulates`: local gradients are summed over several backwards, so all of them are kept.
    """
    row = STAGES[stage]
    trainable = [u for u in units if u.is_trainable]
    span = {id(u): u.full_numel if row.states is Held.FULL else u.shard_numel for u in trainable}
    if row.params is Held.SHARD:
        param = 0 if "params" in offloaded else sum(u.shard_numel * u.stored_itemsize for u in units)
        gathered = _largest_chain(units) + prefetch_bytes
    else:
        param = sum(u.full_numel * u.compute_itemsize for u in units)
        param += sum(u.shard_numel * u.stored_itemsize for u in units if u.stored_itemsize != u.compute_itemsize)
        gathered = 0
    master = sum(span[id(u)] * u.master_itemsize for u in trainable if _has_own_master(u, span[id(u)]))
    on_the_way = _grads_on_the_way(trainable, reductions_in_flight if row.grads is Held.SHARD and not accumulates else None)
    spans = [span[id(u)] * u.master_itemsize for u in trainable]
    passing = _passing_bytes(
        trainable, spans, num_moments, offloaded, step_bytes, max(reductions_in_flight - 1, 1), has_masters=bool(master)
    )
    return MemoryPlan(
        param=param,
        master=0 if "optimizer" in offloaded else master,
        grad=(0 if "grads" in offloaded else sum(spans)) + on_the_way,
        moment=0 if "optimizer" in offloaded else num_moments * sum(spans),
        buffer=gathered + exchange_bytes + passing,
        activation=activation_bytes,
    )


def _has_own_master(unit: UnitSize, span_numel: int) -> bool:
    return needs_own_master(
        is_stored=unit.master_itemsize == unit.stored_itemsize,
        is_computed=unit.stored_itemsize == unit.compute_itemsize,
        updates_shard=span_numel == unit.shard_numel,
    )


def _grads_on_the_way(trainable: Sequence[UnitSize], num_buckets: int | None) -> int:
    """Bytes of the local gradients in memory at once, with those of parameters that several modules use."""
    local = _local_grads(trainable, num_buckets)
    totals = [local]
    for unit in [u for u in trainable if u.shared_numel and not u.is_tile]:
        num_bytes = unit.shared_numel * unit.compute_itemsize
        if not unit.adds_in_place:
            totals.append(local + 2 * num_bytes)
        elif num_buckets is not None:
            totals.append(_local_grads([u for u in trainable if u is not unit], num_buckets) + num_bytes)
    return max(totals)


def _local_grads(trainable: Sequence[UnitSize], num_buckets: int | None) -> int:
    """Bytes of local gradients in memory at once: the largest `num_buckets` buckets in a row, in backward order; None: all."""
    units = list(reversed(trainable))
    if num_buckets is None:
        return sum(u.full_numel * u.compute_itemsize for u in units)
    kinds = [_kind(u) for u in units]
    buckets = fill_buckets([u.shard_numel * u.master_itemsize for u in units], kinds)
    sizes = [sum(units[at].full_numel * units[at].compute_itemsize for at in bucket) for bucket in buckets]
    # Units of other dtypes lie between the parts of a joined one: its gradients wait for each other beside theirs.
    joined: dict[tuple[int, ...], int] = {}
    for unit, kind in zip(units, kinds, strict=True):
        if unit.joined_paths:
            joined[kind] = max(joined.get(kind, 0), unit.full_numel * unit.compute_itemsize)
    waiting = sum(joined.values()) - (max(joined.values(), default=0) if len(set(kinds)) == len(joined) else 0)
    return _largest_run(sizes, num_buckets) + waiting


def _passing_bytes(
    trainable: Sequence[UnitSize],
    spans: Sequence[int],
    num_moments: int,
    offloaded: Collection[str],
    step_bytes: int,
    reductions_in_flight: int,
    *,
    has_masters: bool,
) -> int:
    """Bytes of the buffers for transfers to and from disk: those of a step, or those of gradients if they are more.

    One pool serves both, so that a step's portions also lie in buffers that were made for the longer gradients of Units.
    """
    vectors: float = num_moments if "optimizer" in offloaded else 0
    vectors += "grads" in offloaded
    vectors += "params" in offloaded or (has_masters and "optimizer" in offloaded)
    vectors += 0.5 if has_masters and "params" in offloaded else 0  # rounded parameters are written in addition to masters
    step = int(NUM_SETS * vectors * min(step_bytes, sum(spans)))
    if "grads" not in offloaded:
        return step
    backward = list(reversed(spans))
    buckets = fill_buckets(backward, [_kind(unit) for unit in reversed(trainable)])
    starts = range(max(len(buckets) - reductions_in_flight, 0) + 1)
    windows = [[backward[at] for bucket in buckets[s : s + reductions_in_flight] for at in bucket] for s in starts]
    reduced = max(windows, key=sum, default=[])
    evicted = sorted(spans, reverse=True)[: min(MAX_EVICTIONS, len(spans) - len(reduced))]
    borrowed = [*reduced, *evicted]
    return max(step + sum(max(num_bytes - step_bytes, 0) for num_bytes in borrowed), sum(borrowed))


def _largest_chain(units: Sequence[UnitSize]) -> int:
    """Bytes of the largest set of Units gathered together: a Unit stays gathered while modules below it run.

    Joined Units linger beside them, together at most as large as the largest of each kind.
    """
    sizes = {id(u): 0 if u.gathers_in_place else u.full_numel * u.compute_itemsize for u in units}
    tile = max((sizes[id(u)] for u in units if u.is_tile), default=0)  # in addition to what modules have gathered around it
    chains = [(u.joined_paths or (u.path,), sizes[id(u)], u) for u in units if not u.is_tile]
    joined = sorted((num_bytes, _kind(unit)) for _, num_bytes, unit in chains if unit.joined_paths)
    largest, most_beside = 0, sum({kind: num_bytes for num_bytes, kind in joined}.values())
    for deepest in {path for paths, _, _ in chains for path in paths}:
        used, beside = 0, 0
        for paths, num_bytes, unit in chains:
            if any(path in ("", deepest) or deepest.startswith(path + ".") for path in paths):
                used += num_bytes
            elif unit.joined_paths:
                beside += num_bytes
        largest = max(largest, used + min(beside, most_beside))
    return largest + tile


def _kind(unit: UnitSize) -> tuple[int, ...]:
    """Units of the same kind may be joined and reduced together."""
    return unit.stored_itemsize, unit.compute_itemsize, unit.master_itemsize, unit.is_trainable


def _largest_run(sizes: Sequence[int], length: int) -> int:
    return max((sum(sizes[start : start + length]) for start in range(len(sizes))), default=0)


def gpt_activation_bytes(
    *, layers: int, hidden: int, heads: int, sequence: int, batch: int, vocabulary: int, itemsize: int = 4
) -> int:
    """What autograd keeps for a GPT of `shardwise.testing.models` without dropout, fp32 by default.

    Per block and token: two norms keep their input (2 h), attention its normed input, the joint projection, the
    heads' output and one row of statistics (h + 3 h + h + a), the output projection nothing further, and the feed-forward part
    its normed input, the expansion before and after the nonlinearity (h + 4 h + 4 h). The head keeps its input
    and the loss the log-probabilities.
    """
    tokens = batch * sequence
    per_token = 2 * hidden + 5 * hidden + heads + 9 * hidden + 4
    head = 2 * hidden + 2 + vocabulary
    return itemsize * tokens * (layers * per_token + head)


def checkpoint_bytes(
    *, batch: int, sequence: int, hidden: int, layers: int, interval: int = 1, itemsize: int = 2, degree: int = 1
) -> int:
    """Bytes of activation checkpoints per rank, as ZeRO's papers count them: 2 bsz seq hd nl / ci in 16 bit.

    One hidden state per token is kept for every `interval` layers. With `degree` ranks that have equal ones and divide them (Pa)
    each keeps a part. On the device it is nothing if they are offloaded.
    """
    return -(-itemsize * batch * sequence * hidden * -(-layers // interval) // degree)


def kept_activation_bytes(stretches: Sequence[StretchSize], *, saved_bytes: int = 0, saved_before_bytes: int = 0) -> int:
    """Bytes of activations in the device's own memory at most, for a forward pass that is computed again stretch by stretch.

    At the end of the forward pass everything that is kept is there, with the `saved_bytes` that autograd saves outside of
    stretches. Backward computes the last stretch again first, when only `saved_before_bytes` of those are left: what was saved
    before that stretch began. It drops the inputs of every stretch that it has passed.
    """
    most = sum(size.kept_bytes for size in stretches) + saved_bytes
    kept = 0
    for size in stretches:
        kept += size.kept_bytes
        most = max(most, kept + saved_before_bytes + size.again_bytes)
    return most


def passing_activation_bytes(stretches: Sequence[StretchSize], *, leaving_bytes: int, ahead_bytes: int) -> int:
    """Bytes of the buffers for activations on their way down (at most `leaving_bytes`) and up (`ahead_bytes`)."""
    return min(sum(size.away_bytes for size in stretches), leaving_bytes + ahead_bytes)
