"""The streamed step: while portion i is updated, portion i + 1 is fetched and portion i - 1 is written back.

Runs in place of the body of the user's `optimizer.step()`. Fused Adam and AdamW use the native kernel; any other element-wise
optimizer runs its own step on each portion, with that portion's states. Hyperparameters are read from the groups at every step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import DiskError, OptimizerError
from shardwise.optim import adam
from shardwise.optim.elementwise import fresh_state
from shardwise.optim.states import Portion, Region, Run, cut, was_zeroed
from shardwise.partition import Unit, UpdatePiece, publish_part
from shardwise.ticket import Ticket
from shardwise.tiers import Buffer, Buffers, DiskShelf, Kind, Ledger, Shelf, Tier, aligned_zeros

NUM_SETS = 3
"""Sets of buffers: one is fetched into, one updated, one written back."""
MEAN, SQUARE = "exp_avg", "exp_avg_sq"
Key = tuple[int, int, int]
"""Unit, piece and first element: identifies a part of a piece from step to step."""


class _Set:
    """Host memory for one portion of a Region: buffers for shelves on disk; shelves in host memory are used directly."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}
        self.tickets: list[Ticket] = []

    def borrow(self, buffers: Buffers, shelves: Sequence[DiskShelf], most_numel: int) -> None:
        for shelf in shelves:
            self.buffers[id(shelf)] = buffers.borrow(most_numel * shelf.dtype.itemsize)

    def vector(self, shelf: Shelf, portion: Portion) -> torch.Tensor:
        if shelf.vector is not None:
            return shelf.vector[portion.start : portion.start + portion.numel]
        return self.buffers[id(shelf)].as_vector(shelf.dtype, portion.numel)

    def wait(self) -> None:
        """Wait for all transfers; then raise the first error, if any."""
        failed: DiskError | None = None
        while self.tickets:
            try:
                self.tickets[0].wait()
            except DiskError as error:
                failed = failed or error
            self.tickets.pop(0)
        if failed is not None:
            raise failed


