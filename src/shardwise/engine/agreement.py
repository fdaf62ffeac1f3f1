"""Do all ranks ask for the same? Compares options, parameters and values over ranks before anything changes.

Called by assembly. Ranks that train the same part of the model must have the same values. Ranks beside them must have the same
parameters on one dimension of tensor parallelism, with the same values where they are not divided; and other parameters on other
stages of a pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.comm import World
from shardwise.config import Activations, ShardConfig
from shardwise.errors import ModelError, RanksDifferError
from shardwise.partition import ParamInfo, UnitSpec, local_of
from shardwise.tiers import checksum


class _Param(NamedTuple):
    """What ranks compare of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    placements: str
    """How tensor parallelism has divided it; empty if it has not."""
    values: int
    """A checksum."""
    is_table: bool
    """Whether an embedding looks rows up in it."""


@dataclasses.dataclass(frozen=True)
class _Brief:
    """What ranks compare."""

    stage: int
    """This rank's number on the dimension of pipeline parallelism, 0 without one."""
    num_stages: int
    part: int
    """The number of the part of the model."""
    options: str
    units: list[tuple[str, list[str]]]
    params: list[_Param]
    also: Mapping[str, object]


class _Failure(NamedTuple):
    """In place of a value: a rank's error, in words."""

    text: str


def check_ranks_agree(
    world: World,
    model: nn.Module,
    config: ShardConfig,
    infos: Sequence[ParamInfo],
    specs: Sequence[UnitSpec],
    also: Mapping[str, object],
    num_stages: int,
) -> None:
    """Compare options, names, shapes and values over all ranks of the run; raise on all of them, naming the first difference.

    `num_stages`: how many pipeline stages this rank holds, if it was given several modules; else 0.
    """
    mine = _Brief(
        stage=0 if world.pipe is None else world.pipe.rank,
        num_stages=num_stages,
        part=world.model.rank,
        options=_options(config),
        units=[(spec.name, [info.name for info in spec.infos]) for spec in specs],
        params=[_param(model, info) for info in infos],
        also={
            what: _Failure(f"{type(found).__name__}: {found}") if isinstance(found, Exception) else found
            for what, found in also.items()
        },
    )
    everyone: list[_Brief] = world.whole.gather_objects(mine)
    for problem in also.values():
        if isinstance(problem, Exception):
            raise problem
    stages: dict[int, tuple[int, _Brief]] = {}  # the first rank of each pipeline stage, with which its other ranks are compared
    parts: dict[int, tuple[int, _Brief]] = {}
    for rank, other in enumerate(everyone):
        if other.options != everyone[0].options:
            raise RanksDifferError(f"rank {rank} asks for {other.options}, rank 0 for {everyone[0].options}.")
        for what, found in other.also.items():
            if isinstance(found, _Failure):
                raise RanksDifferError(f"rank {rank} cannot be sharded, because of its {what}: {found.text}")
        if other.num_stages != everyone[0].num_stages:
            raise RanksDifferError(
                f"rank {rank} was given {other.num_stages or 1} stages of the pipeline, rank 0 {everyone[0].num_stages or 1}. "
                "Every rank must hold equally many: split the model into a multiple of the pipeline's ranks."
            )
        _compare(*stages.setdefault(other.stage, (rank, other)), *parts.setdefault(other.part, (rank, other)), rank, other)
    _compare_stages(list(stages.values()))


def _options(config: ShardConfig) -> str:
    return repr(
        (
            config.stage,
            config.precision,
            config.max_unit_bytes,
            config.min_unit_bytes,
            config.exchange_bytes,
            config.transport,
            config.prefetch_bytes,
            config.buffers,
            config.methods,
            dataclasses.replace(config.offload, path=None),
            _comparable(config.activations),
            config.tiling,
        )
    )


def _comparable(activations: Activations | None) -> object:
    if activations is None:
        return None
    rule = activations.checkpoint
    return "a function" if callable(rule) else rule, activations.offload, activations.partition is not False, activations.bytes


