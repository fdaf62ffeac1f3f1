"""Assigns every parameter of a model to a Unit, automatically or by the user's rule. It only reads the module tree.

Repeated blocks in containers become Units. A parameter that several modules share is placed at their nearest common
ancestor. A huge parameter outside the blocks gets its own Unit. All other parameters form a Unit at the model's root or, if
that would be larger than `max_unit_bytes`, at its children. Small Units are joined, because a Unit costs time whatever its size.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.config import UnitRule
from shardwise.errors import ConfigError, ModelError
from shardwise.partition.layout import cut_rows, is_row_major, storage_stride
from shardwise.partition.raw import even_numel, is_dtensor

HUGE_SHARE = 0.5
"""A parameter outside the blocks gets its own Unit if it is at least this fraction of the largest block ..."""
HUGE_BYTES = 1 << 20
"""... and at least this many bytes."""
HUGE_BYTES_WITHOUT_BLOCKS = 16 << 20
"""The size from which a parameter gets its own Unit in a model without blocks."""


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """One distinct parameter, with all names under which modules hold it."""

    names: tuple[str, ...]
    param: nn.Parameter
    scope: str
    """Path of the nearest module that contains every holder."""

    @property
    def name(self) -> str:
        """The name under which `named_parameters()` lists it."""
        return self.names[0]

    @property
    def num_bytes(self) -> int:
        """Size in the parameter's own dtype; of a DTensor, of the largest local tensor."""
        return even_numel(self.param) * self.param.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class UnitSpec:
    """What a Unit will consist of."""

    name: str
    module_path: str
    infos: tuple[ParamInfo, ...]
    is_trainable: bool
    joined_paths: tuple[str, ...] = ()
    """The modules that open it, if it was joined."""
    rows: tuple[int, int] | None = None
    """If it is one tile of its only parameter: which rows."""

    @property
    def num_bytes(self) -> int:
        """Size in the parameters' own dtype."""
        return sum(info.num_bytes for info in self.infos)


def list_params(model: nn.Module) -> list[ParamInfo]:
    """Every distinct parameter in `named_parameters()` order."""
    names: dict[int, list[str]] = defaultdict(list)
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
        params[id(param)] = param
    return [
        ParamInfo(tuple(found), params[key], _common_ancestor([n.rpartition(".")[0] for n in found]))
        for key, found in names.items()
    ]


def find_units(model: nn.Module, rule: UnitRule | None, max_unit_bytes: int) -> list[UnitSpec]:
    """Assign every parameter to exactly one Unit, in the order in which the parameters are registered."""
    infos = list_params(model)
    if not infos:
        raise ModelError(f"{type(model).__name__} has no parameters: there is nothing to shard.")
    blocks = _blocks_by_rule(model, rule) if rule is not None else _blocks_by_shape(model, infos, max_unit_bytes)
    groups: dict[str, list[ParamInfo]] = defaultdict(list)
    rest: list[ParamInfo] = []
    for info in infos:
        block = _nearest(blocks, info.scope)
        (rest if block is None else groups[block]).append(info)
    largest = max((sum(i.num_bytes for i in group) for group in groups.values()), default=0)
    huge_bytes = max(HUGE_BYTES, int(largest * HUGE_SHARE)) if groups else HUGE_BYTES_WITHOUT_BLOCKS
    alone = [info for info in rest if info.num_bytes >= huge_bytes]
    rest = [info for info in rest if info.num_bytes < huge_bytes]
    specs = [spec for path, group in groups.items() for spec in _split_by_type(path or "root", path, group)]
    specs += [spec for info in alone for spec in _split_by_type(info.name, info.scope, [info])]
    for path, group in _place_rest(model, "", rest, max_unit_bytes):
        specs += _split_by_type(path or "root", path, group)
    order = {info.name: position for position, info in enumerate(infos)}
    return sorted(specs, key=lambda spec: order[spec.infos[0].name])


def join_small(specs: Sequence[UnitSpec], min_unit_bytes: int) -> list[UnitSpec]:
    """Join small Units, in order, up to `min_unit_bytes` together. Units of another dtype, and frozen ones, are joined apart.

    A joined Unit is opened by each module whose Unit it was made of; the only joined Unit of a model by the model's forward too.
    """
    open_groups: dict[tuple[torch.dtype, bool], list[UnitSpec]] = {}
    groups: list[list[UnitSpec]] = []
    for spec in specs:
        kind = (spec.infos[0].param.dtype, spec.is_trainable)
        group = open_groups.get(kind)
        if group is None or sum(member.num_bytes for member in group) + spec.num_bytes > min_unit_bytes:
            group = open_groups[kind] = []
            groups.append(group)
        group.append(spec)
    is_only = sum(len(group) > 1 for group in groups) == 1
    return [group[0] if len(group) == 1 else _joined(group, is_only=is_only) for group in groups]


def cut_tiles(specs: Sequence[UnitSpec], max_bytes: int) -> list[UnitSpec]:
    """Cut every matrix above `max_bytes` into tiles, each a Unit of its own in front of the Unit that it was in.

    Vectors are never cut. A parameter is cut between its rows; raises if one row is larger than a tile may be, or if rows do not
    lie one after the other.
    """
    found: list[UnitSpec] = []
    for spec in specs:
        large = {info.name: info for info in spec.infos if info.param.dim() > 1 and info.num_bytes > max_bytes}
        for info in large.values():
            for low, high in _rows_of_tiles(info, max_bytes):
                found.append(UnitSpec(f"{info.name}[{low}:{high}]", info.scope, (info,), spec.is_trainable, rows=(low, high)))
        rest = tuple(info for info in spec.infos if info.name not in large)
        if rest:
            found.append(dataclasses.replace(spec, infos=rest))
    return found


