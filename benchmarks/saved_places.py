"""What it costs to let autograd keep places of parameters instead of their values (docs/decisions/0011-saved-places.md).

    python benchmarks/saved_places.py [--rounds 15]

One process, stage 3. Steps with the hooks on what autograd saves and steps without them alternate; medians of CPU seconds.
Without them these models still train rightly, because every Unit's backward is announced by an output.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import shardwise as sw
from compare import SHAPES
from shardwise.engine.saved import SavedPlaces
from shardwise.testing.models import GPT, GPTConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| shape | tensors saved | with places (s) | without (s) | ratio | us per tensor |")
    print("|---" * 6 + "|")
    for name in ("tiny", "small-blocks", "gpt2-124m"):
        print(row(name, rounds))


def row(name: str, rounds: int) -> str:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPES[name]))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = sw.shard(model, optimizer, stage=3)
    tokens = torch.randint(0, SHAPES[name]["vocabulary"], (1, 129))
    begin = SavedPlaces.begin

    def step(keeps_places: bool) -> float:
        SavedPlaces.begin = begin if keeps_places else lambda self: None  # type: ignore[method-assign]
        start = time.process_time()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        spent = time.process_time() - start
        optimizer.zero_grad()
        return spent

    saved = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += 1
        return tensor

    step(True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        step(False)
    kept, plain = [], []
    for _ in range(rounds):
        kept.append(step(True))
        plain.append(step(False))
    with_places, without = statistics.median(kept), statistics.median(plain)
    run.close()
    each = 1e6 * (with_places - without) / saved
    return f"| {name} | {saved} | {with_places:.4f} | {without:.4f} | {with_places / without:.3f} | {each:.1f} |"


if __name__ == "__main__":
    main()
