"""What was asked for? Frozen, keyword-only dataclasses that are checked when they are made.

An option is honoured or an error is raised; no option is adjusted silently. Nothing here touches a process group, a file or a
tensor.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.stages import STAGES, Held

_T = TypeVar("_T")
UnitRule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MASTERS = (torch.float64, torch.float32)
MAX_TIMEOUT_S = 30 * 24 * 3600.0
"""One month. Longer waits would overflow the timers of the libraries used here."""
BUFFERS = ("broadcast", "local")
TRANSPORTS = ("auto", "shared", "combined", "pairwise", "reference", "nccl")


def _naming_its_options(cls: type[_T]) -> type[_T]:
    """Make a dataclass raise on an unknown option and suggest the nearest name."""
    make = cls.__init__

    @functools.wraps(make)
    def checked(self: _T, **options: Any) -> None:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__} has no option {name!r}{_nearest(name, known)}; its options are {', '.join(known)}."
                )
        make(self, **options)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


@_naming_its_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling: multiply by `growth` after `interval` steps without overflow, by `backoff` after an overflow."""

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if self.initial <= 0 or self.minimum <= 0:
            raise ConfigError(f"LossScale: initial={self.initial} and minimum={self.minimum} must be positive.")
        if self.growth <= 1 or not 0 < self.backoff < 1:
            raise ConfigError(
                f"LossScale: found growth={self.growth}, backoff={self.backoff}; growth must exceed 1 and backoff "
                "lie between 0 and 1."
            )
        if self.interval < 1:
            raise ConfigError(f"LossScale: interval={self.interval} must be at least 1 step.")


@_naming_its_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of stored parameters, compute, reductions and masters. By default they follow the parameter's own dtype."""

    param: torch.dtype | None = None
    """Dtype of the stored shards, in which a gather also sends them. None: the parameter's own."""
    compute: torch.dtype | None = None
    """Dtype of forward and backward. None: `param`, or fp32 where this CPU only emulates 16-bit matrix products."""
    reduce: torch.dtype | None = None
    """Dtype in which a reduction sends gradients; all transports but NCCL sum in fp32 or wider. None: fp32 or wider."""
    master: torch.dtype | None = None
    """Dtype of the values that the optimizer updates, made from the original values, not the stored ones. None: fp32 or wider."""
    loss_scale: LossScale | None = None
    """Dynamic loss scaling; None: no scaling."""

    def __post_init__(self) -> None:
        for field in ("param", "compute", "reduce"):
            value = getattr(self, field)
            if value is not None and value not in _FLOATS:
                raise ConfigError(
                    f"Precision: {field}={value!r} is not a floating dtype; choose one of "
                    f"{', '.join(str(d) for d in _FLOATS)} or a preset 'fp32', 'bf16', 'fp16'."
                )
        if self.master is not None and self.master not in _MASTERS:
            raise ConfigError(f"Precision: master={self.master!r}; masters are kept in fp32 or fp64.")

    @staticmethod
    def of(value: Precision | str | None) -> Precision:
        """A preset name, a Precision, or None (keep the model's own dtypes)."""
        if value is None:
            return Precision()
        if isinstance(value, Precision):
            return value
        if isinstance(value, str) and value in _PRESETS:
            return _PRESETS[value]
        raise ConfigError(
            f"precision={value!r} is not known{_nearest(str(value), _PRESETS)}; use 'fp32', 'bf16', 'fp16' or a "
            "shardwise.Precision."
        )


_PRESETS: dict[str, Precision] = {
    "fp32": Precision(param=torch.float32),
    "bf16": Precision(param=torch.bfloat16),
    "fp16": Precision(param=torch.float16, loss_scale=LossScale()),
}


TIERS = ("device", "host", "disk")


