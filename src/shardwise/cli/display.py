"""What `shardwise train` shows: a headline, progress, and a summary."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import shardwise as sw
from shardwise.cli.corpus import Corpus
from shardwise.cli.job import Job
from shardwise.observe import format_bytes
from shardwise.planner import gpt_activation_bytes

LOG_PERIOD_STEPS = 10
_LOSS_WINDOW_STEPS = 5
Show = Callable[[int, float, float, int], None]
"""Called after every step with steps done, loss, tokens per second and this rank's resident bytes."""


def headline(job: Job, corpus: Corpus, world_size: int) -> str:
    """What will be trained, on what."""
    shape = job.shape
    tokens = job.batch * job.sequence * job.accumulate * world_size
    return (
        f"GPT {job.size}: {shape.layers} layers, hidden {shape.hidden}, {shape.num_parameters / 1e6:.1f}M parameters; "
        f"stage {job.stage}, {job.precision}\n"
        f"{world_size} ranks, {torch.get_num_threads()} threads per rank, {tokens} tokens per step; "
        f"data: {len(corpus.files)} files, {format_bytes(corpus.num_bytes)}"
    )


@contextlib.contextmanager
def display(steps: int, plain_log: bool, *, is_shown: bool) -> Iterator[Show]:
    """A progress bar on a terminal, otherwise a line every few steps; nothing unless `is_shown`."""
    if not is_shown:
        yield lambda *_: None
    elif plain_log or not sys.stdout.isatty():
        yield lambda done, *figures: _print_line(steps, done, *figures)
    else:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as bar:
            task = bar.add_task("", total=steps)
            yield lambda done, *figures: bar.update(task, completed=done, description=_figures(*figures))


def _print_line(steps: int, done: int, loss: float, tokens_per_s: float, memory_bytes: int) -> None:
    if done == 1 or done % LOG_PERIOD_STEPS == 0 or done == steps:
        print(f"step {done:>{len(str(steps))}}/{steps}  {_figures(loss, tokens_per_s, memory_bytes)}", flush=True)


def _figures(loss: float, tokens_per_s: float, memory_bytes: int) -> str:
    return f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  {format_bytes(memory_bytes)} per rank"


def summarise(job: Job, run: sw.Run, model: nn.Module, losses: list[float], tokens_per_s: float) -> None:
    """Memory predicted and measured, placement, loss and speed."""
    shape = job.shape
    activation_bytes = gpt_activation_bytes(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        sequence=job.sequence,
        batch=job.batch,
        vocabulary=shape.vocabulary,
        itemsize=next(model.parameters()).dtype.itemsize,
    )
    predicted = run.predicted_memory(activation_bytes=activation_bytes).by_kind()
    Console().print(_memory_table(predicted, run.measured_memory()))
    for line in run.placement():
        print(line)
    print(f"{loss_verdict(losses)}  {tokens_per_s:,.0f} tokens/s over all ranks, transport: {run.transport.name}")
    if run.scaler.is_enabled():
        print(f"loss scale {run.loss_scale:g}, {run.num_skipped_steps} steps skipped because gradients overflowed")
    sys.stdout.flush()


def _memory_table(predicted: dict[str, int], measured: dict[str, int]) -> Table:
    table = Table("kind", title="Bytes on rank 0, by kind")
    table.add_column("predicted", justify="right")
    table.add_column("measured peak", justify="right")
    kinds = ("param", "grad", "master", "moment", "buffer", "activation")
    for kind in kinds:
        table.add_row(kind, format_bytes(predicted[kind]), format_bytes(measured[kind]), end_section=kind == kinds[-1])
    table.add_row("sum", *(format_bytes(sum(found[kind] for kind in kinds)) for found in (predicted, measured)))
    return table


def loss_verdict(losses: list[float]) -> str:
    """First and last loss, as means over a few steps, and whether it fell."""
    window = max(1, min(_LOSS_WINDOW_STEPS, len(losses) // 2))
    first, last = statistics.fmean(losses[:window]), statistics.fmean(losses[-window:])
    shown = f"loss {first:.3f} -> {last:.3f} (mean of {window} steps each)"
    if len(losses) < 2:
        return f"loss {first:.3f} after one step: too few to tell whether it falls."
    return f"{shown}." if last < first else f"{shown}: the loss did NOT fall."
