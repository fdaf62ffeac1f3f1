"""What can be read of a run: full state dicts, gradients and masters, gathered Unit by Unit."""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine import Runtime, Survivors, plain_state_dict
from shardwise.errors import ConfigError, ModelError, RanksDifferError, TransportError
from shardwise.partition import Handle, Unit, full_of
from shardwise.tiers import checksum


@contextlib.contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """Name the user's call in errors of the exchanges inside: a rank may have made it alone."""
    try:
        yield
    except TransportError as error:
        raise TransportError(f"{call} failed; all ranks must call it. {error}") from error


class Reading:
    """The part of a `Run` that reads full values."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, runtime: Runtime) -> None:
        self._model = model
        self._optimizer = optimizer
        self._runtime = runtime
        self._survivors = Survivors(runtime, optimizer)
        named: Iterable[tuple[str, Any]] = model.named_parameters(remove_duplicate=False)
        self._handles: dict[str, Handle] = {name: param._shardwise for name, param in named}

    def iter_full_state(self, *, trainable_only: bool = False) -> Iterator[tuple[str, Any]]:
        """(name, full value) of parameters, one Unit in memory at a time, then of buffers and extra state. All ranks must
        iterate.

        Trainable values come from the masters, in the parameter's original dtype. A tensor is only valid until the
        next one is asked for. With `trainable_only` only parameters that require grad are returned, and only their Units are
        gathered.
        """
        self._runtime.changes.store_written()
        by_unit: dict[int, list[tuple[str, int]]] = {}
        others: list[tuple[str, Any]] = []
        for name, value in self._model.state_dict(keep_vars=True).items():
            handle = getattr(value, "_shardwise", None)
            if trainable_only and not (isinstance(value, nn.Parameter) and value.requires_grad):
                continue
            if handle is None:
                others.append((name, value))
            else:
                for unit, slot in handle.places:
                    by_unit.setdefault(unit.index, []).append((name, slot))
        if trainable_only:
            self._check_flags(by_unit)
        self._check_replicas(others)
        tiles = _Together()
        for unit in self._runtime.units:
            if trainable_only and unit.index not in by_unit:
                continue
            full = self._survivors.full_masters(unit)
            for name, slot in by_unit.get(unit.index, ()):
                value = full_of(unit.held[slot], _param_view(unit, slot, full).to(unit.dtypes.original))
                found = tiles.add(name, unit, slot, value)
                if found is not None:
                    yield name, found
        yield from others

    def _check_flags(self, by_unit: Mapping[int, Sequence[tuple[str, int]]]) -> None:
        """Raise if ranks differ in which parameters require grad: they would gather different Units."""
        chosen = {place for index, found in by_unit.items() for place in ((index, slot) for _, slot in found)}
        places = [(unit, slot) for unit in self._runtime.units for slot in range(len(unit.layout.slots))]
        flags = self._runtime.changes.agree_on([int((unit.index, slot) in chosen) for unit, slot in places])
        for (unit, slot), (low, high) in zip(places, flags, strict=True):
            if low != high:
                raise RanksDifferError(
                    f"parameter {unit.layout.slots[slot].name!r} requires grad on some ranks only. Freeze and unfreeze the same "
                    "parameters on every rank."
                )

    def _check_replicas(self, others: Sequence[tuple[str, Any]]) -> None:
        """Raise if a parameter that every rank holds in full has different values on different ranks."""
        runtime = self._runtime
        whole = [unit for unit in runtime.units if unit.is_always_full]
        strangers = [(name, value) for name, value in others if isinstance(value, nn.Parameter)]
        marks = [checksum(unit.full) for unit in whole] + [checksum(value) for _, value in strangers]
        found = runtime.changes.agree_on(marks) if marks and runtime.world.world_size > 1 else []
        names = [unit.layout.slots[0].name for unit in whole] + [name for name, _ in strangers]
        for name, (low, high) in zip(names, found, strict=False):
            if low != high:
                raise RanksDifferError(
                    f"parameter {name!r}, or one gathered with it, has different values on different ranks: it was changed by "
                    "hand on some of them, or never averaged. Make the same change on every rank before saving."
                )

    def full_state_dict(self, *, rank0_only: bool = True, trainable_only: bool = False) -> dict[str, Any]:
        """The whole state dict on the CPU, streamed Unit by Unit; empty on other ranks unless `rank0_only=False`.

        Keys, buffers and extra state are those of `model.state_dict()`. With `trainable_only` it has only the parameters that
        require grad, such as adapters, and neither buffers nor extra state. All ranks must call.
        """
        with called_by_all("run.full_state_dict()"):
            return self._full_state_dict(rank0_only=rank0_only, trainable_only=trainable_only)

    def _full_state_dict(self, *, rank0_only: bool, trainable_only: bool) -> dict[str, Any]:
        wanted = self._runtime.world.is_first or not rank0_only
        found: dict[str, Any] = {}
        tied: dict[int, torch.Tensor] = {}
        entries = self._model.state_dict(keep_vars=True)
        for name, value in self.iter_full_state(trainable_only=trainable_only):
            if not wanted:
                continue
            if not isinstance(value, torch.Tensor):
                found[name] = copy.deepcopy(value)  # a module's extra state
                continue
            key = id(entries[name])
            if key not in tied:
                tied[key] = value.detach().to("cpu", copy=True).contiguous()
            found[name] = tied[key]
        return {name: found[name] for name in entries if name in found}

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` would be if the optimizer had never been sharded: whole states, on the CPU.

        Rank 0 has it, other ranks get an empty dict. It is streamed Unit by Unit, also from host memory and disk. A plain
        optimizer with the same groups loads it. All ranks must call.
        """
        if self._optimizer is None:
            raise ConfigError("full_optimizer_state_dict() needs the optimizer that was given to shard().")
        with called_by_all("run.full_optimizer_state_dict()"):
            return plain_state_dict(self._runtime, self._survivors, self._optimizer)

    def grad(self, name: str) -> torch.Tensor | None:
        """The full reduced gradient of a parameter, or None if nothing used it (or it is empty). All ranks must call."""
        self._runtime.gradients.accumulated.require_reduced("run.grad()")
        handle = self._handle(name)
        if not self._runtime.gradients.holds(handle.unit, handle.slot) or handle.unit.layout.slots[handle.slot].is_empty:
            return None
        return _whole(handle, self._runtime.outside.full_grad)

    def iter_grads(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, full reduced gradient or None) of every parameter, one Unit in memory at a time. All ranks must iterate.

        A tensor is only valid until the next one is asked for.
        """
        gradients = self._runtime.gradients
        gradients.accumulated.require_reduced("run.iter_grads()")
        tiles = _Together()
        for unit, names in self._by_unit():
            held = {slot for slot in names if gradients.holds(unit, slot) and not unit.layout.slots[slot].is_empty}
            full = self._runtime.outside.full_grad(unit) if held else None
            for slot, name in names.items():
                place = unit.layout.slots[slot]
                if full is None or slot not in held:
                    if place.start + place.numel == math.prod(place.param_shape):
                        yield name, None
                    continue
                found = tiles.add(name, unit, slot, full_of(unit.held[slot], _param_view(unit, slot, full)))
                if found is not None:
                    yield name, found

    def iter_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full value that the optimizer updates) of every parameter, one Unit at a time. All ranks must iterate."""
        self._runtime.changes.store_written()
        tiles = _Together()
        for unit, names in self._by_unit():
            full = self._survivors.full_masters(unit)
            for slot, name in names.items():
                found = tiles.add(name, unit, slot, full_of(unit.held[slot], _param_view(unit, slot, full)))
                if found is not None:
                    yield name, found

    def _by_unit(self) -> Iterator[tuple[Unit, dict[int, str]]]:
        """Every Unit with the first name of each of its parameters."""
        for unit in self._runtime.units:
            yield unit, {number: slot.name for number, slot in enumerate(unit.layout.slots)}

    def master(self, name: str) -> torch.Tensor:
        """The full value of a parameter that the optimizer updates (fp32 or wider). All ranks must call."""
        self._runtime.changes.store_written()
        return _whole(self._handle(name), self._survivors.full_masters)

    def _handle(self, name: str) -> Handle:
        if name not in self._handles:
            near = difflib.get_close_matches(name, self._handles, n=1)
            raise ModelError(f"no parameter {name!r} in the model{f' (did you mean {near[0]!r}?)' if near else ''}.")
        return self._handles[name]


