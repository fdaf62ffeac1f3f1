"""The native Adam beside torch's and DeepSpeed's, in one interleaved run.

    python benchmarks/adam.py [--numel 33554432] [--rounds 9]

fp32: gradient, parameter and moments in fp32. Mixed: a bf16 gradient comes in and a bf16 copy of the parameter goes out; torch
needs a cast before its fused AdamW and one after. GB/s counts the bytes each path must move; the last column compares with a
plain copy. Then 100 steps element by element against torch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from shardwise import native
from shardwise.optim import adam

BYTES = {"fp32": 28, "mixed": 28}
"""Per element: fp32 reads 4 vectors and writes 3; mixed reads 3.5 and writes 3.5."""


def main() -> None:
    args = parse()
    numel = args.numel
    torch.manual_seed(0)
    print(f"{numel} elements, {torch.get_num_threads()} threads, torch {torch.__version__}, kernels {native.description()}\n")
    paths = {**fp32_paths(numel), **mixed_paths(numel)}
    source, target = torch.rand(numel), torch.empty(numel)
    found: dict[str, list[float]] = {name: [] for name in ["copy", *paths]}
    for _ in range(args.rounds):
        found["copy"].append(seconds(lambda: target.copy_(source)))
        for name, step in paths.items():
            found[name].append(seconds(step))
    copy_rate = 8 * numel / statistics.median(found["copy"])
    print(f"copy: {copy_rate / 1e9:.1f} GB/s\n")
    print("| path | ms | x torch (larger is faster) | GB/s | share of copy |")
    print("|---" * 5 + "|")
    for name in paths:
        kind = name.partition(" ")[0]
        middle = statistics.median(found[name])
        rate = BYTES[kind] * numel / middle
        faster = statistics.median(found[f"{kind} torch"]) / middle
        print(f"| {name} | {1e3 * middle:.1f} | {faster:.2f} | {rate / 1e9:.1f} | {rate / copy_rate:.2f} |")
    print()
    agreement(100)


def seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def fp32_paths(numel: int) -> dict[str, Callable[[], object]]:
    grad = torch.randn(numel)
    theirs = torch.nn.Parameter(torch.randn(numel))
    theirs.grad = grad
    fused = torch.optim.AdamW([theirs], lr=1e-3, fused=True)
    master, mean, square = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    paths = {"fp32 torch": fused.step}
    if native.library() is not None:
        paths["fp32 shardwise"] = lambda: adam.update(fused.param_groups[0], 5, master, mean, square, grad)
    deepspeed = deepspeed_adam(torch.float32, numel, grad)
    if deepspeed is not None:
        paths["fp32 DeepSpeed"] = deepspeed
    return paths


def mixed_paths(numel: int) -> dict[str, Callable[[], object]]:
    grad = torch.randn(numel).bfloat16()
    theirs = torch.nn.Parameter(torch.randn(numel))
    wide = torch.empty(numel)
    theirs.grad = wide
    out = torch.empty(numel, dtype=torch.bfloat16)
    fused = torch.optim.AdamW([theirs], lr=1e-3, fused=True)

    def torch_step() -> None:
        wide.copy_(grad)
        fused.step()
        out.copy_(theirs.detach())

    master, mean, square = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    rounded = torch.empty(numel, dtype=torch.bfloat16)
    paths: dict[str, Callable[[], object]] = {"mixed torch": torch_step}
    if native.library() is not None:
        paths["mixed shardwise"] = lambda: adam.update(fused.param_groups[0], 5, master, mean, square, grad, out=rounded)
    deepspeed = deepspeed_adam(torch.bfloat16, numel, grad)
    if deepspeed is not None:
        paths["mixed DeepSpeed"] = deepspeed
    return paths


def deepspeed_adam(dtype: torch.dtype, numel: int, grad: torch.Tensor) -> Callable[[], object] | None:
    """DeepSpeed's CPU Adam in its own pure form; in 16 bits parameters and moments are 16 bits wide there."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        param = torch.nn.Parameter(torch.randn(numel).to(dtype))
        optimizer = DeepSpeedCPUAdam([param], lr=1e-3, fp32_optimizer_states=True)
        param.grad = grad.to(dtype)
        optimizer.step()
    except Exception as error:
        print(f"DeepSpeed's CPU Adam for {dtype}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
        return None
    return optimizer.step


def agreement(steps: int) -> None:
    """Largest element-wise differences from torch after some steps."""
    if native.library() is None:
        return
    numel = 1_000_003
    start = torch.randn(numel)
    for label, options in (("default AdamW", dict(foreach=False)), ("fused AdamW", dict(fused=True))):
        generator = torch.Generator().manual_seed(1)
        param = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([param], lr=1e-3, **options)
        master, mean, square = start.clone(), torch.zeros(numel), torch.zeros(numel)
        for step in range(1, steps + 1):
            grad = torch.randn(numel, generator=generator)
            param.grad = grad
            optimizer.step()
            adam.update(optimizer.param_groups[0], step, master, mean, square, grad)
        state = optimizer.state[param]
        gap = (master - param.detach()).abs()
        print(
            f"{label}, {steps} steps of {numel} elements: {int((gap > 0).sum())} parameters differ, by at most {gap.max():.2e}; "
            f"moments differ in {int((mean != state['exp_avg']).sum())} and {int((square != state['exp_avg_sq']).sum())} elements"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 25)
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
