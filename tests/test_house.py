"""The house stays legible: imports go downward, door plates exist, the public surface is pinned."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import shardwise
from shardwise.config import Activations, LossScale, Offload, Precision, ShardConfig, Tiling

SOURCE = Path(shardwise.__file__).parent
LAYERS = [
    "errors", "native", "ticket", "stages", "config", "observe", "tiers", "partition", "comm", "schedule", "optim", "engine",
    "activations", "tiling", "checkpoint", "planner", "report", "testing", "reading", "run", "api", "cli",
]  # fmt: skip


def _room(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            parts = (node.module or "").split(".")
            found += [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [a.name.split(".")[1] for a in node.names if a.name.startswith("shardwise.")]
    return found


def test_imports_go_downward_only() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert len(files) > 30
    seen = 0
    for path in files:
        here = LAYERS.index(_room(path))
        for room in _imports(path):
            if room not in LAYERS:
                assert _room(path) == "cli", f"{path} imports {room} from the front door"
                continue
            seen += 1
            assert LAYERS.index(room) <= here, f"{path} imports upward from {room}"
    assert seen > 50


def test_every_room_has_a_door_plate() -> None:
    for room in LAYERS:
        plate = SOURCE / room / "__init__.py"
        if plate.exists():
            text = ast.get_docstring(ast.parse(plate.read_text()))
            assert text and "?" in text.splitlines()[0], f"{plate} does not say which question the room answers"


def test_core_import_needs_only_torch() -> None:
    allowed = {"torch", "shardwise"}
    import sys

    for path in SOURCE.rglob("*.py"):
        if _room(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{path} imports {name}"


def test_no_script_hides_a_module_of_the_standard_library() -> None:
    """A script's own directory comes first on the path: `profile.py` beside it would break whoever imports cProfile."""
    import sys

    for directory in ("benchmarks", "examples", "tests"):
        found = {path.stem for path in (SOURCE.parent.parent / directory).glob("*.py")}
        assert found and not found & set(sys.stdlib_module_names)


def test_public_surface() -> None:
    assert sorted(shardwise.__all__) == [
        "Activations", "Checkpoints", "LossScale", "Offload", "Precision", "Run", "ShardwiseError", "Tiling", "__version__",
        "linear_cross_entropy", "load_pretrained", "shard", "sharded_init", "tiling",
    ]  # fmt: skip
    assert sorted(shardwise.tiling.__all__) == ["CHUNK_BYTES", "CausalLoss", "fuse_causal_loss", "linear_cross_entropy"]
    assert list(inspect.signature(shardwise.linear_cross_entropy).parameters) == [
        "hidden", "weight", "labels", "bias", "ignore_index", "label_smoothing", "reduction", "class_weight", "logit_scale",
        "soft_cap", "chunk_bytes", "recomputes",
    ]  # fmt: skip
    public = sorted(name for name in dir(shardwise.Run) if not name.startswith("_"))
    assert public == [
        "accumulating", "catching_sigterm", "clip_grad_norm_", "close", "events", "export", "full_optimizer_state_dict",
        "full_state_dict", "gathered", "grad", "iter_full_state", "iter_grads",
        "iter_masters", "load", "load_state_dict", "loss_scale", "master", "measured_memory", "measuring_activations",
        "memory_timeline", "num_skipped_steps",
        "placement", "predicted_memory",
        "rank", "reduce", "report", "save", "selfcheck", "state_dict", "transport", "units",
    ]  # fmt: skip


def test_config_fields_are_pinned() -> None:
    assert [f.name for f in dataclasses.fields(ShardConfig)] == [
        "stage", "precision", "units", "max_unit_bytes", "min_unit_bytes", "exchange_bytes", "prefetch_bytes", "methods",
        "offload", "activations", "tiling", "buffers", "transport", "timeout_s",
    ]  # fmt: skip
    assert [f.name for f in dataclasses.fields(Precision)] == ["param", "compute", "reduce", "master", "loss_scale"]
    assert [f.name for f in dataclasses.fields(Offload)] == [
        "params", "grads", "optimizer", "path", "host_bytes", "step_bytes", "checks",
    ]  # fmt: skip
    assert [f.name for f in dataclasses.fields(Activations)] == ["checkpoint", "offload", "partition", "bytes", "path"]
    assert [f.name for f in dataclasses.fields(Tiling)] == ["max_bytes"]
    assert [f.name for f in dataclasses.fields(LossScale)] == ["initial", "growth", "backoff", "interval", "minimum"]
