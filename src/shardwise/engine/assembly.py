"""Builds a run: checks the model, the optimizer and the options, then takes over the parameters, one Unit at a time.

Called by `shard`. Before the first Unit is filled only the model's buffers may change: they are broadcast from rank 0.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Reservation, Transport, World, has_pipe, make_transport
from shardwise.config import ShardConfig
from shardwise.engine.adoption import Adoption
from shardwise.engine.agreement import check_ranks_agree, is_copied
from shardwise.engine.answers import Answers
from shardwise.engine.construction import Construction
from shardwise.engine.hooks import attach
from shardwise.engine.lookups import adds_in_place
from shardwise.engine.model_buffers import ModelBuffers, broadcast_from_first
from shardwise.engine.moving_in import moving_in
from shardwise.engine.offload import Offloading
from shardwise.engine.precision import emulates_16_bit, resolve_dtypes
from shardwise.engine.restoring import Restoring
from shardwise.engine.runtime import Runtime
from shardwise.engine.surface import check_methods
from shardwise.engine.threads import share_cores
from shardwise.engine.tiles import Operators
from shardwise.errors import ConfigError, ModelError, ShardwiseError
from shardwise.optim import Adopted, check_optimizer
from shardwise.partition import (
    Blueprint,
    Handle,
    Layout,
    ParamInfo,
    Unit,
    UnitSpec,
    adopt_tiled,
    cut_tiles,
    dense_like,
    find_units,
    flat_values,
    join_small,
    list_params,
    local_of,
    make_layout,
    make_tile_layout,
    part_of,
    storage_stride,
    store,
)
from shardwise.stages import STAGES, Held
from shardwise.tiers import Heap, Ledger, SparePages


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: ShardConfig,
    mesh: DeviceMesh | None,
    admit: Callable[[Sequence[Blueprint]], None],
    also: Mapping[str, object] = types.MappingProxyType({}),
    operators: Operators = types.MappingProxyType({}),
    roles: Mapping[str, str] | None = None,
    stages: Sequence[nn.Module] = (),
) -> Runtime:
    """Partition `model` and `optimizer` in place and return the runtime that drives them.

    `admit` gets all Blueprints before any memory is reserved, and raises if they would not fit. `also`: what else must be the
    same on all ranks; an Exception in place of a value is raised once all ranks know of it, and they raise too. `operators`:
    what can be done to a parameter tile by tile. `roles`: what the dimensions of `mesh` are for; by default their names.
    `stages`: the modules that are called, if `model` is a tree of several.
    """
    try:
        infos, specs = _look_at(model, optimizer, config)
    except ShardwiseError as error:
        if not has_pipe(mesh, roles):
            raise
        # Other stages have other models, with which nothing may be wrong: their ranks must not wait for this one.
        world = World.of(mesh, torch.device(mesh.device_type), roles)  # type: ignore[union-attr]
        check_ranks_agree(world, model, config, [], [], {**also, "model": error}, len(stages))
        raise
    world = World.of(mesh, infos[0].param.device, roles)
    world.limit(config.timeout_s)
    for info in infos:
        part_of(info.name, info.param, _tensor_ranks(world))  # raises if it is divided otherwise
    if config.activations is not None and config.activations.partition is True and world.tensor is None:
        raise ConfigError(
            "Activations(partition=True) divides checkpoints over the 'tensor' dimension of the mesh, and "
            f"{'no mesh was given' if mesh is None else 'the mesh has none'}. Pass a mesh with one, or the process group of "
            "ranks with equal checkpoints: partition=group."
        )
    check_ranks_agree(world, model, config, infos, specs, {**also, "model": None}, len(stages))
    moving = moving_in(optimizer, infos, world, streams=not config.offload.is_idle)
    world.threads = share_cores(world)
    broadcast_from_first(model, world)
    ledger = Ledger()
    offload = Offloading(config.offload, world, ledger)
    emulated = _emulated(world, config)
    blueprints = offload.decide([_draw(index, spec, model, world, config, emulated) for index, spec in enumerate(specs)])
    admit(blueprints)
    offload.place(optimizer)
    transport, memory = make_transport(
        config.transport, world, [_reservation(unit) for unit in blueprints], config.exchange_bytes, config.timeout_s
    )
    offload.meet_peers(transport)
    prefetch_bytes = _prefetch_bytes(config, blueprints, transport, offload)
    spare_pages = _spare_pages(world, blueprints, ledger) if prefetch_bytes else None
    answers = Answers()
    units: list[Unit] = []
    constructions = _constructions(infos)
    heap = Heap()
    for blueprint, spec, vector in zip(blueprints, specs, memory, strict=True):
        held = [info.param for info in spec.infos]
        unit = Unit(
            blueprint,
            model.get_submodule(spec.module_path),
            held if spec.rows is None else [_tile_param(blueprint, held[0])],
            answers,
            ledger,
            vector,
            full=transport.overlay(blueprint.index, vector) if blueprint.can_overlay else None,
            spare_pages=spare_pages,
            held=held,
        )
        with offload.on_device(unit, keeps_changes=True, is_new=True):
            _fill_unit(unit, spec)
        units.append(unit)
        if spec.rows is not None and spec.rows[1] == held[0].shape[0]:
            _adopt_tiled(held[0], units)
        heap.freed(unit.full_bytes)
    while constructions:
        constructions.pop().release()
    heap.give_back()
    transport.fence()  # no rank reads shards that a slower one is still filling
    adoption = Adoption(offload)
    runtime = Runtime(
        units,
        world,
        STAGES[config.stage],
        transport,
        offload,
        ModelBuffers(model, world, is_local=config.buffers == "local"),
        ledger,
        adoption=adoption,
        needs_scaling=config.precision.loss_scale is not None,
        prefetch_bytes=prefetch_bytes,
        spare_pages=spare_pages,
        operators=operators,
    )
    answers.begin(runtime)
    if optimizer is not None:
        take_over = functools.partial(offload.take_over, {unit.index: unit for unit in units})
        if moving is not None:
            moving.clear()
        adoption.adopted = Adopted(optimizer, units, runtime, take_over, _mark(runtime))
        if moving is not None:
            moving.partition(Restoring(runtime, optimizer, moving), units)
    attach(model, runtime, units, config.methods, stages)
    return runtime


def _look_at(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: ShardConfig
) -> tuple[list[ParamInfo], list[UnitSpec]]:
    """Check the model and the optimizer, and assign every parameter to a Unit. Nothing is changed."""
    infos = _check_model(model)
    _number_constructed(infos)
    check_methods(model, config.methods)
    specs = find_units(model, config.units, config.max_unit_bytes)
    if config.units is None:
        specs = join_small(specs, min(config.min_unit_bytes, config.max_unit_bytes))
    if config.tiling is not None:
        specs = cut_tiles(specs, config.tiling.max_bytes)
        _check_tiled(specs)
    if optimizer is not None:
        check_optimizer(optimizer, infos)
    return infos, specs


def _prefetch_bytes(config: ShardConfig, blueprints: Sequence[Blueprint], transport: Transport, offload: Offloading) -> int:
    """How many bytes may be gathered ahead of their use: 0 if all parameters stay full or gathers take no time."""
    sizes = [unit.full_bytes for unit in blueprints if not unit.is_always_full]
    if not sizes or not (transport.gathers_ahead or offload.offloads_params):
        return 0
    if config.prefetch_bytes is not None:
        return config.prefetch_bytes
    return max(sizes)


def _spare_pages(world: World, blueprints: Sequence[Blueprint], ledger: Ledger) -> SparePages | None:
    if world.device.type != "cpu":
        return None
    return SparePages(max(unit.full_bytes for unit in blueprints if not unit.is_always_full), ledger)


def _mark(runtime: Runtime) -> dict[str, int]:
    """Identifies the Pieces that an optimizer's states belong to; checked when a state dict is loaded."""
    layout = repr([(unit.span, [update.bounds for update in unit.pieces], unit.layout.slots) for unit in runtime.units])
    return {
        "rank": runtime.world.shard.rank,
        "world_size": runtime.world.shard.size,
        "stage": runtime.stage.number,
        "layout": zlib.crc32(layout.encode()),
    }


