"""The commands: their options, and how their errors end the process.

There is one function per command. It checks the arguments and passes them on; no training happens here.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shardwise.checkpoint import MAX_FILE_BYTES
from shardwise.cli.job import SHAPES, Job
from shardwise.cli.probe import run_probe
from shardwise.cli.tools import run_export, run_inspect
from shardwise.cli.train import train
from shardwise.config import TIERS, TRANSPORTS
from shardwise.errors import ShardwiseError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def shardwise() -> None:
    """shardwise: the ZeRO family on plain PyTorch."""


@app.command("train")
def train_command(
    size: Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(SHAPES)}.")] = "small",
    stage: Annotated[
        int,
        typer.Option(help="0 replicates, 1 partitions optimizer states, 2 also gradients, 3 also parameters.", show_default=True),
    ] = 3,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16 (with loss scaling).")] = "fp32",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 60,
    batch: Annotated[int, typer.Option(help="Sequences per rank and backward pass.")] = 8,
    sequence: Annotated[int, typer.Option(help="Bytes per sequence; at most the model's context.")] = 128,
    accumulate: Annotated[int, typer.Option(help="Backward passes per optimizer step.")] = 1,
    lr: Annotated[float, typer.Option(help="Peak learning rate: linear warm-up, then cosine decay.")] = 1e-3,
    clip: Annotated[float | None, typer.Option(help="Largest global gradient norm.", show_default="no clipping")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the parameters and of the batches.")] = 0,
    ranks: Annotated[
        int | None, typer.Option(help="Processes to start on this host.", show_default="2; under torchrun, its own")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A text file, or a directory of them; may be repeated.", show_default="Python's standard library"),
    ] = None,
    transport: Annotated[str, typer.Option(help=f"How ranks combine: {', '.join(TRANSPORTS)}.")] = "auto",
    offload_params: Annotated[str, typer.Option(help=f"Where parameters live between uses: {', '.join(TIERS)}.")] = "device",
    offload_grads: Annotated[str, typer.Option(help="Where reduced gradients live.")] = "device",
    offload_optimizer: Annotated[str, typer.Option(help="Where moments and masters live.")] = "device",
    offload_path: Annotated[
        Path | None, typer.Option(help="Directory on the disk.", show_default="the system's, for temporary files")
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="Directory for checkpoints.", show_default="none are saved")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 100,
    keep: Annotated[int, typer.Option(help="How many checkpoints stay.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")] = False,
    plain_log: Annotated[
        bool, typer.Option("--plain-log", help="A line every 10 steps, no progress bar; also when not on a terminal.")
    ] = False,
) -> None:
    """Train a byte-level GPT on text, on the CPU, and compare the memory it took with the formula."""
    with _errors_in_one_line("train"):
        job = Job(
            size=size,
            stage=stage,
            precision=precision,
            steps=steps,
            batch=batch,
            sequence=sequence,
            accumulate=accumulate,
            lr=lr,
            clip=clip,
            seed=seed,
            ranks=ranks,
            data=tuple(data or ()),
            transport=transport,
            offload_params=offload_params,
            offload_grads=offload_grads,
            offload_optimizer=offload_optimizer,
            offload_path=offload_path,
            checkpoints=checkpoints,
            checkpoint_every=checkpoint_every,
            keep=keep,
            resume=resume,
            plain_log=plain_log,
        )
        train(job)


@app.command("probe")
def probe_command(
    path: Annotated[
        Path | None, typer.Option(help="Directory on the disk to measure.", show_default="the system's, for temporary files")
    ] = None,
    links: Annotated[bool, typer.Option(help="Also measure gathers between two local ranks.")] = True,
) -> None:
    """Measure this machine: copies, disk, matrix products, links; the result is kept for the library."""
    with _errors_in_one_line("probe"):
        run_probe(path or Path(tempfile.gettempdir()), links=links)


@app.command("inspect")
def inspect_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of run.save().")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare it with its checksums.")] = False,
    diff: Annotated[
        Path | None, typer.Option(help="Another checkpoint: show in what they differ, and exit with 1 if they do.")
    ] = None,
) -> None:
    """Show what is inside a checkpoint, whether it is intact, or in what it differs from another one."""
    with _errors_in_one_line("inspect"):
        if not run_inspect(checkpoint, verifies=verify, other=diff):
            raise typer.Exit(1)


@app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of run.save().")],
    directory: Annotated[Path, typer.Argument(help="The Hugging Face directory to write; it must not exist.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Of floating values: float32, bfloat16, float16 or float64.", show_default="each parameter's"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.json to copy, or a directory with one; from_pretrained needs it.")
    ] = None,
    max_file_bytes: Annotated[int, typer.Option(help="Bytes of tensors per file.")] = MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint's parameters as a Hugging Face directory: one process, no model, little memory."""
    with _errors_in_one_line("export"):
        run_export(checkpoint, directory, dtype=dtype, config=config, max_file_bytes=max_file_bytes)


@contextlib.contextmanager
def _errors_in_one_line(command: str) -> Iterator[None]:
    """Print errors in one line; exit with code 2 for a bad value, 1 for failed work. Unexpected errors keep their traceback."""
    try:
        yield
    except ShardwiseError as error:
        typer.echo(f"shardwise {command}: {error}", err=True)
        is_bad_value = isinstance(error, ValueError)
        raise typer.Exit(2 if is_bad_value else 1) from None
