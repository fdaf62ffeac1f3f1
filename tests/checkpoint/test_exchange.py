"""Weights go to and come from Hugging Face directories, to the last bit; what does not fit changes nothing."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from launching import run_program
from shardwise.checkpoint import export_checkpoint
from shardwise.errors import CheckpointError, ConfigError, ModelError
from shardwise.testing import RankPool

DISK = sw.Offload(params="disk", grads="disk", optimizer="disk", step_bytes=1 << 16)
Options = dict[str, Any]


def _transformers_model(kind: str, seed: int = 3) -> Any:
    import transformers

    torch.manual_seed(seed)
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=2, n_embd=48, n_head=4, vocab_size=211, n_positions=32, bos_token_id=1, eos_token_id=2
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=97,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokens() -> torch.Tensor:
    return torch.arange(12).view(2, 6) + torch.distributed.get_rank()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens()).logits
    return found


def trained(model: Any, options: Options, steps: int = 2) -> tuple[sw.Run, torch.optim.Optimizer]:
    """Sharded, and trained for a few steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run = sw.shard(model, optimizer, min_unit_bytes=0, **options)
    for _ in range(steps):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return run, optimizer


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], value) for name, value in expected.items())


# -- export --------------------------------------------------------------------------------------------------------


def exported(path: str, kind: str, options: Options, max_file_bytes: int) -> tuple[bool, bool]:
    import transformers

    model = _transformers_model(kind)
    run, _ = trained(model, options)
    run.export(path, max_file_bytes=max_file_bytes)
    state = run.full_state_dict(rank0_only=False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    result = torch.equal(logits(model), logits(plain)), same(state, plain.state_dict())
    run.close()
    return result


@pytest.mark.parametrize(
    ("kind", "options", "max_file_bytes"),
    [
        ("gpt2", {"stage": 3}, 10**9),
        ("gpt2", {"stage": 3, "offload": DISK}, 50_000),
        ("llama", {"stage": 3, "offload": DISK}, 10**9),
        ("llama", {"stage": 1}, 50_000),
    ],
)
def test_an_exported_model_loads_with_from_pretrained(
    pool: RankPool, tmp_path: Path, kind: str, options: Options, max_file_bytes: int
) -> None:
    path = tmp_path / "new" / "exported"
    assert pool.run(exported, str(path), kind, options, max_file_bytes) == [(True, True), (True, True)]
    assert os.listdir(tmp_path / "new") == ["exported"], "nothing else is left"
    files = sorted(path.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        found |= load_file(file)
        assert sum(t.numel() * t.element_size() for t in load_file(file).values()) <= max_file_bytes
    assert ("lm_head.weight" in found) == (kind == "llama"), "a tied tensor is there once"
    assert ("transformer.wte.weight" in found) == (kind == "gpt2")
    if max_file_bytes < 10**9:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
        assert {path / name for name in index["weight_map"].values()} == set(files) and len(files) > 1
        assert index["weight_map"].keys() == found.keys()
    else:
        assert [file.name for file in files] == ["model.safetensors"]


class Strided(nn.Module):
    """Parameters whose elements are not in row-major order, buffers of several dtypes, a tied parameter, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(40, 30).t())
        self.norm = nn.BatchNorm2d(8)
        self.again = nn.Linear(40, 30, bias=False)
        self.again.weight = self.turned
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.conv(x)).square().mean() + self.again(torch.ones(2, 40)).square().sum()
        return found + self.empty.sum()


def strided(path: str, options: Options) -> list[bool]:
    """Trained, exported, saved, and read again in every way."""
    torch.manual_seed(0)
    model = Strided()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = sw.shard(model, optimizer, **options)
    model(torch.randn(2, 6, 5, 5)).backward()
    optimizer.step()
    run.export(f"{path}/plain")
    run.export(f"{path}/half", dtype=torch.bfloat16)
    run.save(f"{path}/saved")
    expected = run.full_state_dict(rank0_only=False)
    run.close()
    checks = []
    for name in ("plain", "saved", "plain/model.safetensors"):
        with sw.sharded_init(weights=f"{path}/{name}"):
            built = Strided()
        other = sw.shard(built, stage=3)
        checks.append(same(other.full_state_dict(rank0_only=False), expected))
        other.close()
        for stage in (0, 3):
            again = sw.shard(Strided(), stage=stage)
            assert sw.load_pretrained(again._model, f"{path}/{name}") == ()
            checks.append(same(again.full_state_dict(rank0_only=False), expected))
            again.close()
        alone = Strided()
        sw.load_pretrained(alone, f"{path}/{name}")
        checks.append(same(alone.state_dict(), expected))
    return checks


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 3, "offload": DISK}, {"stage": 0}])
def test_any_layout_goes_there_and_back(pool: RankPool, tmp_path: Path, options: Options) -> None:
    for checks in pool.run(strided, str(tmp_path), options):
        assert len(checks) == 12 and all(checks), checks
    found, half = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "half"))
    assert found.keys() == half.keys() and "again.weight" not in found
    for name, value in found.items():
        assert torch.equal(half[name], value.to(torch.bfloat16) if value.is_floating_point() else value)
    assert half["norm.num_batches_tracked"].dtype == torch.int64
    export_checkpoint(tmp_path / "saved", tmp_path / "offline")
    export_checkpoint(tmp_path / "saved", tmp_path / "pieces", dtype=torch.bfloat16, max_file_bytes=3000)
    offline = load_file(tmp_path / "offline" / "model.safetensors")
    assert offline.keys() == found.keys() and all(torch.equal(offline[name], value) for name, value in found.items())
    pieces: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "pieces").glob("model-0000?-of-0000?.safetensors")):
        pieces |= load_file(file)
    assert pieces.keys() == half.keys() and all(torch.equal(pieces[name], value) for name, value in half.items())


def adapters(path: str, stage: int) -> dict[str, Any]:
    import peft

    base = _transformers_model("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    run, _ = trained(model, {"stage": stage})
    try:
        run.export(path + "-all")
        refused = "nothing"
    except ConfigError as error:
        refused = str(error)
    run.export(path, adapters_only=True, max_file_bytes=100)
    plain = peft.PeftModel.from_pretrained(_transformers_model("llama"), path)
    result = {"same": torch.equal(logits(model), logits(plain)), "refused": refused}
    run.close()
    return result


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_alone_load_with_peft(pool: RankPool, tmp_path: Path, stage: int) -> None:
    for found in pool.run(adapters, str(tmp_path / "lora"), stage):
        assert found["same"]
        assert "adapters_only=True" in found["refused"]
    assert os.listdir(tmp_path) == ["lora"]
    assert sorted(os.listdir(tmp_path / "lora")) == ["adapter_config.json", "adapter_model.safetensors"]
    names = load_file(tmp_path / "lora" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names and len(names) == 8


# -- weights into a model ------------------------------------------------------------------------------------------


def filled(path: str, kind: str, dtype: str, options: Options) -> dict[str, bool]:
    import transformers

    chosen = getattr(torch, dtype)
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=chosen).state_dict()
    checks = {}
    like = _transformers_model(kind)
    with sw.sharded_init(weights=path, offload=sw.Offload(params="disk") if "offload" in options else None):
        model = type(like)._from_config(like.config, dtype=chosen)
    run = sw.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    checks["sharded_init"] = same(run.full_state_dict(rank0_only=False), expected)
    checks["runs"] = bool(logits(model).isfinite().all())
    run.close()

    model = _transformers_model(kind, seed=5).to(chosen)
    run, _ = trained(model, options)
    states = optimizer_states(run)
    checks["left out"] = sw.load_pretrained(model, path) == ()
    checks["load_pretrained"] = same(run.full_state_dict(rank0_only=False), expected)
    checks["masters"] = all(torch.equal(value, expected[name].to(value.dtype)) for name, value in run.iter_masters())
    pairs = list(zip(states, optimizer_states(run), strict=True))
    checks["optimizer"] = len(pairs) > 10 and all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in pairs)
    run.close()
    return checks


def optimizer_states(run: sw.Run) -> list[tuple[str, int, torch.Tensor]]:
    ranges = run._survivors.ranges()
    return [(kind, start, values.clone()) for _, kind, start, values in ranges if kind not in ("master", "value")]


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("gpt2", "float32", {"stage": 3}),
        ("gpt2", "bfloat16", {"stage": 3, "precision": "bf16"}),
        ("llama", "float32", {"stage": 3, "offload": DISK}),
        ("llama", "bfloat16", {"stage": 2}),
    ],
)
def test_pretrained_weights_are_those_of_from_pretrained(
    pool: RankPool, tmp_path: Path, kind: str, dtype: str, options: Options
) -> None:
    _transformers_model(kind, seed=11).save_pretrained(tmp_path, max_shard_size="50KB" if kind == "llama" else "5GB")
    for checks in pool.run(filled, str(tmp_path), kind, dtype, options):
        assert len(checks) == 6 and all(checks.values()), checks


def nothing_drawn(path: str, kind: str) -> tuple[bool, bool]:
    """Whether building draws random numbers, without weights and with them."""
    import transformers

    cls = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM}[kind]
    config = transformers.AutoConfig.from_pretrained(path)

    def draws(**options: Any) -> bool:
        before = torch.get_rng_state()
        with sw.sharded_init(**options):
            model = cls(config)
        sw.shard(model, stage=3).close()
        return not torch.equal(before, torch.get_rng_state())

    return draws(), draws(weights=path)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_no_initialisation_is_computed(pool: RankPool, tmp_path: Path, kind: str) -> None:
    _transformers_model(kind).save_pretrained(tmp_path)
    assert pool.run(nothing_drawn, str(tmp_path), kind) == [(True, False)] * 2


def test_a_model_and_its_base_differ_by_a_prefix(tmp_path: Path) -> None:
    whole = _transformers_model("gpt2", seed=1)
    whole.transformer.save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "whole")
    assert "h.0.ln_1.weight" in load_file(tmp_path / "base" / "model.safetensors")
    model = _transformers_model("gpt2", seed=2)
    assert sw.load_pretrained(model, tmp_path / "base") == ()
    assert same(model.state_dict(), whole.state_dict())
    base = _transformers_model("gpt2", seed=2).transformer
    assert sw.load_pretrained(base, tmp_path / "whole") == ()
    assert same(base.state_dict(), whole.transformer.state_dict())
    extra = {**load_file(tmp_path / "base" / "model.safetensors"), "h.0.attn.bias": torch.ones(1)}  # as old files on the hub
    save_file(extra, tmp_path / "old.safetensors")
    assert sw.load_pretrained(model, tmp_path / "old.safetensors") == ()


class HeadFirst(nn.Module):
    """The head comes first, but files have the table's name."""

    _tied_weights_keys: Any = ()

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)
        self.table = nn.Embedding(9, 4)
        self.head.weight = self.table.weight


@pytest.mark.parametrize(
    ("tied", "kept"),
    [(["head.weight"], "table.weight"), ({"head.weight": "table.weight"}, "table.weight"), (None, "head.weight")],
)
def test_a_tied_tensor_is_written_under_the_name_that_is_kept(tmp_path: Path, tied: Any, kept: str) -> None:
    model = HeadFirst()
    model._tied_weights_keys = tied
    run = sw.shard(model, stage=3)
    run.export(tmp_path / "tied")
    expected = run.full_state_dict()
    run.close()
    found = load_file(tmp_path / "tied" / "model.safetensors")
    assert list(found) == [kept] and torch.equal(found[kept], expected["head.weight"])
    other = HeadFirst()
    assert sw.load_pretrained(other, tmp_path / "tied") == () and torch.equal(other.head.weight, found[kept])
    with sw.sharded_init(weights=tmp_path / "tied"):
        built = HeadFirst()
    assert torch.equal(sw.shard(built, stage=3).master("head.weight"), found[kept])


def test_a_hugging_face_cache_leads_to_its_blobs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    model = nn.Linear(3, 2)
    save_file({name: value.detach().clone() for name, value in model.state_dict().items()}, tmp_path / "blobs" / "1234")
    (tmp_path / "snapshots" / "abc" / "model.safetensors").symlink_to("../../blobs/1234")
    other = nn.Linear(3, 2)
    sw.load_pretrained(other, tmp_path / "snapshots" / "abc")
    assert same(other.state_dict(), dict(model.state_dict()))


# -- what does not fit ---------------------------------------------------------------------------------------------


def _state() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}


