"""A pipeline of sharded stages: what each ZeRO stage costs, with gradients reduced once per step or after every micro-batch.

    python benchmarks/pipelines.py [--layers 12] [--sequence 128] [--micro 4] [--steps 2] [--rounds 1] [--only SETTING ...]

GPT-2 124M shape, untied, fp32, AdamW(fused=True), 4 CPU ranks: 2 pipe x 2 shard, 1F1B. `sent` is what a rank sends to the others
of its stage in a step, in units of its stage's parameters (half of them to one other rank is 0.5). Activations between stages are
not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from interleaved import figures, launch_ranks, middle, print_errors, run_rounds, tell
from systems import adamw, measure

RANKS, PIPES = 4, 2
VOCABULARY, HIDDEN = 50257, 768
SETTINGS: dict[str, dict[str, Any]] = {
    f"stage {stage}, {transport}{'' if once else ', every micro-batch'}": dict(stage=stage, transport=transport, once=once)
    for transport in ("shared", "pairwise")
    for stage in (1, 2, 3)
    for once in (True, False)
}


def stage_module(place: int, layers: int, sequence: int) -> nn.Module:
    """The blocks of one pipeline stage, with the table or the head."""
    from shardwise.testing.models import GPTBlock, GPTConfig

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = GPTConfig(vocabulary=VOCABULARY, heads=12, hidden=HIDDEN, layers=layers, context=sequence)
            self.table = nn.Embedding(VOCABULARY, HIDDEN) if place == 0 else None
            own = range(place * layers // PIPES, (place + 1) * layers // PIPES)
            self.blocks = nn.ModuleDict({str(number): GPTBlock(config) for number in own})
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False) if place == PIPES - 1 else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if self.table is None else self.table(x)
            for block in self.blocks.values():
                x = block(x)
            return x if self.head is None else self.head(x)

    return Stage()


def train(args: argparse.Namespace) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import shardwise as sw

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    options = dict(SETTINGS[args.worker])
    once = options.pop("once")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (PIPES, RANKS // PIPES), mesh_dim_names=("pipe", "shard"))
    place = mesh["pipe"].get_local_rank()
    torch.manual_seed(place)
    model = stage_module(place, args.layers, args.sequence)
    optimizer = adamw(model.parameters())
    run = sw.shard(model, optimizer, mesh=mesh, **options)
    stage = PipelineStage(model, place, PIPES, torch.device("cpu"), group=mesh["pipe"].get_group())

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / (1 if once else args.micro)

    schedule = Schedule1F1B(stage, args.micro, loss_fn=loss_of, scale_grads=once)
    torch.manual_seed(100 + mesh["shard"].get_local_rank())
    data = torch.randint(0, VOCABULARY, (args.micro, args.sequence + 1))
    sent = 0

    def step() -> float:
        nonlocal sent
        run.transport.counters.reset()
        losses: list[torch.Tensor] = []
        with run.accumulating() if once else contextlib.nullcontext():
            first, last = [data[:, :-1]] if place == 0 else [], dict(target=data[:, 1:], losses=losses)
            schedule.step(*first, **(last if place == PIPES - 1 else {}))
        if once:
            run.reduce()
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        sent = run.transport.counters.total_elements()
        mean = sum(loss.item() for loss in losses) / (len(losses) or 1)
        return mean * (1 if once else args.micro)

    found = measure(step, args.steps, sampled_steps=1)
    own = sum(unit.layout.numel for unit in run._runtime.units)
    everyone = [torch.zeros(2, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(everyone, torch.tensor([found["loss"], sent / own], dtype=torch.float64))
    return {**found, "loss": everyone[-1][0].item(), "sent": everyone[-1][1].item()}


def main() -> None:
    args = parse()
    if args.worker:
        tell(args.out, lambda: train(args))
    settings = args.only or list(SETTINGS)
    passed_on = {name: getattr(args, name) for name in ("layers", "sequence", "micro", "steps")}
    found = run_rounds(
        settings,
        args.rounds,
        lambda setting, place: launch_ranks(__file__, setting, passed_on, RANKS, args.timeout_s, place),
        tempfile.gettempdir(),
    )
    shape = f"{args.layers} layers, {args.micro} micro-batches of sequence {args.sequence}"
    print(f"{shape}, {args.rounds} rounds of {args.steps} steps\n")
    base = settings[0]
    print(f"| setting | step s | x {base} | CPU s | x {base} | peak GB | loss | sent |")
    print("|---" * 8 + "|")
    for setting in found:
        print(f"| {setting} | {' | '.join(figures(found, setting, base, cpu=True))} | {middle(found, setting, 'sent'):.2f} |")
    print_errors(found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", action="append", choices=SETTINGS)
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
