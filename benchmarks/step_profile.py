"""Where a step's time goes, from the library's own named events.

    python benchmarks/step_profile.py [--stage 3] [--shape gpt2-124m] [--steps 3] [--rounds 2] [--out profile]

Runs the same model over shared memory and over pairwise messages with and without prefetch, interleaved, and prints for
each how the training thread spent its step: computing, in gathers, waiting for reductions, at fences and agreements, in the
optimizer, in hooks. `exposed` is the share of the step in which it waited for other ranks or for gathers. Writes a picture
(`<out>.png`, needs matplotlib) and a trace for Perfetto or chrome://tracing (`<out>.json`) of one step of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from compare import SHAPES
from ranks import run_ranks

CONFIGURATIONS = {
    "shared memory": dict(transport="shared"),
    "pairwise, no prefetch": dict(transport="pairwise", prefetch_bytes=0),
    "pairwise, prefetch": dict(transport="pairwise"),
}
PARTS = {
    "gather": "start gather",
    "gathered": "wait for gather",
    "refresh": "refresh",
    "reduced": "wait for reduce",
    "fence": "fence",
    "backward end": "agree",
    "update": "optimizer",
    "hook": "hooks",
}
COLUMNS = ["compute", *PARTS.values()]
EXPOSED = ("start gather", "wait for gather", "refresh", "wait for reduce", "fence", "agree")


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    found: dict[str, list[dict]] = {name: [] for name in args.only or CONFIGURATIONS}
    for number in range(args.rounds):
        for name in found:
            found[name].append(launch(name, args))
            print(f"round {number + 1} {name}", file=sys.stderr)
    print(f"{args.shape}, stage {args.stage}, {args.ranks} ranks, sequence {args.sequence}, batch {args.batch}; milliseconds of")
    print(f"the training thread, means over ranks, medians of {args.rounds} rounds x {args.steps} steps\n")
    print(f"| transport | step | {' | '.join(COLUMNS)} | exposed | on the lanes meanwhile |")
    print("|---" * (len(COLUMNS) + 4) + "|")
    for name, rounds in found.items():
        steps = [step for r in rounds for step in r["steps"]]
        cells = {c: statistics.median(s[c] for s in steps) for c in ["step", *COLUMNS, "lanes"]}
        share = statistics.median(sum(s[c] for c in EXPOSED) / s["step"] for s in steps)
        print(
            f"| {name} | {cells['step']:.0f} | " + " | ".join(f"{cells[c]:.1f}" for c in COLUMNS) + f" | {100 * share:.1f}% | "
            f"{cells['lanes']:.0f} |"
        )
    print("\nhooks of rank 0, microseconds without what they wait for: median, and (calls per step)\n")
    names = sorted({hook for rounds in found.values() for hook in rounds[0]["hooks"]})
    print(f"| transport | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for name, rounds in found.items():
        print(f"| {name} | {' | '.join(hook_cell([r['hooks'].get(hook, []) for r in rounds], args.steps) for hook in names)} |")
    last = {name: rounds[-1]["events"] for name, rounds in found.items()}
    write_trace(last, Path(f"{args.out}.json"))
    write_picture(last, Path(f"{args.out}.png"))


def hook_cell(rounds: list[list[float]], steps: int) -> str:
    """The median time of one hook over all rounds, and how often a step calls it."""
    times = [t for r in rounds for t in r]
    return f"{statistics.median(times):.0f} ({len(times) / steps / len(rounds):.0f})" if times else "-"


def launch(name: str, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        outs = [Path(directory) / f"rank-{rank}.json" for rank in range(args.ranks)]
        command = [sys.executable, __file__, "--worker", name, f"--stage={args.stage}", f"--shape={args.shape}"]
        command += [f"--steps={args.steps}", f"--batch={args.batch}", f"--sequence={args.sequence}"]
        run_ranks([[*command, f"--out={out}"] for out in outs], args.timeout_s, name)
        ranks = [json.loads(out.read_text()) for out in outs]
    steps = [
        {key: statistics.mean(rank["steps"][number][key] for rank in ranks) for key in ranks[0]["steps"][number]}
        for number in range(args.steps)
    ]
    return {"steps": steps, "hooks": ranks[0]["hooks"], "events": ranks[0]["events"]}


def work(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import shardwise as sw
    from shardwise.testing.models import GPT, GPTConfig
    from systems import adamw, plain_step

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    model = GPT(GPTConfig(**shape))
    optimizer = adamw(model.parameters())
    run = sw.shard(model, optimizer, stage=args.stage, **CONFIGURATIONS[args.worker])
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, shape["vocabulary"], (args.batch, args.sequence + 1), generator=generator)
    step = plain_step(model, optimizer, lambda m: m(tokens[:, :-1], tokens[:, 1:]))
    for _ in range(8 if run.transport.gathers_ahead else 3):  # records the trace, and lets the depth settle
        step()
    run.events.is_detailed = True
    steps = []
    hooks: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.steps):
        run.events.clear()
        begin = time.perf_counter()
        step()
        end = time.perf_counter()
        events = list(run.events)
        spent = dict.fromkeys(COLUMNS, 0.0)
        for event, seconds in exclusive([e for e in events if e.duration_s and not e.lane]):
            spent[PARTS[event.kind]] += 1e3 * seconds
            if event.kind == "hook":
                hooks[event.subject].append(1e6 * seconds)
        spent["step"] = 1e3 * (end - begin)
        spent["compute"] = spent["step"] - sum(spent[c] for c in COLUMNS)
        spent["lanes"] = 1e3 * sum(e.duration_s for e in events if e.lane)
        steps.append(spent)
    kept = [
        dict(start=e.time_s - e.duration_s - begin, duration=e.duration_s, kind=e.kind, subject=e.subject, lane=e.lane)
        for e in events
        if e.duration_s
    ]
    kept.append(dict(start=0.0, duration=end - begin, kind="step", subject="", lane=""))
    Path(args.out).write_text(json.dumps({"steps": steps, "hooks": hooks, "events": kept}))
    dist.barrier()
    os._exit(0)


def exclusive(events: list) -> list[tuple[Any, float]]:
    """Each event with its seconds without the events inside it."""
    found: list[list] = []
    open_: list[tuple[float, list]] = []  # (end, entry)
    for event in sorted(events, key=lambda e: (e.time_s - e.duration_s, -e.duration_s)):
        start = event.time_s - event.duration_s
        while open_ and open_[-1][0] <= start:
            open_.pop()
        if open_:
            open_[-1][1][1] -= event.duration_s
        entry = [event, event.duration_s]
        found.append(entry)
        open_.append((event.time_s, entry))
    return [(event, max(seconds, 0.0)) for event, seconds in found]


def write_trace(last: dict[str, list[dict]], path: Path) -> None:
    """Chrome's trace format: one process per configuration, one thread per lane."""
    rows = []
    for number, (name, events) in enumerate(last.items()):
        rows.append(dict(ph="M", name="process_name", pid=number, args=dict(name=name)))
        for event in events:
            title = f"{event['kind']} {event['subject']}".strip()
            begin, length = 1e6 * event["start"], 1e6 * event["duration"]
            rows.append(dict(ph="X", name=title, pid=number, tid=event["lane"] or "training", ts=begin, dur=length))
    path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
    print(f"\ntrace: {path}")