def _number_constructed(infos: Sequence[ParamInfo]) -> None:
    """Number Units that were built under sharded_init in the order of the model's parameters, the same on every rank."""
    by_owner: dict[Construction, dict[Unit, str]] = {}
    for info in infos:
        handle = getattr(info.param, "_shardwise", None)
        if handle is not None:
            by_owner.setdefault(handle.unit.owner, {}).setdefault(handle.unit, info.name)
    for owner, units in by_owner.items():
        owner.number(list(units), list(units.values()))


def _constructions(infos: Sequence[ParamInfo]) -> set[Construction]:
    """The Constructions of parameters that were built under sharded_init."""
    return {info.param._shardwise.unit.owner for info in infos if hasattr(info.param, "_shardwise")}


def _check_model(model: nn.Module) -> list[ParamInfo]:
    if not isinstance(model, nn.Module):
        raise ModelError(f"shard() was given a {type(model).__name__}; a torch.nn.Module is needed.")
    infos = list_params(model)
    for info in infos:
        handle = getattr(info.param, "_shardwise", None)
        if handle is not None and not handle.unit.owner.allows_optimizer:
            raise ModelError(f"parameter {info.name!r} belongs to a model that is sharded already.")
        if info.param.is_meta:
            raise ModelError(
                f"parameter {info.name!r} is on the meta device and has no values. Build the model under sw.sharded_init() "
                "instead: it needs no more memory than the shards."
            )
        if not info.param.is_floating_point():
            raise ModelError(
                f"parameter {info.name!r} has dtype {info.param.dtype}; only floating parameters can be partitioned. "
                "Register it as a buffer."
            )
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ModelError(
                f"{path!r} is an embedding with sparse=True; its gradients cannot be reduced into flat shards. Use sparse=False."
            )
    _refuse_overlaps(model, infos)
    devices = {info.param.device for info in infos}
    if len(devices) > 1:
        raise ModelError(f"parameters are on several devices ({', '.join(map(str, devices))}); move the model to one.")
    return infos