class _Together:
    """Puts the tiles of parameters together as they come."""

    def __init__(self) -> None:
        self._open: dict[str, torch.Tensor] = {}

    def add(self, name: str, unit: Unit, slot: int, values: torch.Tensor) -> torch.Tensor | None:
        """The parameter's whole value, if these are the last of its values; they come in order."""
        place = unit.layout.slots[slot]
        if place.whole is None:
            return values
        if name not in self._open:
            self._open[name] = torch.empty(place.whole, dtype=values.dtype, device=values.device)
        self._open[name].view(-1)[place.start : place.start + place.numel].copy_(values.reshape(-1))
        return self._open.pop(name) if place.start + place.numel == math.prod(place.whole) else None


def _whole(handle: Handle, vector_of: Callable[[Unit], torch.Tensor]) -> torch.Tensor:
    """One parameter's values out of the full vectors of its Units, in memory of its own."""
    tiles, found = _Together(), None
    for unit, slot in handle.places:
        found = tiles.add("", unit, slot, full_of(unit.held[slot], _param_view(unit, slot, vector_of(unit))))
    assert found is not None
    return found.clone() if handle.unit.layout.slots[handle.slot].whole is None else found


def _param_view(unit: Unit, slot: int, full: torch.Tensor) -> torch.Tensor:
    place = unit.layout.slots[slot]
    return full.as_strided(place.shape, place.stride, full.storage_offset() + place.offset)
