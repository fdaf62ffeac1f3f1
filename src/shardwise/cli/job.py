"""What `shardwise train` was asked for. Values are checked when a Job is made, before any process exists."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise import errors
from shardwise.config import ShardConfig
from shardwise.testing.models import GPTConfig

SHAPES = {
    "tiny": GPTConfig(layers=4, heads=4, hidden=128, context=256),
    "small": GPTConfig(layers=6, heads=8, hidden=256, context=256),
    "medium": GPTConfig(layers=12, heads=8, hidden=512, context=512),
    "gpt2": GPTConfig(layers=12, heads=12, hidden=768, context=1024),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What `shardwise train` was asked for."""

    size: str = "small"
    """One of `SHAPES`."""
    stage: int = 3
    precision: str = "fp32"
    steps: int = 60
    batch: int = 8
    """Sequences per rank and backward pass."""
    sequence: int = 128
    accumulate: int = 1
    """Backward passes per optimizer step."""
    lr: float = 1e-3
    clip: float | None = None
    """Largest global gradient norm. None: no clipping."""
    seed: int = 0
    ranks: int | None = None
    """Processes to start; None: two, or as many as torchrun started."""
    data: tuple[Path, ...] = ()
    """Text files and directories; none: the source of Python's standard library."""
    transport: str = "auto"
    offload_params: str = "device"
    offload_grads: str = "device"
    offload_optimizer: str = "device"
    offload_path: Path | None = None
    checkpoints: Path | None = None
    """Directory for checkpoints. None: none are saved."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; one more is saved at the end."""
    keep: int = 3
    """How many checkpoints stay."""
    resume: bool = False
    """Go on from the newest checkpoint, if there is one."""
    plain_log: bool = False

    def __post_init__(self) -> None:
        if self.size not in SHAPES:
            near = difflib.get_close_matches(self.size, SHAPES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise errors.ConfigError(f"--size {self.size} is not known{hint}; use one of {', '.join(SHAPES)}.")
        ShardConfig.of(self.options)
        for name in ("steps", "batch", "sequence", "accumulate", "ranks", "checkpoint_every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")
        if self.resume and self.checkpoints is None:
            raise errors.ConfigError("--resume needs --checkpoints, the directory to resume from.")
        if self.sequence > self.shape.context:
            raise errors.ConfigError(
                f"--sequence {self.sequence} is longer than the context of size {self.size}, {self.shape.context}; "
                f"use at most {self.shape.context} or a size with a longer context."
            )
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise errors.ConfigError(f"--{name} {value} must be a positive number.")

    @property
    def settings(self) -> dict[str, Any]:
        """What a job that is resumed must have in common with its first part, by option."""
        same = {name: getattr(self, name) for name in ("size", "batch", "sequence", "accumulate", "lr", "clip", "seed")}
        return {**same, "data": [str(path.absolute()) for path in self.data]}

    def check_continues(self, settings: Mapping[str, Any], num_steps: int) -> None:
        """Raise if this is not the job that was saved, with these settings after this many steps, or has nothing left to do."""
        mine = self.settings
        for name, value in settings.items():
            if name in mine and mine[name] != value:
                raise errors.ConfigError(
                    f"--{name} is {mine[name]}, in the job that is resumed it was {value}. Resume with the same, or start "
                    "another job in another directory."
                )
        if num_steps > self.steps:
            raise errors.ConfigError(f"--steps {self.steps}: the job that is resumed has made {num_steps} steps already.")

    @property
    def shape(self) -> GPTConfig:
        """The model's shape."""
        return SHAPES[self.size]

    @property
    def options(self) -> dict[str, Any]:
        """The options of `shard`."""
        offload = sw.Offload(
            params=self.offload_params, grads=self.offload_grads, optimizer=self.offload_optimizer, path=self.offload_path
        )
        return {"stage": self.stage, "precision": self.precision, "transport": self.transport, "offload": offload}
