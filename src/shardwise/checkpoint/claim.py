"""The directory that a save writes to before it gets its name. Rank 0 makes and locks it; a later save removes what was killed.

The lock is a file beside the directory. It is there before the directory is and goes after it, so a directory without a locked
file belongs to nobody, however young it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.observe import format_bytes

_SAVING = ".saving-"
"""Between the name of a checkpoint and its save_id, while it is being written."""
_LOCK = ".lock"
_MOST_TRIES = 1000


def place_of(target: Path, save_id: str) -> Path:
    """The directory in which the checkpoint `target` is written."""
    return target.parent / f".{target.name}{_SAVING}{save_id}"


@contextlib.contextmanager
def claimed(target: Path, place: Path) -> Iterator[None]:
    """On rank 0: make the directory to write to, locked for as long as this save lasts."""
    if any(path.name.startswith(f".{target.name}{_SAVING}") for path in remove_leftovers(target.parent)):
        raise _another(target)
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already. Save to another path, or remove it first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock_of(place)
    descriptor = _made_and_locked(lock)
    try:
        place.mkdir()
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _made_and_locked(lock: Path) -> int:
    """Make a lock file. If a run that cleans up takes it for a leftover before it is locked, it is made again."""
    for _ in range(_MOST_TRIES):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _is_locked_now(descriptor) and lock.exists():
            return descriptor
        os.close(descriptor)
    raise CheckpointError(f"the lock {lock} was removed or held {_MOST_TRIES} times by other runs that save here. Try again.")


def require_room(place: Path, num_bytes: int) -> None:
    """Raise if the file system has less space free than will be written."""
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    if num_bytes > free:
        raise CheckpointError(
            f"{place.parent} has {format_bytes(free)} free, {format_bytes(num_bytes)} are needed. Free space there, or use "
            "another file system."
        )


def appear(place: Path, target: Path) -> None:
    """Give a directory that is complete its name. All files in it are on the disk."""
    _sync(place)
    appeared = CheckpointError(f"{target} has appeared while it was written, and is left as it is. Use another path.")
    if target.exists() or target.is_symlink():
        raise appeared
    try:
        os.rename(place, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # something else has the name meanwhile
            raise appeared from error
        raise
    _sync(target.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what killed saves have left in a directory; return the places where a save may run now."""
    found = directory.glob(f".*{_SAVING}*") if directory.is_dir() else ()
    places = sorted({path.with_name(path.name.removesuffix(_LOCK)) for path in found})
    return [place for place in places if not _removed(place)]


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. If this is interrupted, what is left is no checkpoint, and goes with other leftovers."""
    left = place_of(path, "removed")
    with contextlib.suppress(OSError):
        os.rename(path, left)
        shutil.rmtree(left, ignore_errors=True)


def _removed(place: Path) -> bool:
    """Remove a directory with its lock, unless a save runs there; whether none does."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(_lock_of(place), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            if not _is_locked_now(descriptor):
                return False
        except FileNotFoundError:
            pass  # no save runs there: the lock is there before the directory is
        except OSError:
            return False
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            _lock_of(place).unlink()
    return True


def _lock_of(place: Path) -> Path:
    return place.with_name(place.name + _LOCK)


def _is_locked_now(descriptor: int) -> bool:
    """Lock a file unless another process has; whether that was done."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _another(target: Path) -> CheckpointError:
    return CheckpointError(f"another run is saving to {target} now. Save to another path.")
