"""`shardwise inspect` and `shardwise export`: what can be done with a checkpoint without its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardwise import checkpoint
from shardwise.errors import CheckpointError
from shardwise.observe import format_bytes

_SHOWN_FILES = 8


def run_inspect(path: Path, *, verifies: bool, other: Path | None) -> bool:
    """Show a checkpoint, or what differs from another one. Returns False if they differ."""
    if verifies:
        _verify(path)
    if other is not None:
        return _show_difference(checkpoint.diff(path, other), path, other)
    show(checkpoint.inspect(path), path, Console(markup=False, emoji=False))
    if verifies:
        print("every checksum is right")
    return True


def _verify(path: Path) -> None:
    problems = checkpoint.verify(path)
    if problems:
        for line in problems:
            print(line)
        raise CheckpointError(f"{path} is damaged in {len(problems)} places; the first: {problems[0]}")


def show(found: checkpoint.Contents, path: Path, console: Console) -> None:
    """Print a table with one row per fact."""
    table = Table(title=str(path), show_header=False)
    table.add_column("what")
    table.add_column("figure", overflow="fold")
    table.add_row("steps", str(found.num_steps))
    table.add_row("saved by", f"{found.world_size} ranks")
    table.add_row(
        "parameters",
        f"{found.num_params:,} ({found.num_trainable:,} trained) in {found.num_tensors} tensors, {', '.join(found.dtypes)}",
    )
    for kind, num_bytes in sorted(found.bytes_by_kind.items()):
        table.add_row(f"  {kind}", format_bytes(num_bytes))
    sizes = list(found.file_bytes.items())
    table.add_row("files", f"{len(sizes)}, {format_bytes(sum(found.file_bytes.values()))}")
    for name, num_bytes in sizes[:_SHOWN_FILES]:
        table.add_row(f"  {name}", format_bytes(num_bytes))
    if len(sizes) > _SHOWN_FILES:
        table.add_row("  ...", f"{len(sizes) - _SHOWN_FILES} more")
    table.add_row("optimizer", found.optimizer or "none")
    for number, group in enumerate(found.groups):
        table.add_row(f"  group {number}", ", ".join(f"{key}={_short(value)}" for key, value in group.items()))
    table.add_row("scheduler", "yes" if found.has_scheduler else "no")
    table.add_row("buffers", str(len(found.buffers)))
    for key, value in found.extra.items():
        table.add_row(f"extra: {key}", _short(value))
    console.print(table)


def _show_difference(found: checkpoint.Difference, path: Path, other: Path) -> bool:
    for line in found.facts:
        print(line)
    for change in found.changes:
        print(f"{change.name}: {change.num_differing} values differ, by at most {change.largest:g}")
    if not found:
        print(f"{path} and {other} have the same parameters, buffers, optimizer states, settings and extras")
    return not found


def run_export(path: Path, directory: Path, *, dtype: str | None, config: Path | None, max_file_bytes: int) -> None:
    """Write a Hugging Face directory and say what was written."""
    chosen = checkpoint.float_dtype(dtype)
    plan = checkpoint.export_checkpoint(path, directory, dtype=chosen, max_file_bytes=max_file_bytes, config=config)
    print(f"wrote {len(plan.entries)} tensors, {format_bytes(plan.data_bytes)}, in {len(plan.headers)} files to {directory}")
    if config is None:
        print("there is no config.json: from_pretrained needs one; --config copies it")


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