def _rows_of_tiles(info: ParamInfo, max_bytes: int) -> list[tuple[int, int]]:
    if is_dtensor(info.param):
        raise ModelError(
            f"Tiling(max_bytes={max_bytes}): parameter {info.name!r} takes {info.num_bytes} bytes on this rank and is divided by "
            "tensor parallelism, which tiles cannot be made of. Raise max_bytes, or divide it over more ranks."
        )
    shape, stride = tuple(info.param.shape), tuple(info.param.stride())
    if not is_row_major(shape, storage_stride(shape, stride)):
        raise ModelError(
            f"Tiling(max_bytes={max_bytes}): parameter {info.name!r} of shape {list(shape)} takes {info.num_bytes} bytes and its "
            f"rows do not lie one after the other (strides {list(stride)}), so that it cannot be cut between them. Store it "
            "contiguously (`param.data = param.data.contiguous()` before sw.shard()), or raise max_bytes."
        )
    row_bytes = info.num_bytes // shape[0]
    if row_bytes > max_bytes:
        raise ModelError(
            f"Tiling(max_bytes={max_bytes}): one row of parameter {info.name!r} of shape {list(shape)} takes {row_bytes} bytes, "
            f"and a row cannot be cut. Use max_bytes of at least {row_bytes}."
        )
    return cut_rows(shape[0], row_bytes, max_bytes)


def _joined(specs: Sequence[UnitSpec], *, is_only: bool) -> UnitSpec:
    return UnitSpec(
        name=f"{specs[0].name} to {specs[-1].name}",
        module_path="",
        infos=tuple(info for spec in specs for info in spec.infos),
        is_trainable=specs[0].is_trainable,
        joined_paths=tuple(dict.fromkeys([*([""] if is_only else []), *(spec.module_path for spec in specs)])),
    )


def _blocks_by_rule(model: nn.Module, rule: UnitRule) -> set[str]:
    def matches(module: nn.Module) -> bool:
        if isinstance(rule, (type, tuple)):
            return isinstance(module, rule)
        return bool(rule(module))

    blocks = {path for path, module in model.named_modules() if matches(module)}
    if not blocks:
        found = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(f"units={rule!r} matches no module of the model; its classes are {', '.join(found)}.")
    return blocks


def _blocks_by_shape(model: nn.Module, infos: list[ParamInfo], max_unit_bytes: int) -> set[str]:
    sizes: dict[str, int] = defaultdict(int)
    for info in infos:
        for path in _ancestors(info.scope):
            sizes[path] += info.num_bytes
    blocks: set[str] = set()

    def visit(path: str, module: nn.Module) -> None:
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        for child_path, child in children:
            if not sizes.get(child_path):
                continue
            is_block = _is_repeated(module, child, sizes, children)
            if is_block and (sizes[child_path] <= max_unit_bytes or not _has_sized_children(child_path, child, sizes)):
                blocks.add(child_path)
            else:
                visit(child_path, child)

    visit("", model)
    return blocks


def _is_repeated(parent: nn.Module, child: nn.Module, sizes: dict[str, int], siblings: list[tuple[str, nn.Module]]) -> bool:
    alike = sum(1 for path, other in siblings if type(other) is type(child) and sizes.get(path))
    is_container = isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    return is_container and alike >= 2


def _has_sized_children(path: str, module: nn.Module, sizes: dict[str, int]) -> bool:
    return any(sizes.get(f"{path}.{name}") for name, _ in module.named_children())


def _place_rest(model: nn.Module, path: str, rest: list[ParamInfo], max_unit_bytes: int) -> list[tuple[str, list[ParamInfo]]]:
    if not rest:
        return []
    module = model.get_submodule(path)
    children = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
    inside = {child: [i for i in rest if child in _ancestors(i.scope)] for child in children}
    if sum(i.num_bytes for i in rest) <= max_unit_bytes or not any(inside.values()):
        return [(path, rest)]
    placed = {i.name for group in inside.values() for i in group}
    own = [i for i in rest if i.name not in placed]
    result = [(path, own)] if own else []
    for child, group in inside.items():
        result += _place_rest(model, child, group, max_unit_bytes)
    return result


def _split_by_type(name: str, path: str, infos: list[ParamInfo]) -> list[UnitSpec]:
    groups: dict[tuple[torch.dtype, bool], list[ParamInfo]] = defaultdict(list)
    for info in infos:
        groups[(info.param.dtype, info.param.requires_grad)].append(info)
    dtypes = {dtype for dtype, _ in groups}
    trains = {trainable for _, trainable in groups}
    specs = []
    for (dtype, trainable), group in groups.items():
        suffix = f":{str(dtype).removeprefix('torch.')}" if len(dtypes) > 1 else ""
        suffix += ":frozen" if len(trains) > 1 and not trainable else ""
        specs.append(UnitSpec(name + suffix, path, tuple(group), trainable))
    return specs


def _ancestors(path: str) -> list[str]:
    """The path itself and every module above it, nearest first; the root is ''."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _nearest(blocks: set[str], scope: str) -> str | None:
    return next((path for path in _ancestors(scope) if path in blocks), None)


def _common_ancestor(paths: list[str]) -> str:
    split = [path.split(".") if path else [] for path in paths]
    common = split[0]
    for parts in split[1:]:
        length = 0
        while length < min(len(common), len(parts)) and common[length] == parts[length]:
            length += 1
        common = common[:length]
    return ".".join(common)
