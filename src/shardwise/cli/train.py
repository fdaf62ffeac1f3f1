"""`shardwise train`: a byte-level GPT, plain loop, over ranks that this command starts or that torchrun started.

`train` is called once per launch and, under torchrun, once per rank; `work` is everything that one rank does.
Values are checked when the `Job` is made, before any process exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import logging
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import shardwise as sw
from shardwise import errors
from shardwise.cli.corpus import Corpus
from shardwise.config import ShardConfig
from shardwise.observe import format_bytes, process_memory
from shardwise.planner import gpt_activation_bytes
from shardwise.stages import STAGES, Held
from shardwise.testing.models import GPT, GPTConfig

SHAPES = {
    "tiny": GPTConfig(layers=4, heads=4, hidden=128, context=256),
    "small": GPTConfig(layers=6, heads=8, hidden=256, context=256),
    "medium": GPTConfig(layers=12, heads=8, hidden=512, context=512),
    "gpt2": GPTConfig(layers=12, heads=12, hidden=768, context=1024),
}
DEFAULT_RANKS = 2
WEIGHT_DECAY = 0.1
_LOG_PERIOD_STEPS = 10
_LOSS_WINDOW_STEPS = 5

Show = Callable[[int, float, float, int], None]
"""Called after every step with steps done, loss, tokens per second and this rank's resident bytes."""