@_naming_its_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Where model states live between their uses: 'device', 'host' or 'disk' for each. On a CPU, device and host are the same."""

    params: str = "device"
    """Stored parameter shards. Below stage 3 parameters are always full and stay on the device."""
    grads: str = "device"
    """Reduced gradient shards."""
    optimizer: str = "device"
    """Moments, and masters where they are separate from the stored parameters."""
    path: str | os.PathLike[str] | None = None
    """Directory on the disk. None: the system's directory for temporary files. Nothing is left there after the run."""
    host_bytes: int | None = None
    """Most bytes of host memory that one rank may use for states and buffers. None: no limit."""
    step_bytes: int = 16 << 20
    """Bytes of each vector (parameters, gradients, each moment) that the streamed optimizer step updates at a time."""
    checks: bool = False
    """Keep a checksum of everything written to disk and compare it when it is read."""

    def __post_init__(self) -> None:
        for field in ("params", "grads", "optimizer"):
            value = getattr(self, field)
            if value not in TIERS:
                raise ConfigError(
                    f"Offload: {field}={value!r} is not a tier{_nearest(str(value), TIERS)}; use 'device', 'host' or 'disk'."
                )
        for field, least in (("host_bytes", 1), ("step_bytes", 1 << 16)):
            value = getattr(self, field)
            if value is None and field == "host_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"Offload: {field}={value!r} must be a whole number of at least {least} bytes.")
        if self.path is not None and not isinstance(self.path, (str, os.PathLike)):
            raise ConfigError(f"Offload: path={self.path!r} must be a directory.")
        if self.path is not None and not self.uses_disk:
            raise ConfigError(f"Offload: path={self.path!r} is given, but nothing is on disk. Use 'disk' for some of the states.")

    @property
    def uses_disk(self) -> bool:
        """Whether anything lives on disk."""
        return "disk" in (self.params, self.grads, self.optimizer)

    def offloaded_kinds(self, *, host_is_apart: bool) -> tuple[str, ...]:
        """Which of 'params', 'grads' and 'optimizer' are offloaded. `host_is_apart`: device and host are two memories."""
        tiers = ("host", "disk") if host_is_apart else ("disk",)
        return tuple(kind for kind in ("params", "grads", "optimizer") if getattr(self, kind) in tiers)

    @property
    def is_idle(self) -> bool:
        """Whether all states are kept on the device."""
        return self.params == self.grads == self.optimizer == "device"

    @staticmethod
    def of(value: Offload | str | None) -> Offload:
        """An Offload, a tier for everything, or None (everything on the device)."""
        if value is None:
            return Offload()
        if isinstance(value, Offload):
            return value
        if isinstance(value, str):
            return Offload(params=value, grads=value, optimizer=value)
        raise ConfigError(f"offload={value!r} must be a shardwise.Offload or one of {', '.join(TIERS)}.")


@_naming_its_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """What is kept from forward to backward, and where."""

    checkpoint: str | int | Callable[[str, nn.Module], bool] | None = "units"
    """Which calls keep their inputs only and are computed again in backward: 'units' (each block that is a Unit), a number k (k
    blocks that follow each other at once), a function of a module's name and the module, or None (none)."""
    offload: str = "device"
    """Where it is kept: 'device', 'host' (one reused range of host memory) or 'disk'. With checkpoint=None: everything large that
    autograd saves."""
    partition: Any = False
    """Ranks with equal checkpoints (tensor parallelism) each keep a part: True for the 'tensor' dimension of the mesh, or their
    process group. False: every rank keeps its own whole."""
    bytes: int | None = None
    """Most bytes of host memory: for 'host' of everything kept there (None: no limit), for 'disk' of what is on its way (None:
    128 MiB)."""
    path: str | os.PathLike[str] | None = None
    """Directory on the disk. None: that of Offload, or the system's for temporary files."""

    def __post_init__(self) -> None:
        rule = self.checkpoint
        if isinstance(rule, bool) or not (rule is None or rule == "units" or callable(rule) or isinstance(rule, int)):
            raise ConfigError(f"Activations: checkpoint={rule!r}; use 'units', a number of blocks, a function, or None.")
        if isinstance(rule, int) and rule < 1:
            raise ConfigError(f"Activations: checkpoint={rule} must be at least 1 block.")
        if self.offload not in TIERS:
            raise ConfigError(
                f"Activations: offload={self.offload!r} is not a tier{_nearest(str(self.offload), TIERS)}; use 'device', 'host' "
                "or 'disk'."
            )
        if not isinstance(self.partition, bool) and not (hasattr(self.partition, "rank") and hasattr(self.partition, "size")):
            raise ConfigError(f"Activations: partition={self.partition!r} must be True, False or a process group.")
        if self.bytes is not None and (isinstance(self.bytes, bool) or not isinstance(self.bytes, int) or self.bytes < 1 << 20):
            raise ConfigError(f"Activations: bytes={self.bytes!r} must be a whole number of at least {1 << 20} bytes.")
        if self.bytes is not None and self.offload == "device":
            raise ConfigError(f"Activations: bytes={self.bytes} is for offload='host' or 'disk'; nothing is moved.")
        if self.path is not None and self.offload != "disk":
            raise ConfigError(f"Activations: path={self.path!r} is given, but offload={self.offload!r}. Use offload='disk'.")
        if rule is None and self.offload == "device" and self.partition is False:
            raise ConfigError(
                "Activations: checkpoint=None and offload='device' keep everything as it is. Leave activations out."
            )

    @staticmethod
    def of(value: Activations | str | int | None) -> Activations | None:
        """An Activations, a value for `checkpoint`, or None."""
        if value is None or isinstance(value, Activations):
            return value
        return Activations(checkpoint=value)