def _param(model: nn.Module, info: ParamInfo) -> _Param:
    holders = [model.get_submodule(name.rpartition(".")[0]) for name in info.names]
    param = info.param
    return _Param(
        info.name,
        tuple(param.shape),
        str(param.dtype),
        param.requires_grad,
        str(tuple(param.placements)) if hasattr(param, "placements") else "",
        _digest_of(info),
        any(isinstance(holder, nn.Embedding) for holder in holders),
    )


def _digest_of(info: ParamInfo) -> int:
    handle = getattr(info.param, "_shardwise", None)
    if handle is not None:
        found: int = handle.unit.owner.digests[handle.unit][handle.slot]
        return found
    return checksum(local_of(info.param))


def _compare(first: int, stage: _Brief, peer: int, part: _Brief, rank: int, other: _Brief) -> None:
    """Compare a rank with the first one of its pipeline stage, and values that are divided with the first one of its part."""
    for what, found in other.also.items():
        if found != stage.also[what]:
            raise RanksDifferError(f"rank {rank} has other {what} than rank {first}: {found} against {stage.also[what]}.")
    for a, b, c in zip(stage.params, other.params, part.params, strict=False):
        for what, ours, theirs in _differences(a, b):
            raise _differ(first, rank, what, a.name, f": {ours} against {theirs}")
        reference, number = (c, peer) if "Shard" in b.placements else (a, first)
        if b.values != reference.values:
            raise _differ(number, rank, "values", b.name, "")
    if len(stage.params) != len(other.params):
        raise RanksDifferError(
            f"rank {first} has {len(stage.params)} parameters, rank {rank} has {len(other.params)}. Ranks with other blocks of "
            "the model must be on a dimension 'pipe' of the mesh."
        )
    if other.units != stage.units:
        raise RanksDifferError(f"rank {rank} found other Units than rank {first}; pass the same units= on every rank.")


def _differences(a: _Param, b: _Param) -> Iterator[tuple[str, Any, Any]]:
    for what in ("name", "shape", "dtype", "requires_grad", "placements"):
        if getattr(a, what) != getattr(b, what):
            yield what, getattr(a, what), getattr(b, what)


def _differ(first: int, rank: int, what: str, name: str, shown: str) -> RanksDifferError:
    return RanksDifferError(
        f"the models of rank {first} and rank {rank} differ in the {what} of parameter {name!r}{shown}. Build the same model on "
        "every rank: the same code, and the same seed (torch.manual_seed) or checkpoint."
    )


def _compare_stages(stages: Sequence[tuple[int, _Brief]]) -> None:
    """Raise if two pipeline stages have a parameter of the same name, or a table and a head that look like a tied one."""
    seen: dict[str, int] = {}
    tables: dict[tuple[tuple[int, ...], int], tuple[int, str]] = {}
    heads: dict[tuple[tuple[int, ...], int], tuple[int, str]] = {}
    for rank, brief in stages:
        for param in brief.params:
            if param.name in seen:
                raise ModelError(
                    f"pipeline stages of ranks {seen[param.name]} and {rank} both have a parameter {param.name!r}: each would "
                    "train its own, and a checkpoint could keep one. Keep the names that modules have in the whole model, and "
                    "give each of them to one stage."
                )
            seen[param.name] = rank
            if len(param.shape) == 2:
                kind, others = (tables, heads) if param.is_table else (heads, tables)
                key = (param.shape, param.values)
                kind.setdefault(key, (rank, param.name))
                if key in others and others[key][0] != rank:
                    (one, name), (two, head) = sorted([others[key], (rank, param.name)])
                    raise ModelError(
                        f"parameter {name!r} (pipeline stage of rank {one}) and {head!r} (rank {two}) have the same values, as "
                        "if they were tied. Split over two stages they would be trained apart. Untie them before the model is "
                        "split (give one of them values of its own), or keep both on one stage."
                    )


def is_copied(param: torch.Tensor, world: World) -> bool:
    """Whether a lower rank of this rank's dimension of tensor parallelism has the same parameter, and counts it in norms."""
    if world.tensor is None or world.tensor.rank == 0:
        return False
    return not any(placement.is_shard() for placement in getattr(param, "placements", ()))
