"""What a checkpoint is made of and loaded into: a run's parts, and the state that is not in parameters."""

from __future__ import annotations

import dataclasses
import random
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from shardwise.checkpoint.matching import persistent_buffers
from shardwise.comm import World
from shardwise.engine import Runtime, Survivors
from shardwise.errors import CheckpointError, ConfigError
from shardwise.partition import Layout

RNG_ENTRY = "rng."
"""Prefix of the entries with the states of random generators, one set per rank."""

_Result = TypeVar("_Result")
_BYTES_PER_PARAMETER, _SLOW_BYTES_PER_S = 16, 10e6


Described = tuple[Layout, torch.dtype, bool]
"""What a manifest says of a Unit: its layout, the parameters' dtype, and whether they are trained."""


class Part(NamedTuple):
    """What one part of the model (of a pipeline, or of tensor parallelism) contributes to a checkpoint, besides its vectors."""

    units: list[Described]
    others: dict[str, Any]

    @staticmethod
    def of(subject: Subject) -> Part:
        """This rank's part."""
        units = [(unit.layout, unit.dtypes.original, unit.is_trainable) for unit in subject.runtime.units]
        return Part(units, subject.others())


def merged(others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`Subject.others` of all parts of the model: buffers and extra state of all stages of a pipeline, the rest of the first."""
    first = others[0]
    for other in others[1:]:
        if other["optimizer"] != first["optimizer"] or len(other["groups"] or ()) != len(first["groups"] or ()):
            raise CheckpointError(
                f"ranks with other parts of the model have other optimizers: {first['optimizer']} with "
                f"{len(first['groups'] or ())} groups, and {other['optimizer']} with {len(other['groups'] or ())}. Give all of "
                "them the same optimizer, with the same groups."
            )
    joined = {kind: {key: value for other in reversed(others) for key, value in other[kind].items()} for kind in _BY_NAME}
    return {**first, **joined}


_BY_NAME = ("buffers", "extra_state")


@dataclasses.dataclass
class Subject:
    """A run, as checkpoints see it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    runtime: Runtime
    survivors: Survivors
    scaler: torch.amp.GradScaler
    _ids: list[str] = dataclasses.field(default_factory=list)
    _world: World | None = None

    def next_save_id(self) -> str:
        """An id that no other save has, the same on every rank; ranks communicate for the first one only."""
        if not self._ids:
            self._ids.append(self.runtime.world.whole.gather_objects(uuid.uuid4().hex)[0])
        self._ids.append(f"{self._ids[0]}-{len(self._ids)}")
        return self._ids[-1]

    def finish_saving(self) -> None:
        """Wait for a save in the background; raise if it failed, on all ranks unless all have raised before. All must call."""
        unsaved, self.runtime.offload.unsaved = self.runtime.offload.unsaved, None
        if unsaved is None:
            return
        unsaved.has_ended_within(None)
        if unsaved.failure is not None:
            ((was_told, _),) = self.runtime.changes.agree_on([int(unsaved.was_told)])
            unsaved.was_told = True
            if not was_told:
                raise unsaved.failure

    @property
    def everyone(self) -> World:
        """All ranks of the run, which may take differently long to read or write: at least 10 MB/s are expected of each."""
        numel = sum(unit.layout.shard_numel for unit in self.runtime.units)
        return self.runtime.world.whole.patient(numel * _BYTES_PER_PARAMETER / _SLOW_BYTES_PER_S)

    def world_of_saving(self) -> World:
        """The same ranks, with a process group of their own, for the saving thread. All ranks must call."""
        if self._world is None:
            self._world = self.everyone.twin()
        return self._world

    def others(self) -> dict[str, Any]:
        """State that is the same on every rank: counters, hyperparameters, loss scale, buffers, extra state of modules."""
        groups = None
        if self.optimizer is not None:
            groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        return {
            "num_skipped_steps": self.runtime.num_skipped_steps,
            "optimizer": None if self.optimizer is None else type(self.optimizer).__name__,
            "groups": groups,
            "scaler": self.scaler.state_dict(),
            "buffers": dict(self.buffers()),
            "extra_state": {name: module.get_extra_state() for name, module in self._with_extra_state()},
        }

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that a state dict contains."""
        return persistent_buffers(self.model)

    def names_elsewhere(self) -> set[str]:
        """Names of parameters and buffers that only other stages of the pipeline have. All ranks must call."""
        mine = {name for name, _ in [*self.model.named_parameters(remove_duplicate=False), *self.buffers()]}
        pipe = self.runtime.world.pipe
        return set() if pipe is None else set().union(*pipe.gather_objects(mine)) - mine

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, module

    @staticmethod
    def malformed(others: dict[str, Any]) -> str:
        """Why `others` cannot have been made by `others()` and a save; empty if it can."""
        kinds: dict[str, Any] = {
            "num_skipped_steps": int,
            "optimizer": (str, type(None)),
            "groups": (list, type(None)),
            "scaler": dict,
            "buffers": dict,
            "extra_state": dict,
            "scheduler": (dict, type(None)),
            "extra": dict,
        }
        for key, kind in kinds.items():
            if not isinstance(others.get(key, ...), kind):
                return f"{key!r} is missing or of another type"
        if not all(isinstance(group, dict) and "params" not in group for group in others["groups"] or ()):
            return "'groups' has something else than settings"
        if not all(isinstance(buffer, torch.Tensor) for buffer in others["buffers"].values()):
            return "'buffers' has something else than tensors"
        return ""

    def problems(self, others: dict[str, Any]) -> Iterator[str]:
        """What of `others()` of a saved run does not fit this one."""
        here = dict(self.buffers())
        saved_names = others["buffers"].keys() if self.runtime.world.pipe is None else ()  # other stages have the others
        for name in sorted(here.keys() | saved_names):
            mine, saved = here.get(name), others["buffers"].get(name)
            if mine is None or saved is None:
                yield f"buffer {name!r} is {'only in the checkpoint' if mine is None else 'not in the checkpoint'}"
            elif mine.shape != saved.shape or mine.dtype != saved.dtype:
                yield f"buffer {name!r} is {list(saved.shape)} {saved.dtype} there, {list(mine.shape)} {mine.dtype} here"
        if self.optimizer is not None and others["groups"] is not None:
            kind, number = type(self.optimizer).__name__, len(self.optimizer.param_groups)
            if others["optimizer"] != kind:
                yield f"the optimizer is {others['optimizer']} there, {kind} here"
            if len(others["groups"]) != number:
                yield f"the optimizer has {len(others['groups'])} groups there, {number} here"

    def restore(self, others: dict[str, Any]) -> None:
        """Put `others()` of a saved run back."""
        self.runtime.num_skipped_steps = others["num_skipped_steps"]
        if self.optimizer is not None and others["groups"] is not None:
            for group, saved in zip(self.optimizer.param_groups, others["groups"], strict=True):
                group.update(saved)
        if others["scaler"]:
            self.scaler.load_state_dict(others["scaler"])
        with torch.no_grad():
            for name, buffer in self.buffers():
                if name in others["buffers"]:
                    buffer.copy_(others["buffers"][name])
        for name, module in self._with_extra_state():
            if name in others["extra_state"]:
                module.set_extra_state(others["extra_state"][name])


def file_number(world: World) -> int:
    """The number of the data file that this rank writes: part by part of the model, shard by shard."""
    return world.model.rank * world.shard.size + world.shard.rank


def try_together(world: World, attempt: Callable[[], _Result], what: str) -> Sequence[_Result | None]:
    """Run `attempt` on every rank and return all results; if it fails on any, raise CheckpointError on all: `what` came of it,
    and the first rank's error.
    """
    try:
        outcome = world.try_together(attempt, Exception)  # any error: the other ranks must not wait for this one
    except RuntimeError as error:  # of torch.distributed
        raise CheckpointError(f"{what}: the ranks could not meet. {error}") from error
    if outcome.first is None:
        return outcome.results
    rank, text = outcome.first
    if isinstance(outcome.problem, (CheckpointError, ConfigError)) and str(outcome.problem) == text:
        raise outcome.problem
    raise CheckpointError(f"{what}. Rank {rank}: {text}") from outcome.problem


def require_same_path(paths: Sequence[str | None], verb: str) -> None:
    """Raise if ranks were given different paths; None stands for no checkpoint."""
    for rank, path in enumerate(paths):
        if path != paths[0]:
            raise CheckpointError(
                f"ranks {verb} different paths: rank 0 {verb} {paths[0] or 'none'}, rank {rank} {verb} {path or 'none'}. Give "
                "all ranks the same path, on a file system that all hosts share; a relative one depends on a rank's directory."
            )


def rng_states() -> dict[str, torch.Tensor]:
    """The states of this rank's random generators, as bytes, by the key of their entry."""
    found = {f"{RNG_ENTRY}torch": torch.get_rng_state()}
    version, words, gauss = random.getstate()
    packed = torch.tensor([version, *words], dtype=torch.int64)
    found[f"{RNG_ENTRY}python"] = packed.view(torch.uint8)
    found[f"{RNG_ENTRY}gauss"] = torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64).view(torch.uint8)
    if "numpy" in sys.modules:
        _, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        found[f"{RNG_ENTRY}numpy"] = torch.tensor([position, has_gauss, *map(int, keys)], dtype=torch.int64).view(torch.uint8)
        found[f"{RNG_ENTRY}numpy-gauss"] = torch.tensor([cached], dtype=torch.float64).view(torch.uint8)
    if torch.cuda.is_initialized():
        found[f"{RNG_ENTRY}cuda"] = torch.cuda.get_rng_state()
    return found