def _refuse_overlaps(model: nn.Module, infos: Sequence[ParamInfo]) -> None:
    """Raise if a parameter shares memory with another tensor: after sharding it would not. Tied ones must be one Parameter."""
    params = {info.name for info in infos}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if not buffer.is_meta]
    places = []
    for name, tensor in [*((info.name, info.param) for info in infos), *buffers]:
        if not hasattr(tensor, "_shardwise") and local_of(tensor).numel() and tensor.layout == torch.strided:
            local = local_of(tensor)
            start = local.data_ptr()
            extent = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
            places.append((start, start + extent * local.element_size(), name))
    places.sort()
    reaches: dict[bool, tuple[int, str]] = {}  # of parameters and of buffers: the largest end so far, and whose it is
    for start, end, other in places:
        is_param = other in params
        before = [
            reaches[kind] for kind in ((True, False) if is_param else (True,)) if kind in reaches and start < reaches[kind][0]
        ]
        reaches[is_param] = max(reaches.get(is_param, (0, "")), (end, other))
        if not before:
            continue
        name = before[0][1]
        if not {name, other} <= params:
            raise ModelError(
                f"{name!r} and {other!r} are a parameter and a buffer over the same memory; after sharding the buffer would not "
                "follow the parameter. Read the parameter instead, or give the buffer a copy (`.clone()`)."
            )
        raise ModelError(
            f"parameters {name!r} and {other!r} are two Parameters over the same memory (tied through .data). Tie them as one, "
            "as in `module.weight = other.weight`, before the optimizer is built."
        )


def _emulated(world: World, config: ShardConfig) -> bool:
    """Whether any rank's CPU emulates the stored dtype: one answer for all ranks."""
    dtype = config.precision.param
    mine = dtype is not None and config.precision.compute is None and emulates_16_bit(world.device.type, dtype)
    flag = torch.tensor([int(mine)], device=world.device)
    return bool(world.all_reduce(flag, torch.distributed.ReduceOp.MAX).item())