class StreamedStep:
    """Updates every Region portion by portion."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        regions: Sequence[Region],
        units: Mapping[int, Unit],
        buffers: Buffers,
        ledger: Ledger,
        step_bytes: int,
        states: dict[str, torch.dtype],
        grad_factors: Mapping[int, Sequence[float]],
        before_change: Callable[[int], None],
    ) -> None:
        """`states` are the optimizer's long states, as `long_states` found them.

        `grad_factors` maps a Unit to the factors that its gradients are multiplied by after they are fetched. `before_change` is
        called with a Unit's number before its states change.
        """
        self._before_change = before_change
        self._optimizer = optimizer
        self._regions = regions
        self._buffers = buffers
        self._ledger = ledger
        self.states = states
        self.buffer_bytes = 0
        """Peak of all sets together. It depends on `step_bytes` and the number of vectors on disk, not on the model's size."""
        self._portions = [
            cut([units[b.index] for b in region.blueprints], step_bytes // region.dtype.itemsize) for region in regions
        ]
        self.is_native = adam.can_update(optimizer, {region.dtype for region in regions})
        self._group_of: dict[int, int] = {}  # by piece; pieces in no group are not updated
        self._keys: dict[tuple[int, int], list[Key]] = {}  # the parts of each piece, by Unit and number
        for run in (run for portions in self._portions for portion in portions for run in portion.runs):
            for number, _, low, _ in run.parts():
                self._keys.setdefault((run.unit.index, number), []).append((run.unit.index, number, low))
        self._small: dict[Key, dict[str, Any]] = {}  # states shorter than their piece, of parts that were updated
        self._kept: dict[tuple[int, str], torch.Tensor] = {}  # long states in memory, by Unit
        self._templates: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        for piece, state in list(optimizer.state.items()):  # made with the optimizer: one element is kept as a template
            pattern = torch.zeros(1, dtype=piece.dtype)
            self._templates[id(piece)] = (pattern, fresh_state(piece, state, pattern))
            del optimizer.state[piece]
        self._grad_factors = grad_factors

    @property
    def has_states(self) -> bool:
        """Whether any part has been updated."""
        return bool(self._small)

    def __call__(self) -> None:
        """Update everything that has a gradient."""
        groups = self._optimizer.param_groups
        self._group_of = {id(piece): number for number, group in enumerate(groups) for piece in group["params"]}
        for region, portions in zip(self._regions, self._portions, strict=True):
            active = [p for p in portions if any(self._is_due(update) for run in p.runs for _, update, _, _ in run.parts())]
            if active:
                self._stream(region, active)

    def _stream(self, region: Region, portions: Sequence[Portion]) -> None:
        reads, writes = self._on_disk(region)
        most = max(portion.numel for portion in portions)
        shelves = list({id(shelf): shelf for shelf in (*reads, *writes)}.values())
        sets: list[_Set] = []
        try:
            for _ in range(NUM_SETS):
                sets.append(_Set())
                sets[-1].borrow(self._buffers, shelves, most)
            self.buffer_bytes = max(self.buffer_bytes, sum(b.raw.numel() for held in sets for b in held.buffers.values()))
            for number in range(-1, len(portions)):
                if number + 1 < len(portions):
                    self._fetch(sets[(number + 1) % NUM_SETS], portions[number + 1], reads)
                if number >= 0:
                    held = sets[number % NUM_SETS]
                    held.wait()
                    for run in portions[number].runs:
                        self._before_change(run.unit.index)
                    self._update(region, portions[number], held)
                    for shelf in writes:
                        held.tickets.append(shelf.write(held.vector(shelf, portions[number]), portions[number].start))
            for held in sets:
                held.wait()
        finally:
            for held in sets:  # also after an error: all transfers must end before the buffers are borrowed again
                with contextlib.suppress(DiskError):
                    held.wait()
                for buffer in held.buffers.values():
                    self._buffers.give_back(buffer)

    def _is_due(self, update: UpdatePiece) -> bool:
        return update.grad is not None and id(update.master) in self._group_of

    @staticmethod
    def _on_disk(region: Region) -> tuple[list[DiskShelf], list[DiskShelf]]:
        """What is read before an update, and what is written after it."""
        master = region.master_shelf
        moments = list(region.moments.values())
        rounded = region.param if region.has_own_masters else None
        reads = [shelf for shelf in (master, region.grad, *moments) if isinstance(shelf, DiskShelf)]
        writes = [shelf for shelf in (master, *moments, rounded) if isinstance(shelf, DiskShelf)]
        return reads, writes

    def _fetch(self, held: _Set, portion: Portion, reads: Sequence[DiskShelf]) -> None:
        held.wait()  # for writes from these buffers
        held.tickets = [shelf.read(held.vector(shelf, portion), portion.start) for shelf in reads]

    # -- one portion ------------------------------------------------------------------------------------------

    def _update(self, region: Region, portion: Portion, held: _Set) -> None:
        parts = [
            _Part(self, region, portion, held, run, number, update, low, high)
            for run in portion.runs
            for number, update, low, high in run.parts()
            if self._is_due(update)
        ]
        with torch.no_grad():
            for part in parts:
                if region.grad is not None and was_zeroed(part.placeholder):
                    part.grad.zero_()
            if self.is_native:
                for part in parts:
                    self._update_natively(part)
            else:
                for part in parts:
                    for factor in self._grad_factors.get(part.unit.index, ()):
                        part.grad.mul_(factor)
                self._update_by_torch(parts)
            if region.has_own_masters and region.param is not None:
                self._round(region, region.param, portion, held)
                return
            for part in parts:
                if part.unit.has_own_master and part.stored is None:
                    publish_part(part.unit, part.low, part.master)

    @staticmethod
    def _round(region: Region, param: Shelf, portion: Portion, held: _Set) -> None:
        """Round masters into the offloaded parameters: the whole portion, because all of it is written."""
        stored = held.vector(param, portion)
        if region.master is not None:
            stored.copy_(held.vector(region.master, portion))
            return
        for run in portion.runs:
            stored[run.at : run.at + run.high - run.low].copy_(run.unit.master[run.low : run.high])

    def _update_natively(self, part: _Part) -> None:
        group = self._optimizer.param_groups[self._group_of[id(part.update.master)]]
        small = self._small.get(part.key)
        mean, square = part.long(MEAN), part.long(SQUARE)
        if small is None:
            small = self._small[part.key] = {"step": 0}
            mean.zero_()
            square.zero_()
        small["step"] += 1
        *first, last = self._grad_factors.get(part.unit.index, ()) or (1.0,)
        for factor in first:  # gradients were clipped more than once
            part.grad.mul_(factor)
        adam.update(group, small["step"], part.master, mean, square, part.grad, out=part.stored, grad_scale=last)

    def _update_by_torch(self, parts: Sequence[_Part]) -> None:
        """Run the optimizer's own step on these parts as if they were its parameters, with their states."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        params = [nn.Parameter(part.master) for part in parts]
        for group in groups:
            group["params"] = []
        for part, param in zip(parts, params, strict=True):
            param.grad = part.grad
            groups[self._group_of[id(part.update.master)]]["params"].append(param)
            state = self._state_of(part, param)
            if state:
                optimizer.state[param] = state
        try:
            _body_of_step(optimizer)
            for part, param in zip(parts, params, strict=True):
                self._keep(part, param, optimizer.state.get(param, {}))
        finally:
            for group, its_params in zip(groups, whole, strict=True):
                group["params"] = its_params
            for param in params:
                optimizer.state.pop(param, None)

    def _state_of(self, part: _Part, param: nn.Parameter) -> dict[str, Any]:
        small = self._small.get(part.key)
        if small is not None:
            return {**small, **{name: part.long(name) for name in self.states}}
        template = self._templates.get(id(part.update.master))
        return {} if template is None else fresh_state(*template, param)

    def _keep(self, part: _Part, param: nn.Parameter, state: dict[str, Any]) -> None:
        """Copy the long states to their shelf or memory; keep the small ones here."""
        small = {}
        for name, value in state.items():
            if not (isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim()):
                small[name] = value
                continue
            if name not in self.states:
                raise OptimizerError(
                    f"{type(self._optimizer).__name__} made a state {name!r} that a trial did not show, so there is no place for "
                    "it outside memory. Use Offload(optimizer='device')."
                )
            place = part.long(name)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        self._small[part.key] = small

    def small_states(self, unit: Unit, number: int) -> dict[str, Any] | None:
        """States of a piece that are shorter than it, such as its step count; None before its first update.

        They are the same for all parts in which the piece is updated.
        """
        keys = self._keys.get((unit.index, number), ())
        return next((self._small[key] for key in keys if key in self._small), None)

    def fresh_states(self, unit: Unit, number: int) -> dict[str, Any] | None:
        """The states of a piece before its first update, if the optimizer was built with states: one element of long ones."""
        template = self._templates.get(id(unit.pieces[number].master))
        return None if template is None or self.small_states(unit, number) is not None else template[1]

    def restore(self, unit: Unit, number: int, small: dict[str, Any] | None) -> None:
        """Set the small states of a piece, or (None) make it one that was never updated; long ones are written by `on_device`."""
        for key in self._keys.get((unit.index, number), ()):
            self._small.pop(key, None)
            if small is not None:
                self._small[key] = copy.deepcopy(small)

    def dtype_of(self, unit: Unit, name: str) -> torch.dtype:
        """The dtype in which a long state of a Unit is kept."""
        shelf = self.shelf_of(unit, name)
        return self.states[name] if shelf is None else shelf.dtype

    def shelf_of(self, unit: Unit, name: str) -> Shelf | None:
        """The shelf on which a long state of a Unit is kept; None if it is in memory."""
        return next((region.moments.get(name) for region in self._regions if unit.index in region.lengths), None)

    @contextlib.contextmanager
    def on_device(self, unit: Unit, name: str, *, keeps_changes: bool = False, is_new: bool = False) -> Iterator[torch.Tensor]:
        """Borrow a long state of a Unit, as long as its span: fetched to the device if it is on a shelf, or zeros if `is_new`."""
        shelf = self.shelf_of(unit, name)
        if shelf is None:
            yield self.kept(unit, name)
            return
        with shelf.borrowed(unit.index, keeps_changes=keeps_changes, is_new=is_new) as vector:
            yield vector

    def kept(self, unit: Unit, name: str) -> torch.Tensor:
        """A long state in memory, as long as the Unit's span."""
        key = (unit.index, name)
        if key not in self._kept:
            self._kept[key] = aligned_zeros(unit.span.numel, self.states[name], unit.blueprint.device)
            self._ledger.reserve(Tier.HOST, Kind.MOMENT, self._kept[key].numel() * self._kept[key].element_size())
        return self._kept[key]


class _Part:
    """The part of a piece that is in a portion, with views of its vectors."""

    def __init__(
        self,
        step: StreamedStep,
        region: Region,
        portion: Portion,
        held: _Set,
        run: Run,
        number: int,
        update: UpdatePiece,
        low: int,
        high: int,
    ) -> None:
        self.unit, self.update, self.low = run.unit, update, low
        self.key: Key = (run.unit.index, number, low)
        self._step, self._region, self._span = step, region, slice(low, high)
        self._held, self._portion = held, portion
        self._place = slice(run.at + low - run.low, run.at + high - run.low)
        master, own = region.master_shelf, update.bounds.shard_start
        self.master = run.unit.master[self._span] if master is None else self._on(master)
        assert update.grad is not None
        self.placeholder = update.grad
        if region.grad is not None:
            self.grad = self._on(region.grad)
        else:
            self.grad = update.grad[low - own : high - own].to(self.master.device)
        self.stored = self._stored() if step.is_native else None
        """Where the native kernel writes the rounded masters: the stored parameters, if in the same memory; else None."""

    def _stored(self) -> torch.Tensor | None:
        unit = self.unit
        is_beside = unit.has_own_master and not unit.blueprint.offloads_shard and unit.shard.device == self.master.device
        if not is_beside or unit.is_always_full or unit.span.numel != unit.layout.shard_numel:
            return None
        return unit.shard[self._span]

    def _on(self, shelf: Shelf) -> torch.Tensor:
        return self._held.vector(shelf, self._portion)[self._place]

    def long(self, name: str) -> torch.Tensor:
        """A long state of this part, in a buffer or in memory."""
        shelf = self._region.moments.get(name)
        return self._on(shelf) if shelf is not None else self._step.kept(self.unit, name)[self._span]


def _body_of_step(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's own step without the hooks around it."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)
