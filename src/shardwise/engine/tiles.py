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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.engine.lookups import Rows
from shardwise.engine.nested import map_tensors
from shardwise.errors import MemoryBudgetError, ModelError
from shardwise.partition import (
    COLLECTIVES,
    REQUIRES_GRAD,
    TiledParameter,
    TiledRow,
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
from shardwise.tiers import Kind, checksum, device_tier

if TYPE_CHECKING:
    from shardwise.engine.runtime import Runtime

_TRANSPOSES = frozenset({"t", "T", "mT", "transpose", "swapaxes", "swapdims"})
_ROW_VIEWS = _TRANSPOSES | frozenset(
    {"__getitem__", "select", "narrow", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "expand"}
)
"""Operations that see a row of a tiled parameter otherwise."""
_ARRAYS = frozenset({"numpy", "__array__"})

_will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)


class Tile:
    """One tile of a parameter, in one operation."""

    def __init__(self, runtime: Runtime, unit: Unit, recorded: TiledParameter | None = None) -> None:
        """`recorded`: the parameter, if autograd records operations on it."""
        self.low = _first_row(unit)
        """Its first row in the parameter."""
        self.high = _end_row(unit)
        """One past its last row."""
        self._runtime, self._unit, self._recorded = runtime, unit, recorded

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return self.high - self.low

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """`function(tile, *inputs)` while the tile is gathered. Its backward gathers it again, and frees it when it has ended."""
        runtime, unit = self._runtime, self._unit
        leaf = unit.params[0]
        if unit.is_always_full:
            return function(self._seen(leaf), *inputs)
        if torch.is_grad_enabled():  # an input of its own: when that has its gradient, the tile's backward has ended
            inputs = tuple(i.view_as(i) if isinstance(i, torch.Tensor) and i.requires_grad else i for i in inputs)
        entries, output = ((unit, (0,)),), None
        try:
            replaced = runtime.enter(entries, (inputs, {}))
            inputs = inputs if replaced is None else replaced[0]
            output = function(self._seen(leaf), *inputs)
        finally:
            runtime.leave(entries, output)
        return output

    def _seen(self, leaf: torch.Tensor) -> torch.Tensor:
        if self._recorded is None:
            return leaf.detach()
        if not torch.is_grad_enabled() or not leaf.requires_grad:
            return leaf
        linked: torch.Tensor = _Link.apply(self._recorded, leaf, weakref.ref(self._runtime), weakref.ref(self._unit))  # type: ignore[no-untyped-call]
        return linked


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
        self._copies: list[_Copy] = []  # copies that user code may hold views of
        self._shown: dict[int, torch.Tensor] = {}  # what parameters show inside run.gathered, by id
        # A parameter holds its AccumulateGrad node weakly: without these references the hooks would be lost.
        self._nodes = [_listen(param, own, runtime) for param, own in self.params]

    def operate(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation that has met a tiled parameter."""
        view = _view_of(name, args, kwargs)
        if view is not None:
            return view
        if any(isinstance(leaf, TiledRow) for leaf in tree_flatten((args, kwargs))[0]):
            return self._operate_row(func, name, args, kwargs)
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
        tiles = [Tile(self._runtime, unit, param if has_history else None) for unit in units]
        is_trained = has_history and torch.is_grad_enabled() and param.requires_grad
        return Tiled(tiles, param.shape, is_transposed, _Attach(self._runtime, param, units) if is_trained else None)

    def describe(self) -> list[str]:
        """Lines for the report: how many tiles there are, and which operations needed a whole parameter."""
        if not self.params:
            return []
        num_tiles = sum(len(units) for _, units in self.params)
        lines = [f"tiling: {len(self.params)} parameters in {num_tiles} tiles"]
        for (label, name), count in self.gathered_whole.items():
            lines.append(f"{name} cannot run tile by tile: {label} was copied whole {count} times")
        return lines

    # -- one row ----------------------------------------------------------------------------------------------

    def _operate_row(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on a row of a parameter while the tile that has it is gathered. Other rows follow, inside that."""
        leaves, spec = tree_flatten((args, kwargs))
        at = next(number for number, leaf in enumerate(leaves) if isinstance(leaf, TiledRow))
        row: TiledRow = leaves[at]
        unit = next(unit for unit, _ in row.param._shardwise.places if _first_row(unit) <= row.row < _end_row(unit))
        is_tiled = [isinstance(leaf, (TiledRow, TiledParameter, TiledView)) for leaf in leaves]

        def run(tile: torch.Tensor, *inputs: Any) -> Any:
            shown = row.seen(tile[row.row - _first_row(unit)])
            now = [leaf if skips else given for leaf, given, skips in zip(leaves, inputs, is_tiled, strict=True)]
            now = [shown if value is row else value for value in now]
            own_args, own_kwargs = tree_unflatten(now, spec)
            if any(isinstance(value, (TiledRow, TiledParameter, TiledView)) for value in now):
                result = self.operate(func, name, own_args, own_kwargs)
            else:
                result = func(*own_args, **own_kwargs)
            return row if result is shown else map_tensors(lambda tensor: self._apart(tensor, tile, row), result)

        tile, is_outside = unit.params[0], self._runtime.is_outside
        version = tile._version
        inputs = [None if skips else leaf for leaf, skips in zip(leaves, is_tiled, strict=True)]
        result = Tile(self._runtime, unit, row.param if row.has_history else None).run(run, *inputs)
        if tile._version != version and is_outside and not unit.is_always_full:
            self._runtime.gathering.settle()
            self._runtime.changes.store([unit])
        return result

    def _apart(self, tensor: torch.Tensor, tile: torch.Tensor, row: TiledRow) -> torch.Tensor:
        """A result that can be kept when the tile is freed: of a view without history, a copy that must not be written to."""
        if tensor is row or tensor.grad_fn is not None or not _share_memory(tensor, tile):
            return tensor
        copied = tensor.clone()
        self._watch(copied, row._shardwise.unit.blueprint.tile_of)
        return copied

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

        args, kwargs = map_leaves(args, real), map_leaves(kwargs, real)
        marks = [checksum(whole) for _, whole, _ in copies.values()] if name.startswith(COLLECTIVES) else []
        result = func(*args, **kwargs)
        is_written = [whole._version != version for _, whole, version in copies.values()]
        if marks:  # collectives count no versions, and some write on some ranks only: all ranks store what any has changed
            found = [int(checksum(whole) != mark) for mark, (_, whole, _) in zip(marks, copies.values(), strict=True)]
            is_written = [bool(high) for _, high in self._runtime.changes.agree_on(found)]
        for has_changed, (param, whole, _) in zip(is_written, copies.values(), strict=True):
            if has_changed:
                self._write(param, whole, name)
        if name in _ARRAYS:
            result.flags.writeable = False  # a write to the copy would not reach the parameter

        def checked(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in given:  # operations in place return their target
                return given[id(tensor)][1]
            if self._runtime.is_outside and tensor.grad_fn is None:
                for param, whole, _ in copies.values():
                    if _share_memory(tensor, whole):
                        raise refusal(param, "a view of a tiled parameter")
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
        try:
            whole: torch.Tensor = _Whole.apply(self._runtime, units, param.shape, *(unit.params[0] for unit in units))  # type: ignore[no-untyped-call]
        except BaseException:
            ledger.release(tier, Kind.BUFFER, num_bytes)
            raise
        weakref.finalize(whole, ledger.release, tier, Kind.BUFFER, num_bytes).atexit = False
        self.gathered_whole[label, name] = self.gathered_whole.get((label, name), 0) + 1
        self._watch(whole, label)
        return whole

    def _watch(self, copied: torch.Tensor, label: str) -> None:
        """Notice writes to a copy through views of it, for as long as there are any."""
        self._copies = [copy for copy in self._copies if copy.is_held or copy.is_written]
        self._copies.append(_Copy(copied, label))

    def _write(self, param: TiledParameter, whole: torch.Tensor, name: str) -> None:
        """Write a changed copy back to the tiles."""
        self._copies = [copy for copy in self._copies if not copy.is_of(whole)]
        if whole.requires_grad:
            raise RuntimeError(f"a leaf Variable that requires grad is being used in an in-place operation ({name}).")
        runtime, is_outside = self._runtime, self._runtime.is_outside
        units = [unit for unit, _ in param._shardwise.places]
        self._watch(whole, units[0].blueprint.tile_of)
        for unit in units:
            tile = Tile(runtime, unit)
            with torch.no_grad():
                tile.run(lambda leaf, unit=unit: unit.params[0].copy_(_rows(whole, unit)))
        if is_outside and not units[0].is_always_full:
            runtime.gathering.settle()
            runtime.changes.store(units)

    def check_copies(self) -> None:
        """Raise if user code has written to a copy through a view of it: that would be lost."""
        written = next((copy for copy in self._copies if copy.is_written), None)
        if written is not None:
            self._copies.clear()
            raise ModelError(
                f"a view of parameter {written.label!r} was written to. It is cut into tiles, and the view is one of a temporary "
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
            wholes = [(own_data(param), self._shown.pop(id(param)), own) for param, own in mine]
            for (param, _), blank in zip(mine, blanks, strict=True):
                conceal(param, blank)
            for whole, old, own in wholes:
                if whole.shape != old.shape or whole.dtype != old.dtype or whole.device != old.device:
                    raise ModelError(
                        f"parameter {own[0].blueprint.tile_of!r} was replaced by a tensor of shape {list(whole.shape)} and dtype "
                        f"{whole.dtype}; it has shape {list(old.shape)} and dtype {old.dtype}. No change of tiled parameters was "
                        "stored."
                    )
            for whole, _, own in wholes:
                for unit in own:
                    rows, now = _rows(whole, unit), own_data(unit.params[0])
                    if not bool(((rows == now) | (rows.isnan() & now.isnan())).all()):
                        with torch.no_grad():
                            unit.params[0].copy_(rows)


class _Copy:
    """A copy that user code may hold views of. Holds its version, and none of its memory."""

    def __init__(self, copied: torch.Tensor, label: str) -> None:
        self.label = label
        self._storage = StorageWeakRef(copied.untyped_storage())
        self._probe = copied.detach()  # shares the version
        with torch.no_grad():
            self._probe.data = torch.empty(0, dtype=copied.dtype, device=copied.device)
        self._version = copied._version

    @property
    def is_written(self) -> bool:
        """Whether the copy was written to since."""
        return self._probe._version != self._version

    @property
    def is_held(self) -> bool:
        """Whether anything still holds its memory."""
        return not self._storage.expired()

    def is_of(self, copied: torch.Tensor) -> bool:
        """Whether this is about `copied`."""
        return bool(self._storage.cdata == copied.untyped_storage()._cdata)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() > 0 and one.untyped_storage()._cdata == other.untyped_storage()._cdata


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
    return whole[_first_row(unit) : _end_row(unit)]


def _first_row(unit: Unit) -> int:
    """A tile's first row in its parameter."""
    slot = unit.layout.slots[0]
    return slot.start // max(slot.numel // max(slot.shape[0], 1), 1)


def _end_row(unit: Unit) -> int:
    """One past a tile's last row in its parameter."""
    return _first_row(unit) + unit.layout.slots[0].shape[0]


def _seen(value: TiledParameter | TiledView) -> tuple[TiledParameter, bool, bool]:
    """The parameter, whether it was met transposed, and whether autograd records."""
    if isinstance(value, TiledView):
        return value.param, value.is_transposed, value.has_history
    return value, False, True


def _view_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of an operation that only sees the parameter otherwise; None if it is another one."""
    if args and isinstance(args[0], TiledRow):
        return _view_of_row(args[0], name, args[1:], kwargs)
    if not args or not isinstance(args[0], (TiledParameter, TiledView)):
        return None
    param, is_transposed, has_history = _seen(args[0])
    if name == "__getitem__" and not is_transposed:
        return _row(param, args[1], has_history=has_history)
    if name == "detach":
        return TiledView.of(param, is_transposed=is_transposed, has_history=False)
    if name not in _TRANSPOSES or param.dim() != 2:
        return None
    dims = (*args[1:], *kwargs.values())
    if dims and not (len(dims) == 2 and all(isinstance(d, int) and -2 <= d < 2 for d in dims) and dims[0] % 2 != dims[1] % 2):
        return None
    if is_transposed and has_history:
        return param
    return TiledView.of(param, is_transposed=not is_transposed, has_history=has_history)


def _row(param: TiledParameter, index: Any, *, has_history: bool) -> TiledRow | None:
    """`param[index]` for one number; None for anything else."""
    if isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype == torch.int64:
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or not -param.shape[0] <= index < param.shape[0]:
        return None
    return TiledRow.of(param, index % param.shape[0], has_history=has_history)


def _view_of_row(row: TiledRow, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TiledRow | None:
    """A view of a row; None if the operation is another one, or depends on other tensors."""
    if name == "detach":
        return row.detached()
    if name not in _ROW_VIEWS or any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten((args, kwargs))[0]):
        return None
    if name in ("T", "mT"):
        return row.viewed(lambda tensor: getattr(tensor, name))
    return row.viewed(lambda tensor: getattr(tensor, name)(*args, **kwargs))


class _Whole(torch.autograd.Function):
    """A copy of all tiles, as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, units: Sequence[Unit], shape: torch.Size, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.lengths = [unit.layout.slots[0].shape[0] for unit in units]
        whole = torch.empty(shape, dtype=units[0].dtypes.compute, device=units[0].blueprint.device)
        for unit in units:
            Tile(runtime, unit).run(lambda leaf, unit=unit: _rows(whole, unit).copy_(leaf))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, *grad.split(ctx.lengths)


class _Attach:
    """Attaches a node to rows that were looked up tile by tile."""

    def __init__(self, runtime: Runtime, param: TiledParameter, units: Sequence[Unit]) -> None:
        self._runtime, self._param, self._units = runtime, param, units

    def __call__(self, values: torch.Tensor, indices: torch.Tensor, padding: int) -> torch.Tensor:
        found: torch.Tensor = _Lookup.apply(self._param, values, indices, padding, weakref.ref(self._runtime), self._units)  # type: ignore[no-untyped-call]
        return found


class _Link(torch.autograd.Function):
    """A tile as a part of its parameter: `backward(inputs=[parameter])` reaches it, and then gets its gradient from here."""

    @staticmethod
    def forward(
        ctx: Any, param: torch.Tensor, leaf: torch.Tensor, runtime: weakref.ref[Runtime], unit: weakref.ref[Unit]
    ) -> torch.Tensor:
        ctx.runtime, ctx.unit = runtime, unit
        ctx.node = torch.autograd.graph.get_gradient_edge(leaf).node if _will_execute is not None else None
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        runtime, unit = ctx.runtime(), ctx.unit()
        if _will_execute is not None and runtime is not None and unit is not None and not _will_execute(ctx.node):
            runtime.receive(unit, grad.detach())
        return None, grad, None, None


class _Lookup(torch.autograd.Function):
    """Rows of a tiled table. Backward hands their gradient over as it is, and makes no gradient of the table's size."""

    @staticmethod
    def forward(
        ctx: Any,
        param: torch.Tensor,
        values: torch.Tensor,
        indices: torch.Tensor,
        padding: int,
        runtime: weakref.ref[Runtime],
        units: Sequence[Unit],
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.mark_dirty(values)  # nobody else has them; a view of them could not be changed in place by the model
        ctx.padding, ctx.runtime, ctx.units = padding, runtime, [weakref.ref(unit) for unit in units]
        return values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        runtime = ctx.runtime()
        if runtime is not None:
            (indices,) = ctx.saved_tensors
            flat, rows = indices.reshape(-1), grad.detach().reshape(indices.numel(), *grad.shape[indices.dim() :])
            for unit in (reference() for reference in ctx.units):
                if unit is not None:
                    low, high = _first_row(unit), _end_row(unit)
                    mine = ((flat >= low) & (flat < high)).nonzero().squeeze(-1)
                    padding = ctx.padding - low if low <= ctx.padding < high else -1
                    runtime.receive(unit, Rows(flat[mine] - low, rows[mine], high - low, padding))
        return None, None, None, None, None, None