def _draw(index: int, spec: UnitSpec, model: nn.Module, world: World, config: ShardConfig, emulated: bool) -> Blueprint:
    """The Blueprint of a Unit; what is offloaded is decided later."""
    first = spec.infos[0].param
    stage = STAGES[config.stage]
    holders = [[model.get_submodule(name.rpartition(".")[0]) for name in info.names] for info in spec.infos]
    dtypes = resolve_dtypes(first.dtype, config.precision, emulated)
    if spec.rows is not None:
        layout = make_tile_layout(spec.infos[0].name, first.shape, spec.rows, dtypes.stored.itemsize, world.shard.size)
    else:
        layout = _lay_out(spec, dtypes.stored.itemsize, world)
    return Blueprint(
        index=index,
        name=spec.name,
        path=spec.module_path,
        joined_paths=spec.joined_paths,
        layout=layout,
        rank=world.shard.rank,
        dtypes=dtypes,
        device=first.device,
        is_trainable=spec.is_trainable,
        is_always_full=stage.params is Held.FULL,
        updates_full=stage.states is Held.FULL,
        shared_numel=max((slot.numel for slot, i in zip(layout.slots, spec.infos, strict=True) if len(i.names) > 1), default=0),
        tile_of="" if spec.rows is None else spec.infos[0].name,
        adds_in_place=stage.params is Held.SHARD and adds_in_place(model.get_submodule(spec.module_path), holders),
    )


def _tensor_ranks(world: World) -> list[int]:
    """The global ranks of this rank's dimension of tensor parallelism."""
    return [] if world.tensor is None or world.tensor.group is None else dist.get_process_group_ranks(world.tensor.group)


def _lay_out(spec: UnitSpec, itemsize: int, world: World) -> Layout:
    """The layout of a Unit: of parameters that tensor parallelism has divided, of this rank's part."""
    parts = [part_of(info.name, info.param, _tensor_ranks(world)) for info in spec.infos]
    places = []
    for info, part in zip(spec.infos, parts, strict=True):
        shape, stride = tuple(local_of(info.param).shape), storage_stride(info.param.shape, info.param.stride())
        places.append((info.name, shape, stride if part is None else dense_like(shape, part.stride)))
    layout = make_layout(places, itemsize, world.shard.size)
    slots = [
        dataclasses.replace(slot, part=part, is_copy=is_copied(info.param, world))
        for slot, info, part in zip(layout.slots, spec.infos, parts, strict=True)
    ]
    return dataclasses.replace(layout, slots=tuple(slots))


def _reservation(unit: Blueprint) -> Reservation:
    names = tuple(slot.name for slot in unit.layout.slots)
    return Reservation(
        unit.index, unit.name, unit.reserved_numel, unit.dtypes.stored, unit.holds_alias, names, unit.offloads_shard
    )


def _fill_unit(unit: Unit, spec: UnitSpec) -> None:
    """Copy the parameters' values into the Unit, and free the parameters' own memory (of a tiled one: with its last tile)."""
    for slot, info in enumerate(spec.infos):
        place = unit.layout.slots[slot]
        store(unit, slot, _values_of(info, place.stride)[place.start : place.start + place.numel])
    unit.adopt()


def _check_tiled(specs: Sequence[UnitSpec]) -> None:
    """Raise for tiled parameters with hooks on their gradients: they would never get a whole one."""
    for info in (spec.infos[0] for spec in specs if spec.rows is not None):
        if info.param._backward_hooks or info.param._post_accumulate_grad_hooks:
            raise ModelError(
                f"parameter {info.name!r} has a hook on its gradient and would be cut into tiles, whose gradients are reduced "
                "one by one: the hook would never get a whole one. Remove the hook, or raise Tiling(max_bytes=...)."
            )


def _tile_param(blueprint: Blueprint, whole: nn.Parameter) -> nn.Parameter:
    """What autograd sees of one tile; no module holds it."""
    blank = torch.empty(0, dtype=blueprint.dtypes.compute, device=blueprint.device)
    return nn.Parameter(blank, requires_grad=whole.requires_grad)


def _adopt_tiled(param: nn.Parameter, units: Sequence[Unit]) -> None:
    """Take over a parameter when its last tile is filled."""
    own = [unit for unit in units if unit.held[0] is param]
    handle = Handle(own[0], 0, keeps_unit=False)
    for unit in own[1:]:
        handle.join(unit, 0)
    adopt_tiled(param, handle)


def _values_of(info: ParamInfo, stride: tuple[int, ...]) -> torch.Tensor:
    """A parameter's full value, gathered from its construction shard if it was built under sharded_init."""
    handle = getattr(info.param, "_shardwise", None)
    if handle is None:
        return flat_values(info.param, stride)
    values: torch.Tensor = handle.unit.owner.full_values(handle.unit, handle.slot)
    return values