def _index(path: Path, places: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1.5}, "weight_map": places}))


def _missing(path: Path) -> None:
    save_file({"weight": torch.ones(2, 3), "other": torch.ones(1)}, path / "model.safetensors")


def _shape(path: Path) -> None:
    save_file({**_state(), "weight": torch.ones(3, 2)}, path / "model.safetensors")


def _pickle(path: Path) -> None:
    torch.save(_state(), path / "pytorch_model.bin")


def _truncated(path: Path) -> None:
    save_file(_state(), path / "model.safetensors")
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 4)


def _linked(path: Path) -> None:
    save_file(_state(), path.parent / "elsewhere.safetensors")
    (path / "model.safetensors").symlink_to(path.parent / "elsewhere.safetensors")


def _pipe(path: Path) -> None:
    os.mkfifo(path / "model.safetensors")


def _outside(path: Path) -> None:
    save_file(_state(), path.parent / "x.safetensors")
    _index(path, {"weight": "../x.safetensors", "bias": "../x.safetensors"})


def _lost(path: Path) -> None:
    _index(path, {"weight": "model-1.safetensors"})


def _contradicting(path: Path) -> None:
    save_file({"weight": torch.ones(2, 3)}, path / "model-1.safetensors")
    _index(path, {"weight": "model-1.safetensors", "bias": "model-1.safetensors"})