@_naming_its_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Cut large parameters into tiles, each of which is gathered, used, reduced and freed by itself."""

    max_bytes: int
    """Most bytes of a tile. A matrix above this is cut between its rows; vectors never are."""

    def __post_init__(self) -> None:
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or self.max_bytes < 4096:
            raise ConfigError(f"Tiling: max_bytes={self.max_bytes!r} must be a whole number of at least 4096 bytes.")

    @staticmethod
    def of(value: Tiling | int | None) -> Tiling | None:
        """A Tiling, a number for `max_bytes`, or None."""
        if value is None or isinstance(value, Tiling):
            return value
        return Tiling(max_bytes=value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """All options of `shard`."""

    stage: int
    """0 replicates, 1 partitions optimizer states, 2 also gradients, 3 also parameters."""
    precision: Precision = dataclasses.field(default_factory=Precision)
    """Dtypes of storage, compute, reduction and masters."""
    units: UnitRule | None = None
    """Which modules are Units: a class, classes, or a predicate. None: found automatically."""
    max_unit_bytes: int = 256 << 20
    """A Unit larger than this is split, if its module has submodules to split it into."""
    min_unit_bytes: int = 2 << 20
    """Units that are found automatically are joined as long as they are not larger than this together. 0: never joined."""
    exchange_bytes: int = 24 << 20
    """Most bytes of all gradient exchange buffers together. They do not grow with the model."""
    prefetch_bytes: int | None = None
    """Most bytes of full vectors that are prefetched, where gathers take time. None: the largest Unit; 0: no prefetch."""
    methods: tuple[str, ...] = ()
    """Further methods (dotted paths below the model) that count as a forward pass, such as 'encode'."""
    offload: Offload = dataclasses.field(default_factory=Offload)
    """Where model states live between their uses."""
    activations: Activations | None = None
    """What is kept from forward to backward. None: what autograd saves, where it is."""
    tiling: Tiling | None = None
    """Which parameters are cut into tiles. None: none."""
    buffers: str = "broadcast"
    """'broadcast': rank 0's buffers are broadcast after each backward, as under DistributedDataParallel; 'local': each rank keeps
    its own."""
    transport: str = "auto"
    """How ranks communicate: 'auto', or one of the names in `shardwise.config.TRANSPORTS`."""

    timeout_s: float = 600.0
    """How long a rank waits for another before it raises."""

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in STAGES:
            raise ConfigError(
                f"stage={self.stage!r} is not a ZeRO stage; use 0 (replicate), 1 (optimizer states), "
                "2 (and gradients) or 3 (and parameters)."
            )
        for field, least in (("max_unit_bytes", 1), ("min_unit_bytes", 0), ("exchange_bytes", 4096)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{field}={value!r} must be a whole number of at least {least} bytes.")
        ahead = self.prefetch_bytes
        if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0):
            raise ConfigError(f"prefetch_bytes={ahead!r} must be a whole number of bytes, 0 for no prefetch, or None.")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s={self.timeout_s!r} must be a number of seconds above 0, at most {MAX_TIMEOUT_S:g}.")
        if self.buffers not in BUFFERS:
            raise ConfigError(
                f"buffers={self.buffers!r} is not known{_nearest(str(self.buffers), BUFFERS)}; use 'broadcast' (rank 0's, as "
                "DistributedDataParallel does) or 'local'."
            )
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"transport={self.transport!r} is not known{_nearest(self.transport, TRANSPORTS)}; "
                f"use one of {', '.join(TRANSPORTS)}."
            )
        stage = STAGES[self.stage]
        if self.offload.params != "device" and stage.params is Held.FULL:
            raise ConfigError(
                f"Offload(params={self.offload.params!r}) at stage {self.stage}: parameters are whole all the time there and "
                "stay on the device. Use stage=3, or leave params='device'."
            )
        if self.offload.grads != "device" and stage.gathers_grads:
            raise ConfigError(
                f"Offload(grads={self.offload.grads!r}) at stage 0: gradients are whole on every rank there. Use stage 1, 2 or 3."
            )
        if not (self.units is None or _is_rule(self.units)):
            raise ConfigError(
                f"units={self.units!r} must be a module class, a tuple of classes, or a function from a module to bool."
            )

    @staticmethod
    def of(options: dict[str, Any]) -> ShardConfig:
        """Build from keyword options; an unknown name raises an error that suggests the nearest one."""
        known = [field.name for field in dataclasses.fields(ShardConfig)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"shard() has no option {name!r}{_nearest(name, known)}; its options are {', '.join([*known, 'mesh'])}."
                )
        if "stage" not in options:
            raise ConfigError("shard() needs stage=0, 1, 2 or 3.")
        values = dict(options)
        values["precision"] = Precision.of(values.get("precision"))
        values["offload"] = Offload.of(values.get("offload"))
        values["activations"] = Activations.of(values.get("activations"))
        values["tiling"] = Tiling.of(values.get("tiling"))
        methods = values.get("methods", ())
        values["methods"] = (methods,) if isinstance(methods, str) else tuple(methods)
        if isinstance(values.get("units"), list):
            values["units"] = tuple(values["units"])
        return ShardConfig(**values)


def _is_rule(rule: object) -> bool:
    if isinstance(rule, tuple):
        return bool(rule) and all(isinstance(c, type) and issubclass(c, nn.Module) for c in rule)
    if isinstance(rule, type):
        return issubclass(rule, nn.Module)
    return callable(rule)


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""
