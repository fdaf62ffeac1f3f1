"""A directory of checkpoints, one per step, of which the last few are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shardwise.checkpoint.claim import remove_checkpoint
from shardwise.checkpoint.load import Loaded
from shardwise.checkpoint.manifest import FILE_NAME
from shardwise.checkpoint.subject import Subject, require_same_path, try_together
from shardwise.checkpoint.tensor_file import Progress
from shardwise.errors import CheckpointError
from shardwise.ticket import Returning, Ticket

_NAME = re.compile(r"step-(\d{8,})")


class Saveable(Protocol):
    """What `Checkpoints` saves and loads: a `Run`."""

    _subject: Subject

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        wait: bool = True,
        progress: Progress | None = None,
    ) -> Ticket:
        """Save a checkpoint."""

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        scheduler: Any = None,
        strict: bool = True,
        progress: Progress | None = None,
    ) -> Loaded:
        """Load a checkpoint."""

    @property
    def rank(self) -> int:
        """This rank's number; the first one removes what is no longer kept."""


class Checkpoints:
    """Checkpoints `step-00000100`, `step-00000200`, ... in one directory."""

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        """`keep`: how many of the newest ones stay when another one was saved."""
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise CheckpointError(f"keep={keep!r} must be a whole number of at least 1.")
        self.directory = Path(os.path.abspath(directory))
        self.keep = keep

    def all(self) -> list[Path]:
        """Every complete checkpoint in the directory, oldest first."""
        found = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match is not None and (path / FILE_NAME).is_file():
                found.append((int(match[1]), path))
        return [path for _, path in sorted(found)]

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return next(reversed(self.all()), None)

    def _newest(self) -> str | None:
        newest = self.latest()
        return None if newest is None else str(newest)

    def save(
        self,
        run: Saveable,
        step: int,
        *,
        extra: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        wait: bool = True,
        progress: Progress | None = None,
    ) -> Ticket:
        """Save a checkpoint of a run and remove those that are no longer kept. All ranks must call.

        With `wait=False`, as in `run.save`, they are removed when the Ticket is waited for, or by the next save.
        """
        path = self.directory / f"step-{step:08d}"
        ticket = run.save(path, extra=extra, scheduler=scheduler, wait=wait, progress=progress)
        self._remove_old(run, path)  # in the background: after the save before this one, which has ended now
        return ticket if wait else Returning(ticket, lambda: self._remove_old(run, path))

    def _remove_old(self, run: Saveable, newest: Path) -> None:
        """On rank 0: remove what is no longer kept, but never what was just saved, though it may have the lowest number."""
        if run.rank == 0:
            for old in self.all()[: -self.keep]:
                if old != newest:
                    remove_checkpoint(old)

    def resume(
        self, run: Saveable, *, scheduler: Any = None, strict: bool = True, progress: Progress | None = None
    ) -> Loaded | None:
        """Load the newest checkpoint into a run, or return None if there is none. All ranks must call."""
        world = run._subject.runtime.world.whole
        paths = try_together(world, self._newest, f"nothing was loaded from {self.directory}")
        require_same_path(paths, "load")
        newest = paths[0]
        return None if newest is None else run.load(newest, scheduler=scheduler, strict=strict, progress=progress)