class WorkerFailedError(errors.ShardwiseError, RuntimeError):
    """A rank ended before its work was done."""


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
    plain_log: bool = False

    def __post_init__(self) -> None:
        if self.size not in SHAPES:
            near = difflib.get_close_matches(self.size, SHAPES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise errors.ConfigError(f"--size {self.size} is not known{hint}; use one of {', '.join(SHAPES)}.")
        ShardConfig.of(self.options)
        for name in ("steps", "batch", "sequence", "accumulate", "ranks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.ConfigError(f"--{name} {value} must be at least 1.")
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


# -- starting ranks -------------------------------------------------------------------------------------------


def train(job: Job) -> None:
    """Train as one rank under torchrun; otherwise start as many ranks as the job asks for."""
    Corpus.of(job.data).check_holds(job.sequence)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        _launch(job, DEFAULT_RANKS if job.ranks is None else job.ranks)
        return
    world_size = int(os.environ["WORLD_SIZE"])
    if job.ranks not in (None, world_size):
        raise errors.ConfigError(f"--ranks {job.ranks} was given to a launch of {world_size} ranks; leave it out under torchrun.")
    _work_or_leave(job, tells=True)


def _launch(job: Job, ranks: int) -> None:
    """Start `ranks` processes on this host and wait for them; raise the error of the first rank that failed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    if "LOGLEVEL" not in os.environ:  # a failure is reported once, below, not by every layer of the launcher
        for name in (
            "distributed.elastic.multiprocessing.api",
            "distributed.elastic.agent.server.api",
            "multiprocessing.spawn",
        ):
            logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="shardwise-train-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            run_id="shardwise-train",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # port 0: the system picks a free one
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="forkserver",
        )
        # Ranks are forked from one process that has imported what they need, instead of each importing it.
        multiprocessing.set_forkserver_preload(["shardwise.cli.train", "torch._dynamo"])
        try:
            elastic_launch(config, _work_or_leave)(job)
        except ChildFailedError as failure:
            Console().show_cursor()  # hidden by the progress bar of a rank that is gone
            raise _root_cause(failure, Path(directory)) from None
        except SignalException as stopped:
            Console().show_cursor()
            raise SystemExit(128 + stopped.sigval) from None


def _root_cause(failure: ChildFailedError, directory: Path) -> errors.ShardwiseError:
    """The error of the rank that failed first; the others often fail only because it ended."""
    written = sorted(directory.rglob("error.json"), key=lambda path: path.stat().st_mtime_ns)
    if not written:
        rank, process = failure.get_first_failure()
        how = f"was ended by {process.signal_name()}" if process.exitcode < 0 else f"left with code {process.exitcode}"
        return WorkerFailedError(f"rank {rank} {how}. If memory ran out, use a higher --stage or a smaller --batch.")
    rank = int(written[0].parent.name)
    account = json.loads(written[0].read_text())["message"]
    name, _, text = account["message"].partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.ShardwiseError):
        return kind(f"rank {rank}: {text}")
    return WorkerFailedError(f"rank {rank} failed.\n{account['extraInfo']['py_callstack'].rstrip()}")


def _work_or_leave(job: Job, *, tells: bool = False) -> None:
    """Run `work`. After a failure record the error for the launcher, print it here if `tells`, and end the process at once.

    Nothing is closed then, because background threads may wait for peers that wait for this rank.
    """
    try:
        work(job)
    except Exception as error:
        get_error_handler().record_exception(error)
        is_foreseen = isinstance(error, errors.ShardwiseError)
        if tells:
            account = str(error) if is_foreseen else f"failed.\n{traceback.format_exc()}"
            print(f"shardwise train: rank {os.environ['RANK']}: {account}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if is_foreseen and isinstance(error, ValueError) else 1)


# -- one rank -------------------------------------------------------------------------------------------------


def work(job: Job) -> None:
    """What one rank does: build the model, train, report, close."""
    _stay_on_this_host()
    corpus = Corpus.of(job.data)
    torch.manual_seed(job.seed)  # the same on every rank: all build the same model
    with sw.sharded_init() if STAGES[job.stage].params is Held.SHARD else contextlib.nullcontext():
        model = GPT(job.shape)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=job.lr)
    run = sw.shard(model, optimizer, **job.options)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0:
        print(_headline(job, corpus, world_size), flush=True)
    with _display(job, is_shown=rank == 0) as show:
        losses, tokens_per_s = _loop(job, corpus, model, optimizer, run, show)
    if rank == 0:
        _summarise(job, run, model, losses, tokens_per_s)
    run.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _stay_on_this_host() -> None:
    """Let gloo use the loopback interface if all ranks are on this host: the host's name may resolve wrongly or not at all."""
    is_local = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    if is_local and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Optimizer groups: matrices decay, biases and norms do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth (at most 100 steps), then a cosine down to a tenth."""
    warmup = max(1, min(steps // 10, 100))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))


def _loop(
    job: Job, corpus: Corpus, model: nn.Module, optimizer: torch.optim.Optimizer, run: sw.Run, show: Show
) -> tuple[list[float], float]:
    """An ordinary training loop; return the mean loss over all ranks of every step, and tokens per second."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, job.steps))
    tokens_per_step = job.batch * job.sequence * job.accumulate * world_size
    losses: list[float] = []
    memory_bytes, tokens_per_s = 0, 0.0
    began = time.perf_counter()
    for step in range(job.steps):
        total = torch.zeros(())
        for micro in range(job.accumulate):
            tokens, targets = corpus.batch(f"{job.seed}/{step}/{micro}/{rank}", job.batch, job.sequence)
            with run.measuring_activations() if step == micro == 0 else contextlib.nullcontext():
                loss = model(tokens, targets)
            run.scaler.scale(loss / job.accumulate).backward()
            total += loss.detach().float() / job.accumulate
        if job.clip is not None:
            run.scaler.unscale_(optimizer)
            run.clip_grad_norm_(job.clip)
        run.scaler.step(optimizer)
        run.scaler.update()
        scheduler.step()
        optimizer.zero_grad()

        if world_size > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world_size)
        if step % _LOG_PERIOD_STEPS == 0 or step == job.steps - 1:
            memory_bytes = process_memory().total
        timed_steps = max(step, 1)
        tokens_per_s = timed_steps * tokens_per_step / (time.perf_counter() - began)
        if step == 0 and job.steps > 1:
            began = time.perf_counter()  # the first step is not timed: it warms up and measures
        show(step + 1, losses[-1], tokens_per_s, memory_bytes)
    return losses, tokens_per_s


# -- what is shown --------------------------------------------------------------------------------------------


def _headline(job: Job, corpus: Corpus, world_size: int) -> str:
    shape = job.shape
    tokens = job.batch * job.sequence * job.accumulate * world_size
    return (
        f"GPT {job.size}: {shape.layers} layers, hidden {shape.hidden}, {shape.num_parameters / 1e6:.1f}M parameters; "
        f"stage {job.stage}, {job.precision}\n"
        f"{world_size} ranks, {torch.get_num_threads()} threads per rank, {tokens} tokens per step; "
        f"data: {len(corpus.files)} files, {format_bytes(corpus.num_bytes)}"
    )


@contextlib.contextmanager
def _display(job: Job, *, is_shown: bool) -> Iterator[Show]:
    """A progress bar on a terminal, otherwise a line every few steps; nothing unless `is_shown`."""
    if not is_shown:
        yield lambda *_: None
    elif job.plain_log or not sys.stdout.isatty():
        yield lambda done, *figures: _print_line(job, done, *figures)
    else:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as bar:
            task = bar.add_task("", total=job.steps)
            yield lambda done, *figures: bar.update(task, completed=done, description=_figures(*figures))


def _print_line(job: Job, done: int, loss: float, tokens_per_s: float, memory_bytes: int) -> None:
    if done == 1 or done % _LOG_PERIOD_STEPS == 0 or done == job.steps:
        print(f"step {done:>{len(str(job.steps))}}/{job.steps}  {_figures(loss, tokens_per_s, memory_bytes)}", flush=True)


def _figures(loss: float, tokens_per_s: float, memory_bytes: int) -> str:
    return f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  {format_bytes(memory_bytes)} per rank"


def _summarise(job: Job, run: sw.Run, model: nn.Module, losses: list[float], tokens_per_s: float) -> None:
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