def write_picture(last: dict[str, list[dict]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install -e '.[bench]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [*PARTS, "reduce"]
    colours = {kind: f"C{number}" for number, kind in enumerate(kinds)}
    figure, axes = pyplot.subplots(len(last), 1, figsize=(14, 1.8 * len(last) + 1), sharex=True, squeeze=False)
    for axis, (name, events) in zip(axes[:, 0], last.items(), strict=True):
        lanes = ["", *sorted({e["lane"] for e in events} - {""})]
        for event in sorted(events, key=lambda e: -e["duration"]):
            row = lanes.index(event["lane"])
            colour = "0.9" if event["kind"] == "step" else colours[event["kind"]]
            axis.broken_barh([(1e3 * event["start"], 1e3 * event["duration"])], (row - 0.4, 0.8), color=colour)
        axis.set_yticks(range(len(lanes)), ["training", *lanes[1:]])
        axis.invert_yaxis()
        axis.set_title(name, loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("milliseconds of one step, rank 0; grey is computation")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in kinds]
    figure.legend(handles, [PARTS.get(kind, "reduce (lane)") for kind in kinds], ncol=8, loc="upper center", fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", action="append", choices=CONFIGURATIONS, help="one of them; may be repeated")
    parser.add_argument("--out", default="profile")
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
