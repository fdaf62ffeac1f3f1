"""The text to train on: many files treated as one long string of bytes. A batch reads only the bytes it needs.

Called by `train`. Nothing is downloaded. Files are not held in memory, so they may be larger than memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from shardwise.errors import ConfigError

DEFAULT_BYTES = 8_000_000
"""Length at which the default corpus, the standard library's source, is cut off."""
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_PROBE_BYTES = 8192


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files end to end; `starts[i]` is the offset of the first byte of `files[i]`, and the last entry is the total length."""

    files: tuple[Path, ...]
    starts: tuple[int, ...]

    @staticmethod
    def of(paths: Sequence[Path]) -> Corpus:
        """The files and directories given; without any, the source of Python's standard library."""
        if not paths:
            return _join(_standard_library(), DEFAULT_BYTES)
        return _join(file for path in paths for file in _text_files(path))

    @property
    def num_bytes(self) -> int:
        """Length of the whole string."""
        return self.starts[-1]

    def check_holds(self, sequence: int) -> None:
        """Raise unless there is at least one sequence and the byte that follows it."""
        if self.num_bytes < sequence + 1:
            raise ConfigError(
                f"the data holds {self.num_bytes} bytes in {len(self.files)} files; a sequence of {sequence} needs at least "
                f"{sequence + 1}. Give more --data or a smaller --sequence."
            )

    def read(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`, across file boundaries."""
        parts = []
        index = bisect.bisect_right(self.starts, start) - 1
        while length > 0:
            offset = start - self.starts[index]
            wanted = min(length, self.starts[index + 1] - start)
            with open(self.files[index], "rb") as file:
                file.seek(offset)
                part = file.read(wanted)
            if len(part) < wanted:
                raise ConfigError(
                    f"reading {self.files[index]}: {len(part)} bytes at {offset} where there were {wanted} when training "
                    "began. Leave data files unchanged while a run reads them."
                )
            parts.append(part)
            start, length, index = start + wanted, length - wanted, index + 1
        return b"".join(parts)

    def batch(self, key: str, batch: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the tokens that follow them, each `batch` by `sequence`; the same for the same `key`."""
        draw = random.Random(key)  # seeded with a string: the same offsets on every platform
        last = self.num_bytes - sequence - 1
        windows = b"".join(self.read(draw.randint(0, last), sequence + 1) for _ in range(batch))
        tokens = torch.frombuffer(bytearray(windows), dtype=torch.uint8).view(batch, sequence + 1).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _join(files: Iterable[Path], limit_bytes: int | None = None) -> Corpus:
    found: list[Path] = []
    sizes: list[int] = []
    for file in files:
        size = file.stat().st_size
        if limit_bytes is not None:
            size = min(size, limit_bytes - sum(sizes))
        if size == 0:
            continue
        found.append(file)
        sizes.append(size)
    return Corpus(tuple(found), tuple(itertools.accumulate(sizes, initial=0)))


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in root.rglob("*.py") if not _SKIPPED.intersection(file.relative_to(root).parts)]
    if not files:
        raise ConfigError(f"the default corpus is Python's own source, and {root} holds none. Give --data PATH.")
    return iter(sorted(files))


def _text_files(path: Path) -> list[Path]:
    """The file itself, or what looks like text below a directory, in sorted order."""
    if path.is_file():
        if path.stat().st_size == 0:
            raise ConfigError(f"--data {path} is empty; give a file with text in it, or a directory of such files.")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"--data {path} may not be read by this user; change its permissions or give another file.")
        return [path]
    if not path.is_dir():
        what = "is neither a file nor a directory" if path.exists() else "does not exist"
        raise ConfigError(f"--data {path} {what}; give a text file or a directory of them.")
    files = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file, path))
    if not files:
        raise ConfigError(f"--data {path} is a directory without text files; give one that holds some, or a file.")
    return files


def _is_text(file: Path, root: Path) -> bool:
    """Readable, not empty, not hidden, and without a NUL byte near its beginning."""
    if any(part.startswith(".") for part in file.relative_to(root).parts) or not os.access(file, os.R_OK):
        return False
    with open(file, "rb") as opened:
        head = opened.read(_PROBE_BYTES)
    return bool(head) and b"\0" not in head