def of_all_replicas(world: World, generators: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The states of this rank's generators and, under keys of their own, of the other ranks that hold the same shard.

    All of these must call.
    """
    if world.across is None:
        return generators
    replicas = world.across.gather_objects(generators)
    return {replica_key(key, number): value for number, theirs in enumerate(replicas) for key, value in theirs.items()}


def replica_key(key: str, replica: int) -> str:
    """The key of an entry of random generators in the file of a shard; the first replica's is the entry's own."""
    return key if replica == 0 else f"{RNG_ENTRY}{replica}-{key.removeprefix(RNG_ENTRY)}"


def restore_rng_states(read: Callable[[str], torch.Tensor | None]) -> None:
    """Put random generators back; `read` returns an entry, or None if there is none."""
    own, packed, gauss, cuda = (read(RNG_ENTRY + name) for name in ("torch", "python", "gauss", "cuda"))
    numbers, cached = read(f"{RNG_ENTRY}numpy"), read(f"{RNG_ENTRY}numpy-gauss")
    try:
        if own is not None:
            torch.set_rng_state(own)
        if packed is not None and gauss is not None:
            version, *words = packed.view(torch.int64).tolist()
            (value,) = gauss.view(torch.float64).tolist()
            random.setstate((version, tuple(words), None if value != value else value))
        if numbers is not None and cached is not None and "numpy" in sys.modules:
            position, has_gauss, *keys = numbers.view(torch.int64).tolist()
            sys.modules["numpy"].random.set_state(("MT19937", keys, position, has_gauss, cached.view(torch.float64).item()))
        if cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(cuda)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the states of random generators in the checkpoint cannot be used: {error}") from None
