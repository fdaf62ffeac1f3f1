"""What of a model is exported, under which names, and which small files go with it. Nothing is read of the parameters' values.

transformers and peft are not imported: what is asked of them is asked of the model's own attributes, or of modules that the model
itself has loaded.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.hub_files import json_bytes
from shardwise.checkpoint.matching import kept_name
from shardwise.checkpoint.plain import DTYPES, dtype_name
from shardwise.errors import CheckpointError, ConfigError


class Exported:
    """The tensors and documents of one export."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, *, adapters_only: bool) -> None:
        self._dtype = dtype
        state = model.state_dict(keep_vars=True)
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{name!r} is a {type(value).__name__}: a Hugging Face directory has tensors only. Export a model without "
                    "extra state, or use run.save(), which keeps it."
                )
        has_adapters = isinstance(getattr(model, "peft_config", None), Mapping)
        if adapters_only and not has_adapters:
            raise ConfigError(f"export(adapters_only=True): {type(model).__name__} has no adapters (no `peft_config`).")
        if has_adapters and not adapters_only:
            raise ConfigError(
                f"export(): {type(model).__name__} has adapters, which a Hugging Face directory of a model cannot hold. Pass "
                "adapters_only=True, and load them onto the base model with peft.PeftModel.from_pretrained; its "
                "merge_and_unload(), then save_pretrained(), give a merged model."
            )
        self._values = _adapters(model, state) if adapters_only else _kept(model, state)
        self.stem = "adapter_model" if adapters_only else "model"
        """How file names begin."""
        self.tensors = {key: (self._dtype_of(value), tuple(value.shape)) for key, value in self._values.items()}
        """Dtype and shape of every tensor, by its key in the export."""
        self.documents = _adapter_config(model) if adapters_only else _configs(model, self._first_dtype())
        """Small files, by name."""

    @property
    def others(self) -> dict[str, torch.Tensor]:
        """Tensors that are not partitioned: buffers."""
        return {key: value for key, value in self._values.items() if not hasattr(value, "_shardwise")}

    def wanted(self) -> dict[tuple[int, int], str]:
        """The key of each parameter, by the index of its Unit and its slot."""
        handles = {key: value._shardwise for key, value in self._values.items() if hasattr(value, "_shardwise")}
        return {(unit.index, slot): key for key, handle in handles.items() for unit, slot in handle.places}

    def _dtype_of(self, value: torch.Tensor) -> torch.dtype:
        handle = getattr(value, "_shardwise", None)
        own: torch.dtype = value.dtype if handle is None else handle.unit.dtypes.original
        dtype_name(own)
        return self._dtype if self._dtype is not None and own.is_floating_point else own

    def _first_dtype(self) -> torch.dtype | None:
        return next((dtype for dtype, _ in self.tensors.values() if dtype.is_floating_point), None)


def float_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype that parameters may be exported in, from itself or its name."""
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if dtype is not None and (found is None or found not in DTYPES.values() or not found.is_floating_point):
        known = ", ".join(name for name, known in DTYPES.items() if known.is_floating_point)
        raise ConfigError(f"dtype {str(dtype).removeprefix('torch.')} cannot be exported; use one of {known}.")
    return found


def _kept(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict with each shared tensor once, under the name that transformers keeps."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    kept = {kept_name(model, found) for found in names.values()}
    return {name: value for name, value in state.items() if name in kept}


def _adapters(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the active adapter, under the names that peft gives them."""
    peft = sys.modules.get("peft")
    if peft is None:
        raise CheckpointError(
            f"{type(model).__name__} has a peft_config, but peft is not imported: it knows the adapters' names."
        )
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=state, adapter_name=_active(model), save_embedding_layers=False
    )
    own = {id(value) for value in state.values()}
    strange = [key for key, value in found.items() if id(value) not in own]
    if strange or not found:
        raise CheckpointError(
            f"the adapter {_active(model)!r} has no values, or some that are not in the model's state dict "
            f"({', '.join(strange[:3])}): adapters of this kind cannot be exported. Use run.save()."
        )
    return found


def _active(model: Any) -> str:
    active = model.active_adapter
    if not isinstance(active, str):
        raise CheckpointError(f"{len(active)} adapters are active; export needs one. Call model.set_adapter(name) first.")
    return active


def _adapter_config(model: Any) -> dict[str, bytes]:
    config = copy.deepcopy(model.peft_config[_active(model)])
    config.inference_mode = True
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    if not fields.get("base_model_name_or_path"):
        fields["base_model_name_or_path"] = getattr(model.get_base_model(), "name_or_path", None) or None
    return {"adapter_config.json": json_bytes(fields)}


def _configs(model: Any, dtype: torch.dtype | None) -> dict[str, bytes]:
    """`config.json` and `generation_config.json`, if the model has such objects."""
    found: dict[str, bytes] = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained") and hasattr(config, "to_json_string"):
        fields = json.loads(config.to_json_string())
        fields["architectures"] = [type(model).__name__]
        if dtype is not None:
            fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = dtype_name(dtype)
        found["config.json"] = json_bytes(fields)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        found["generation_config.json"] = generation.to_json_string().encode()
    return found
