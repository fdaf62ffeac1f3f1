"""`shardwise train`: a byte-level GPT, plain loop, over ranks that this command starts or that torchrun started.

`train` is called once per launch and, under torchrun, once per rank; `work` is everything that one rank does.
Values are checked when the `Job` is made, before any process exists.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import shardwise as sw
from shardwise import errors
from shardwise.checkpoint import noting_sigterm
from shardwise.checkpoint.manifest import FILE_NAME
from shardwise.cli.corpus import Corpus
from shardwise.cli.display import LOG_PERIOD_STEPS, Show, display, headline, summarise
from shardwise.cli.job import Job
from shardwise.observe import process_memory
from shardwise.stages import STAGES, Held
from shardwise.testing.models import GPT

DEFAULT_RANKS = 2
WEIGHT_DECAY = 0.1


class WorkerFailedError(errors.ShardwiseError, RuntimeError):
    """A rank ended before its work was done."""


# -- starting ranks -------------------------------------------------------------------------------------------


def train(job: Job) -> None:
    """Train as one rank under torchrun; otherwise start as many ranks as the job asks for."""
    Corpus.of(job.data).check_holds(job.sequence)
    _check_place(job)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        _launch(job, DEFAULT_RANKS if job.ranks is None else job.ranks)
        return
    world_size = int(os.environ["WORLD_SIZE"])
    if job.ranks not in (None, world_size):
        raise errors.ConfigError(f"--ranks {job.ranks} was given to a launch of {world_size} ranks; leave it out under torchrun.")
    _work_or_leave(job, tells=True)


def _check_place(job: Job) -> None:
    """Raise before any work is done if checkpoints cannot go where they are asked for, or would mix with those of another job."""
    place = job.checkpoints
    if place is None:
        return
    if (place / FILE_NAME).exists():
        raise errors.ConfigError(
            f"--checkpoints {place} is a checkpoint itself; name the directory that it is in, {place.parent}."
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise errors.ConfigError(
            f"--checkpoints {place} cannot be written to: {error.strerror}. Name another directory."
        ) from None
    newest = sw.Checkpoints(place).latest()
    if newest is not None and not job.resume:
        raise errors.ConfigError(
            f"--checkpoints {place} has checkpoints of another job, the newest {newest.name}. Go on with it by --resume, or "
            "name another directory."
        )


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
        stop = Path(directory) / "stop"
        try:
            with contextlib.nullcontext() if job.checkpoints is None else _passing_sigterm_on(config, stop):
                elastic_launch(config, _work_or_leave)(job, stop, os.getpid())
        except ChildFailedError as failure:
            Console().show_cursor()  # hidden by the progress bar of a rank that is gone
            raise _root_cause(failure, Path(directory)) from None
        except SignalException as stopped:
            Console().show_cursor()
            raise SystemExit(128 + stopped.sigval) from None


@contextlib.contextmanager
def _passing_sigterm_on(config: LaunchConfig, stop: Path) -> Iterator[None]:
    """Inside the context SIGTERM makes the file `stop`, which ranks look for after every step, instead of ending them."""
    config.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    before = signal.signal(signal.SIGTERM, lambda *_: stop.touch())
    # The process that ranks are forked from must not end by a signal to the whole process group: its children end with it.
    multiprocessing.resource_tracker.ensure_running()  # first: it unblocks SIGTERM when it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        multiprocessing.forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def _work_or_leave(job: Job, stop: Path | None = None, launcher: int | None = None, *, tells: bool = False) -> None:
    """Run `work`. After a failure record the error for the launcher, print it here if `tells`, and end the process at once.

    Nothing is closed then, because background threads may wait for peers that wait for this rank.
    """
    if launcher is not None:
        _end_with(launcher)
    try:
        work(job, stop)
    except Exception as error:
        get_error_handler().record_exception(error)
        is_foreseen = isinstance(error, errors.ShardwiseError)
        if tells:
            account = str(error) if is_foreseen else f"failed.\n{traceback.format_exc()}"
            print(f"shardwise train: rank {os.environ['RANK']}: {account}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if is_foreseen and isinstance(error, ValueError) else 1)


def _end_with(launcher: int) -> None:
    """End this rank when the command that started it was killed: nobody would wait for it, or tell it to stop."""
    try:
        descriptor = os.pidfd_open(launcher)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="shardwise-launcher", daemon=True).start()


# -- one rank -------------------------------------------------------------------------------------------------


def work(job: Job, stop: Path | None = None) -> None:
    """What one rank does: build the model, train, report, close.

    With checkpoints, SIGTERM or a file at `stop` ends training after the step that runs, with a checkpoint.
    """
    if job.checkpoints is None:
        _train(job, lambda: False)
        return
    with noting_sigterm() as has_come:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by `_launch`
        _train(job, lambda: has_come() or (stop is not None and stop.exists()))


def _train(job: Job, is_stopped: Callable[[], bool]) -> None:
    _stay_on_this_host()
    corpus = Corpus.of(job.data)
    torch.manual_seed(job.seed)  # the same on every rank: all build the same model
    with sw.sharded_init() if STAGES[job.stage].params is Held.SHARD else contextlib.nullcontext():
        model = GPT(job.shape)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=job.lr)
    run = sw.shard(model, optimizer, **job.options)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0:
        print(headline(job, corpus, world_size), flush=True)
    with display(job.steps, job.plain_log, is_shown=rank == 0) as show:
        losses, tokens_per_s = _loop(job, corpus, model, optimizer, run, show, is_stopped)
    if rank == 0:
        if len(losses) < job.steps:
            print(f"stopped by SIGTERM after step {len(losses)} of {job.steps}; --resume goes on from {job.checkpoints}")
        summarise(job, run, model, losses, tokens_per_s)
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
    job: Job,
    corpus: Corpus,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: sw.Run,
    show: Show,
    is_stopped: Callable[[], bool],
) -> tuple[list[float], float]:
    """An ordinary training loop; return the mean loss over all ranks of every step, and tokens per second.

    It ends after the step in which `is_stopped()` is first true on any rank.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, job.steps))
    tokens_per_step = job.batch * job.sequence * job.accumulate * world_size
    checkpoints = None if job.checkpoints is None else sw.Checkpoints(job.checkpoints, keep=job.keep)
    found = None
    if checkpoints is not None and job.resume:
        found = checkpoints.resume(run, scheduler=scheduler, progress=show.moving("loading"))
        if found is None and rank == 0:
            print(f"there is no checkpoint in {job.checkpoints}: starting from the beginning", flush=True)
    losses: list[float] = [] if found is None else found.extra["losses"]
    if found is not None:
        job.check_continues(found.extra.get("settings", {}), len(losses))
        if rank == 0:
            print(f"resumed after step {len(losses)}", flush=True)
    memory_bytes, tokens_per_s = 0, 0.0
    first, began = len(losses), time.perf_counter()
    for step in range(first, job.steps):
        total = torch.zeros(())
        for micro in range(job.accumulate):
            tokens, targets = corpus.batch(f"{job.seed}/{step}/{micro}/{rank}", job.batch, job.sequence)
            with run.measuring_activations() if step - first == micro == 0 else contextlib.nullcontext():
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

        told = torch.stack([total, torch.tensor(float(is_stopped()))])  # one all-reduce for both: ranks stop at the same step
        if world_size > 1:
            dist.all_reduce(told)
        losses.append(told[0].item() / world_size)
        stops = told[1].item() > 0
        if step % LOG_PERIOD_STEPS == 0 or step == job.steps - 1:
            memory_bytes = process_memory().total
        timed_steps = max(step - first, 1)
        tokens_per_s = timed_steps * tokens_per_step / (time.perf_counter() - began)
        if step == first and job.steps > 1:
            began = time.perf_counter()  # the first step is not timed: it warms up and measures
        show.step(step + 1, losses[-1], tokens_per_s, memory_bytes)
        is_last = stops or step + 1 == job.steps
        if checkpoints is not None and ((step + 1) % job.checkpoint_every == 0 or is_last):
            extra = {"losses": losses, "settings": job.settings}
            checkpoints.save(run, step + 1, scheduler=scheduler, extra=extra, progress=show.moving("saving"))
        if is_last:
            break
    return losses, tokens_per_s