def _framed(header: dict[str, Any], data: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        text = json.dumps(header).encode()
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)

    return make


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (_missing, r"2 differences: 'bias' is not in the file; 'other' is only in the file. sw.load_pretrained"),
    "shape": (_shape, r"1 differences: 'weight' has shape \[3, 2\] in the file, \[2, 3\] in the model\.$"),
    "pickle": (_pickle, r"in pytorch_model.bin only: that is a pickle.*save_pretrained"),
    "nothing": (lambda path: None, "there are no weights in it"),
    "truncated": (_truncated, "truncated or extended"),
    "link": (_linked, "is a link"),
    "pipe": (_pipe, "is not a regular file"),
    "index leads out": (_outside, r"'../x.safetensors', which is not the name of a file beside it"),
    "index without its file": (_lost, "cannot be opened: No such file"),
    "index and file differ": (_contradicting, "says that it has 'bias', and it has not"),
    "index of something else": (lambda path: _index(path, []), "has no 'weight_map'"),
    "huge header": (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64) and None, "its header would have"),
    "unknown dtype": (_framed({"weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1"), "has dtype 'F4'"),
    "overlap": (
        _framed(
            {
                "weight": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                "bias": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
            },
            b"123",
        ),
        "begins at byte 1, 2 was expected",
    ),
    "negative": (_framed({"weight": {"dtype": "U8", "shape": [-1], "data_offsets": [0, -1]}}, b""), "contradict each other"),
    "too long": (
        _framed({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 23]}}, b"1" * 23),
        "contradict each other",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_directories_are_refused_and_change_nothing(tmp_path: Path, name: str) -> None:
    make, message = BAD[name]
    (tmp_path / "weights").mkdir()
    make(tmp_path / "weights")
    model = nn.Linear(3, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        sw.load_pretrained(model, tmp_path / "weights")
    assert same(dict(model.state_dict()), before)
    kept: list[nn.Module] = []
    with pytest.raises(CheckpointError, match=message), sw.sharded_init(weights=tmp_path / "weights"):
        kept.append(nn.Linear(3, 2))


def test_left_out_names_are_returned(tmp_path: Path) -> None:
    _missing(tmp_path)
    model = nn.Linear(3, 2)
    bias = model.bias.detach().clone()
    assert sw.load_pretrained(model, tmp_path, strict=False) == ("bias", "other")
    assert torch.equal(model.weight, torch.ones(2, 3)) and torch.equal(model.bias, bias)
    _shape(tmp_path)
    with pytest.raises(CheckpointError, match="has shape"):
        sw.load_pretrained(model, tmp_path, strict=False)


def refused(path: str, what: str) -> tuple[str, bool]:
    """The error on this rank, and whether nothing has changed."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3.0)
    run = sw.shard(model, stage=3)
    is_second = torch.distributed.get_rank() == 1
    try:
        if what == "one rank has no file":
            sw.load_pretrained(model, path + "-missing" if is_second else path)
        elif what == "does not fit":
            sw.load_pretrained(model, path)
        elif what == "exists":
            run.export(path)
        elif what == "different options":
            run.export(path + "-new", dtype="float16" if is_second else None)
        elif what == "unwritable":
            run.export("/proc/nothing/here")
        text = "nothing"
    except CheckpointError as error:
        text = str(error)
    is_same = all(bool((value == 3).all()) for value in run.full_state_dict(rank0_only=False).values())
    run.close()
    return text, is_same


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("one rank has no file", "there are no weights at"),
        ("does not fit", "'0.weight' is not in the file"),
        ("exists", "exists already"),
        ("different options", "different exports"),
        ("unwritable", "was not exported"),
    ],
)
def test_all_ranks_refuse_together(pool: RankPool, tmp_path: Path, what: str, message: str) -> None:
    (tmp_path / "weights").mkdir()
    save_file(_state(), tmp_path / "weights" / "model.safetensors")
    found = pool.run(refused, str(tmp_path / "weights"), what)
    assert all(re.search(message, text) and is_same for text, is_same in found), found
    assert os.listdir(tmp_path) == ["weights"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    save_file(_state(), tmp_path / "model.safetensors")
    kept: list[nn.Module] = []
    with pytest.raises(ModelError, match="must build one model; 2 were built: Linear, Linear"), sw.sharded_init(weights=tmp_path):
        kept += [nn.Linear(3, 2), nn.Linear(3, 2)]
    with pytest.raises(ZeroDivisionError), sw.sharded_init(weights=tmp_path):
        raise ZeroDivisionError
    with sw.sharded_init():
        model = nn.Linear(3, 2)
    with pytest.raises(ModelError, match="is not sharded yet"):
        sw.load_pretrained(model, tmp_path)
    with pytest.raises(ModelError, match="on the meta device"):
        sw.load_pretrained(nn.Linear(3, 2, device="meta"), tmp_path)
    run = sw.shard(nn.Linear(3, 2), stage=3)
    with pytest.raises(ConfigError, match="dtype int8 cannot be exported; use one of float64"):
        run.export(tmp_path / "new", dtype="int8")
    with pytest.raises(ConfigError, match="max_file_bytes=0"):
        run.export(tmp_path / "new", max_file_bytes=0)
    with pytest.raises(ConfigError, match="Linear has no adapters"):
        run.export(tmp_path / "new", adapters_only=True)
    run.close()
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.slow
def test_peak_memory_of_loading_and_of_an_export() -> None:
    """A GPT-2 of the proportions of the 774M one, 2 ranks, in processes of their own; then an offline export of another."""
    script = Path(__file__).parents[2] / "benchmarks" / "pretrained.py"
    result = run_program(
        [sys.executable, str(script), "--load", "12x512", "--export", "12x768"], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("within the bound: yes") == 4, result.stdout
    assert "0 differ from what was loaded, the same names: yes" in result.stdout, result.stdout
    peak = re.search(r"export: peak resident memory (\d+) MB", result.stdout)
    assert peak is not None and int(peak[1]) < 500, result.stdout
