"""What `shardwise train` shows: a headline, progress, and a summary."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator

import rich.progress
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import nn

import shardwise as sw
from shardwise.checkpoint import Progress
from shardwise.cli.corpus import Corpus
from shardwise.cli.job import Job
from shardwise.observe import format_bytes
from shardwise.planner import gpt_activation_bytes

LOG_PERIOD_STEPS = 10
_LOSS_WINDOW_STEPS = 5


class Show:
    """Shows nothing: what ranks other than the first have."""

    def step(self, done: int, loss: float, tokens_per_s: float, memory_bytes: int) -> None:
        """Show a step: steps done, loss, tokens per second, this rank's resident bytes."""

    def moving(self, what: str) -> Progress | None:
        """What a save or load tells its progress to."""
        return None


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
        yield Show()
    elif plain_log or not sys.stdout.isatty():
        yield _Lines(steps)
    else:
        what, figures = TextColumn("{task.fields[what]}"), TextColumn("{task.description}")
        with rich.progress.Progress(what, _Amount(), BarColumn(), figures, TimeRemainingColumn()) as bar:
            yield _Bars(bar, steps)


class _Lines(Show):
    """A line every few steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def step(self, done: int, loss: float, tokens_per_s: float, memory_bytes: int) -> None:
        if done == 1 or done % LOG_PERIOD_STEPS == 0 or done == self._steps:
            width = len(str(self._steps))
            print(f"step {done:>{width}}/{self._steps}  {_figures(loss, tokens_per_s, memory_bytes)}", flush=True)


class _Amount(ProgressColumn):
    """Steps as numbers, bytes as megabytes."""

    def render(self, task: rich.progress.Task) -> Text:
        column = MofNCompleteColumn() if task.fields["what"] == "step" else DownloadColumn()
        return column.render(task)


class _Bars(Show):
    """A bar for the steps, and one for the bytes while a checkpoint is written or read."""

    def __init__(self, bar: rich.progress.Progress, steps: int) -> None:
        self._bar = bar
        self._steps = bar.add_task("", total=steps, what="step")
        self._moves: dict[str, rich.progress.TaskID] = {}

    def step(self, done: int, loss: float, tokens_per_s: float, memory_bytes: int) -> None:
        self._bar.update(self._steps, completed=done, description=_figures(loss, tokens_per_s, memory_bytes))

    def moving(self, what: str) -> Progress:
        if what not in self._moves:
            self._moves[what] = self._bar.add_task("", total=None, visible=False, what=what)
        task = self._moves[what]
        self._bar.reset(task, visible=False)

        def progress(done: int, total: int) -> None:
            self._bar.update(task, completed=done, total=total, visible=done < total)

        return progress


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
