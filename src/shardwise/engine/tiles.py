"""Runs operations on parameters that are cut into tiles: tile by tile, or on a temporary copy of the whole.

Called by `Answers` when an operation meets a tiled parameter. Which operations can be done tile by tile, and how, is written in
the room `tiling/`; here a tile is gathered, used and freed, in forward and backward, as a module's Unit is. A copy of the whole
is written back if user code has changed it. The reasons are in `docs/decisions/0022-tiles.md`.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.engine.lookups import Rows
from shardwise.engine.nested import map_tensors
from shardwise.errors import MemoryBudgetError, ModelError
from shardwise.partition import (
    REQUIRES_GRAD,
    TiledParameter,
    TiledView,
    Unit,
    conceal,
    flat_values,
    is_overwrite,
    map_leaves,
    own_data,
    refusal,
    reveal,
    store,
)
from shardwise.tiers import Kind, device_tier

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime

_TRANSPOSES = frozenset({"t", "T", "mT", "transpose", "swapaxes", "swapdims"})


class Tile:
    """One tile of a parameter, in one operation."""

    def __init__(self, runtime: Runtime, unit: Unit, *, has_history: bool) -> None:
        slot = unit.layout.slots[0]
        self.low = slot.start // max(slot.numel // max(slot.shape[0], 1), 1)
        """Its first row in the parameter."""
        self.high = self.low + slot.shape[0]
        """One past its last row."""
        self._runtime, self._unit, self._has_history = runtime, unit, has_history

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return self.high - self.low

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """`function(tile, *inputs)` while the tile is gathered. Its backward gathers it again, and frees it when it has ended."""
        runtime, unit = self._runtime, self._unit
        leaf = unit.params[0]
        if unit.is_always_full:
            return function(leaf if self._has_history else leaf.detach(), *inputs)
        if torch.is_grad_enabled():  # an input of its own: when that has its gradient, the tile's backward has ended
            inputs = tuple(i.view_as(i) if isinstance(i, torch.Tensor) and i.requires_grad else i for i in inputs)
        entries, output = ((unit, (0,)),), None
        try:
            replaced = runtime.enter(entries, (inputs, {}))
            inputs = inputs if replaced is None else replaced[0]
            output = function(leaf if self._has_history else leaf.detach(), *inputs)
        finally:
            runtime.leave(entries, output)
        return output


class Tiled(NamedTuple):
    """A tiled parameter, or a view of one, as an operation meets it."""

    tiles: Sequence[Tile]
    shape: torch.Size
    """Of the parameter itself, also if a transposed view was met."""
    is_transposed: bool
    attach: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None
    """Attach a node to looked-up rows (values, indices, padding index) that hands their gradient over; None if frozen."""

    def cut(self, tensor: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
        """Split a tensor as rows are cut into tiles."""
        parts: Sequence[torch.Tensor] = torch.split(tensor, [tile.num_rows for tile in self.tiles], dim)
        return parts


Find = Callable[[Any], Tiled | None]
"""What an argument of an operation is: None if it is no tiled parameter."""
Operators = Mapping[str, Callable[..., Any]]
"""Operations that can be done tile by tile, by name: called with a `Find` and the operation's own arguments. They return
NotImplemented for arguments with which it cannot be done so."""


class Tiles:
    """The tiled parameters of one run."""

    def __init__(self, runtime: Runtime, units: Sequence[Unit], operators: Operators) -> None:
        self._runtime = runtime
        self._operators = {name: (function, inspect.signature(function)) for name, function in operators.items()}
        found: dict[int, tuple[nn.Parameter, list[Unit]]] = {}
        for unit in units:
            if unit.blueprint.tile_of:
                found.setdefault(id(unit.held[0]), (unit.held[0], []))[1].append(unit)
        self.params = list(found.values())
        """Every tiled parameter with the Units of its tiles, in order."""
        self.gathered_whole: dict[tuple[str, str], int] = {}
        """How often an operation needed a copy of a whole parameter: (parameter, operation) to count."""
        self._copies: list[tuple[weakref.ref[torch.Tensor], int, str]] = []  # copies that may be alive, and their versions
        self._shown: dict[int, torch.Tensor] = {}  # what parameters show inside run.gathered, by id
        # A parameter holds its AccumulateGrad node weakly: without these references the hooks would be lost.
        self._nodes = [_listen(param, own, runtime) for param, own in self.params]

    def operate(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation that has met a tiled parameter."""
        view = _view_of(name, args, kwargs)
        if view is not None:
            return view
        if name == "copy_" and self._runtime.outside.is_loading and isinstance(args[0], TiledParameter):
            self._store(args[0], args[1])
            return args[0]
        if name in self._operators:
            function, signature = self._operators[name]
            try:
                signature.bind(self._find, *args, **kwargs)
            except TypeError:
                return self._operate_whole(func, name, args, kwargs)
            result = function(self._find, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._operate_whole(func, name, args, kwargs)

    def _find(self, value: Any) -> Tiled | None:
        if not isinstance(value, (TiledParameter, TiledView)):
            return None
        param, is_transposed, has_history = _seen(value)
        units = [unit for unit, _ in param._shardwise.places]
        tiles = [Tile(self._runtime, unit, has_history=has_history) for unit in units]
        is_trained = has_history and torch.is_grad_enabled() and param.requires_grad
        return Tiled(tiles, param.shape, is_transposed, _Attach(self._runtime, units) if is_trained else None)

    def describe(self) -> list[str]:
        """Lines for the report: how many tiles there are, and which operations needed a whole parameter."""
        if not self.params:
            return []
        num_tiles = sum(len(units) for _, units in self.params)
        lines = [f"tiling: {len(self.params)} parameters in {num_tiles} tiles"]
        for (label, name), count in self.gathered_whole.items():
            lines.append(f"{name} cannot run tile by tile: {label} was copied whole {count} times")
        return lines

    # -- copies of the whole ----------------------------------------------------------------------------------

    def _operate_whole(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies: dict[tuple[int, bool], tuple[TiledParameter, torch.Tensor, int]] = {}
        given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what the operation gets, and for what
        is_new = is_overwrite(func, name)  # `torch.nn.init` records nothing

        def real(value: Any) -> Any:
            if not isinstance(value, (TiledParameter, TiledView)):
                return value
            param, _, has_history = _seen(value)
            key = id(param), has_history and not is_new
            if key not in copies:
                with contextlib.nullcontext() if key[1] else torch.no_grad():
                    whole = self._copy(param, name)
                copies[key] = param, whole, whole._version
            whole = copies[key][1]
            shown = value.seen(whole) if isinstance(value, TiledView) else whole
            given[id(shown)] = shown, value
            return shown

        result = func(*map_leaves(args, real), **map_leaves(kwargs, real))
        for param, whole, version in copies.values():
            if whole._version != version:
                self._write(param, whole, name)
        is_outside = self._runtime.is_outside

        def checked(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in given:  # operations in place return their target
                return given[id(tensor)][1]
            if is_outside and not tensor.requires_grad and tensor.numel():
                for param, whole, _ in copies.values():
                    if tensor.untyped_storage()._cdata == whole.untyped_storage()._cdata:
                        raise refusal(param, "a view")
            return tensor

        return map_tensors(checked, result)

    def _copy(self, param: TiledParameter, name: str) -> torch.Tensor:
        """A copy of the whole parameter, with autograd's record."""
        units = [unit for unit, _ in param._shardwise.places]
        first = units[0]
        num_bytes = param.numel() * first.dtypes.compute.itemsize
        ledger, tier, label = self._runtime.ledger, device_tier(first.blueprint.device), first.blueprint.tile_of
        try:
            ledger.reserve(tier, Kind.BUFFER, num_bytes)
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"{name} on parameter {label!r} (shape {list(param.shape)}): this operation cannot run tile by tile, and a copy "
                f"of the whole parameter does not fit. {error}"
            ) from error
        whole: torch.Tensor = _Whole.apply(self._runtime, units, param.shape, *(unit.params[0] for unit in units))  # type: ignore[no-untyped-call]
        weakref.finalize(whole, ledger.release, tier, Kind.BUFFER, num_bytes).atexit = False
        self.gathered_whole[label, name] = self.gathered_whole.get((label, name), 0) + 1
        self._copies = [entry for entry in self._copies if entry[0]() is not None]
        self._copies.append((weakref.ref(whole), whole._version, label))
        return whole

    def _write(self, param: TiledParameter, whole: torch.Tensor, name: str) -> None:
        """Write a changed copy back to the tiles."""
        self._copies = [entry for entry in self._copies if entry[0]() is not whole]
        if whole.requires_grad:
            raise RuntimeError(f"a leaf Variable that requires grad is being used in an in-place operation ({name}).")
        runtime, is_outside = self._runtime, self._runtime.is_outside
        units = [unit for unit, _ in param._shardwise.places]
        self._copies.append((weakref.ref(whole), whole._version, units[0].blueprint.tile_of))
        for unit in units:
            tile = Tile(runtime, unit, has_history=False)
            with torch.no_grad():
                tile.run(lambda leaf, unit=unit: unit.params[0].copy_(_rows(whole, unit)))
        if is_outside and not units[0].is_always_full:
            runtime.gathering.settle()
            runtime.changes.store(units)

    def check_copies(self) -> None:
        """Raise if user code has written to a copy through a view of it: that would be lost."""
        for copy, version, label in self._copies:
            whole = copy()
            if whole is not None and whole._version != version:
                self._copies.clear()
                raise ModelError(
                    f"a view of parameter {label!r} was written to. It is cut into tiles, and the view is one of a temporary "
                    "copy, so that the change would be lost. Write through the parameter itself, or inside run.gathered(module)."
                )

    def _store(self, param: TiledParameter, value: torch.Tensor) -> None:
        """While a state dict is loaded: store a new value in shards and masters."""
        for unit, slot in param._shardwise.places:
            place = unit.layout.slots[slot]
            flat = flat_values(value.detach().to(unit.blueprint.device), place.stride)[place.start : place.start + place.numel]
            with self._runtime.offload.on_device(unit, keeps_changes=True):
                store(unit, slot, flat)

    # -- run.gathered -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shown(self, units: Sequence[Unit]) -> Iterator[None]:
        """Inside the context tiled parameters whose Units are all gathered show a copy of the whole, written back at its end."""
        chosen = {unit.index for unit in units}
        mine = [(p, own) for p, own in self.params if own[0].index in chosen and id(p) not in self._shown]
        with torch._C.DisableTorchFunctionSubclass():
            blanks = [own_data(param) for param, _ in mine]
        for param, own in mine:
            whole = torch.cat([own_data(unit.params[0]) for unit in own])
            self._shown[id(param)] = whole
            reveal(param, whole)
        try:
            yield
        finally:
            for (param, own), blank in zip(mine, blanks, strict=True):
                whole, old = own_data(param), self._shown.pop(id(param))
                is_fitting = whole.shape == old.shape and whole.dtype == old.dtype and whole.device == old.device
                conceal(param, blank)
                if not is_fitting:
                    raise ModelError(
                        f"parameter {own[0].blueprint.tile_of!r} was replaced by a tensor of shape {list(whole.shape)} and dtype "
                        f"{whole.dtype}; it has shape {list(old.shape)} and dtype {old.dtype}. Nothing of it was stored."
                    )
                for unit in own:
                    rows, now = _rows(whole, unit), own_data(unit.params[0])
                    if not bool(((rows == now) | (rows.isnan() & now.isnan())).all()):
                        with torch.no_grad():
                            unit.params[0].copy_(rows)


def _listen(param: nn.Parameter, units: Sequence[Unit], runtime: Runtime) -> torch.autograd.graph.Node:
    """Divide a gradient that arrives for the whole parameter (a graph built inside run.gathered) among its tiles."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        is_frozen = not REQUIRES_GRAD.__get__(param)
        if is_frozen:
            REQUIRES_GRAD.__set__(param, True)
        node = torch.autograd.graph.get_gradient_edge(param).node
        if is_frozen:
            REQUIRES_GRAD.__set__(param, False)
    node.register_prehook(_Divide(runtime, units))
    return node


class _Divide:
    """The prehook of a whole parameter's AccumulateGrad node."""

    def __init__(self, runtime: Runtime, units: Sequence[Unit]) -> None:
        self._runtime = weakref.ref(runtime)
        self._units = [weakref.ref(unit) for unit in units]

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[None]:
        runtime, grad = self._runtime(), grads[0]
        if runtime is not None and grad is not None:
            for reference in self._units:
                unit = reference()
                if unit is not None:
                    runtime.receive(unit, _rows(grad.detach(), unit))
        return (None,)


def _rows(whole: torch.Tensor, unit: Unit) -> torch.Tensor:
    """A tile's rows of a tensor with the shape of the whole parameter."""
    slot = unit.layout.slots[0]
    low = slot.start // max(slot.numel // max(slot.shape[0], 1), 1)
    return whole[low : low + slot.shape[0]]


def _seen(value: TiledParameter | TiledView) -> tuple[TiledParameter, bool, bool]:
    """The parameter, whether it was met transposed, and whether autograd records."""
    if isinstance(value, TiledView):
        return value.param, value.is_transposed, value.has_history
    return value, False, True


def _view_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of an operation that only sees the parameter otherwise; None if it is another one."""
    if not args or not isinstance(args[0], (TiledParameter, TiledView)):
        return None
    param, is_transposed, has_history = _seen(args[0])
    if name == "detach":
        return TiledView.of(param, is_transposed=is_transposed, has_history=False)
    if name not in _TRANSPOSES or param.dim() != 2:
        return None
    dims = (*args[1:], *kwargs.values())
    if dims and not (len(dims) == 2 and all(isinstance(d, int) for d in dims) and {d % 2 for d in dims} == {0, 1}):
        return None
    if is_transposed and has_history:
        return param
    return TiledView.of(param, is_transposed=not is_transposed, has_history=has_history)


class _Whole(torch.autograd.Function):
    """A copy of all tiles, as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, units: Sequence[Unit], shape: torch.Size, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.lengths = [unit.layout.slots[0].shape[0] for unit in units]
        whole = torch.empty(shape, dtype=units[0].dtypes.compute, device=units[0].blueprint.device)
        for unit in units:
            Tile(runtime, unit, has_history=False).run(lambda leaf, unit=unit: _rows(whole, unit).copy_(leaf))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, *grad.split(ctx.lengths)


class _Attach:
    """Attaches a node to rows that were looked up tile by tile."""

    def __init__(self, runtime: Runtime, units: Sequence[Unit]) -> None:
        self._runtime, self._units = runtime, units

    def __call__(self, values: torch.Tensor, indices: torch.Tensor, padding: int) -> torch.Tensor:
        anchor = torch.zeros((), dtype=values.dtype, device=values.device, requires_grad=True)  # so that autograd calls backward
        found: torch.Tensor = _Lookup.apply(anchor, values, indices, padding, weakref.ref(self._runtime), self._units)  # type: ignore[no-untyped-call]
        return found


class _Lookup(torch.autograd.Function):
    """Rows of a tiled table. Backward hands their gradient over as it is, and makes no gradient of the table's size."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        values: torch.Tensor,
        indices: torch.Tensor,
        padding: int,
        runtime: weakref.ref[Runtime],
        units: Sequence[Unit],
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.padding, ctx.runtime, ctx.units = padding, runtime, [weakref.ref(unit) for unit in units]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        runtime = ctx.runtime()
        if runtime is not None:
            (indices,) = ctx.saved_tensors
            flat, rows = indices.reshape(-1), grad.detach().reshape(indices.numel(), *grad.shape[indices.dim() :])
            for unit in (reference() for reference in ctx.units):
                if unit is not None:
                    slot = unit.layout.slots[0]
                    low = slot.start // max(slot.numel // max(slot.shape[0], 1), 1)
                    mine = ((flat >= low) & (flat < low + slot.shape[0])).nonzero().squeeze(-1)
                    padding = ctx.padding - low if low <= ctx.padding < low + slot.shape[0] else -1
                    runtime.receive(unit, Rows(flat[mine] - low, rows[mine], slot.shape[0], padding))
        return None, None, None, None, None, None
