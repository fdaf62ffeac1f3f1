"""Tensor parallelism together with sharding: shardwise, FSDP2 (as torchtitan does it) and DeepSpeed, in one interleaved run.

    python benchmarks/tensor_parallel.py [--layers 12] [--sequence 128] [--batch 1] [--steps 3] [--rounds 2] [--only NAME ...]

GPT-2 124M shape in the form of a Llama of transformers, fp32, AdamW(fused=True), 4 CPU ranks: 2 tensor x 2 shard, so that the two
ranks of a tensor dimension have the same batch. Every setting is a process group of its own in every round, in an order that
changes. A setting's function below is what a user writes for it besides the loop; its lines are counted. `loss` is that of the
last timed step. A setting that fails is a row without figures, and its error is printed below the table.
"""

from __future__ import annotations

import argparse
import inspect
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interleaved import figures, launch_ranks, print_errors, run_rounds, tell
from systems import LEARNING_RATE, adamw, measure, plain_step

RANKS, TENSOR = 4, 2
VOCABULARY = 50257
Step = Callable[[], float]
LossOf = Callable[[nn.Module], torch.Tensor]


# -- what a user writes ------------------------------------------------------------------------------------------------


def divided(model: nn.Module, mesh: Any) -> None:
    """The same plan for torch's tensor parallelism under shardwise and FSDP2."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, {"model.embed_tokens": table, "lm_head": ColwiseParallel(output_layouts=Replicate())})
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def with_shardwise(stage: int) -> Callable[[nn.Module, Any, LossOf], Step]:
    def build(model: nn.Module, mesh: Any, loss_of: LossOf) -> Step:
        import shardwise as sw

        # begin
        divided(model, mesh["tensor"])
        optimizer = adamw(model.parameters())
        sw.shard(model, optimizer, stage=stage, mesh=mesh)
        # end
        return plain_step(model, optimizer, loss_of)

    return build


def with_fsdp2(model: nn.Module, mesh: Any, loss_of: LossOf) -> Step:
    from torch.distributed.fsdp import fully_shard

    divided(model, mesh["tensor"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = adamw(model.parameters())
    return plain_step(model, optimizer, loss_of)


def with_deepspeed(stage: int) -> Callable[[nn.Module, Any, LossOf], Step]:
    def build(model: nn.Module, mesh: Any, loss_of: LossOf) -> Step:
        import deepspeed as ds

        # begin
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "tensor_parallel": {"autotp_size": TENSOR},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": False},
        }
        model = ds.tp_model_init(model, tp_size=TENSOR, dtype=torch.float32)
        engine, *_ = ds.initialize(model=model, config=config)
        # end

        def step() -> float:
            loss = loss_of(engine)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step

    return build


SETTINGS: dict[str, Callable[[nn.Module, Any, LossOf], Step]] = {
    "shardwise stage 1": with_shardwise(1),
    "shardwise stage 2": with_shardwise(2),
    "shardwise stage 3": with_shardwise(3),
    "FSDP2": with_fsdp2,
    "DeepSpeed stage 1": with_deepspeed(1),
    "DeepSpeed stage 2": with_deepspeed(2),
}


# -- one rank ----------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.environ["DS_ACCELERATOR"] = "cpu"
    if args.worker.startswith("DeepSpeed"):
        import deepspeed as ds

        ds.init_distributed(dist_backend="gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS // TENSOR, TENSOR), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=args.layers,
        num_attention_heads=12,
        max_position_embeddings=args.sequence,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    torch.manual_seed(1 + dist.get_rank() // TENSOR)
    tokens = torch.randint(0, VOCABULARY, (args.batch, args.sequence))
    step = SETTINGS[args.worker](model, mesh, lambda m: m(input_ids=tokens, labels=tokens).loss)
    del model
    return measure(step, args.steps, sampled_steps=1)


# -- all of them -------------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker:
        tell(args.out, lambda: train(args))
    settings = args.only or list(SETTINGS)
    passed_on = {name: getattr(args, name) for name in ("layers", "batch", "sequence", "steps")}
    found = run_rounds(
        settings,
        args.rounds,
        lambda setting, place: launch_ranks(__file__, setting, passed_on, RANKS, args.timeout_s, place),
        tempfile.gettempdir(),
    )
    print(f"{args.layers} layers, batch {args.batch}, sequence {args.sequence}, {args.rounds} rounds of {args.steps} steps\n")
    print("| system | step s | x FSDP2 | CPU s | x FSDP2 | peak GB | loss | lines |")
    print("|---" * 8 + "|")
    for setting in found:
        print(f"| {setting} | {' | '.join(figures(found, setting, 'FSDP2', cpu=True))} | {num_lines(SETTINGS[setting])} |")
    print(f"\nThe plan, which shardwise and FSDP2 share, has {num_lines(divided)} lines; they are not counted.")
    print_errors(found)


def num_lines(function: Callable[..., Any]) -> int:
    """Lines between the marks of a setting's function, or of all of it, without imports."""
    lines = [line.strip() for line in inspect.getsource(function).splitlines()[1:]]
    begin = next((number for number, line in enumerate(lines) if line == "# begin"), -1)
    end = next((number for number, line in enumerate(lines) if line == "# end"), len(lines))
    return sum(bool(line) and not line.startswith(("import", "from", '"""', "return")) for line in lines[begin + 1 : end])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", action="append", choices=SETTINGS)
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
