"""Python values as JSON and back, without loss: floats to the last bit, tuples as tuples, small tensors, no pickle.

Used for what is not a parameter's state: step counts, hyperparameters, a scheduler's or a user's own values. Parsing refuses
whatever this module would not have written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import CheckpointError

MAX_DEPTH = 64
"""Nesting of values, in files and in what users give to `run.save`."""
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Dtypes that a checkpoint may contain, by the name used in it."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TAG = "$"  # the key that marks an object as something other than a dict


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a checkpoint."""
    if dtype not in _NAMES:
        raise CheckpointError(f"values of dtype {dtype} cannot be saved; use one of {', '.join(DTYPES)}.")
    return _NAMES[dtype]


def encode(value: Any, what: str, stored: dict[str, torch.Tensor] | None = None, depth: int = 0) -> Any:
    """A value as something that `json.dumps` accepts; `what` names it in errors.

    Tensors become part of the text or, if `stored` is given, are put there under a key.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{what} is nested more than {MAX_DEPTH} levels deep, or contains itself.")
    if value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    if isinstance(value, int):
        return {_TAG: "int", "digits": hex(value)}
    if isinstance(value, float):
        return {_TAG: "float", "digits": value.hex()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{what}[{number}]", stored, depth + 1) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        if stored is not None:
            key = f"extra.{len(stored)}"
            stored[key] = data.view(-1)
            return {_TAG: "stored", "key": key, "dtype": dtype_name(data.dtype), "shape": list(data.shape)}
        raw = bytes(data.view(-1).view(torch.uint8).tolist()) if data.numel() else b""
        return {_TAG: "tensor", "dtype": dtype_name(data.dtype), "shape": list(data.shape), "bytes": raw.hex()}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
            return {key: encode(item, f"{what}[{key!r}]", stored, depth + 1) for key, item in value.items()}
        keys = [encode(key, f"a key of {what}", None, depth + 1) for key in value]
        items = [encode(item, f"{what}[{key!r}]", stored, depth + 1) for key, item in value.items()]
        return {_TAG: "dict", "pairs": [list(pair) for pair in zip(keys, items, strict=True)]}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which cannot be saved: a checkpoint holds None, bool, int, float, str, tensors, "
        "lists, tuples and dicts of them. Convert it, for example with its own state_dict()."
    )


def decode(value: Any, what: str, stored: Callable[[str], torch.Tensor] | None = None) -> Any:
    """The value that `encode` has encoded; raises CheckpointError for anything else. `stored` returns a tensor by its key."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, list):
        return [decode(item, what, stored) for item in value]
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} contains a {type(value).__name__} where a checkpoint has none.")
    kind = value.get(_TAG)
    try:
        if kind is None:
            return {key: decode(item, what, stored) for key, item in value.items()}
        if kind == "int":
            return int(value["digits"], 16)
        if kind == "float":
            return float.fromhex(value["digits"])
        if kind == "tuple":
            return tuple(decode(item, what, stored) for item in value["items"])
        if kind == "dict":
            return {decode(key, what): decode(item, what, stored) for key, item in value["pairs"]}
        if kind == "stored" and stored is not None:
            found = stored(value["key"])
            if found.dtype != DTYPES[value["dtype"]]:
                raise ValueError(f"a stored tensor has dtype {found.dtype}")
            return found.view(value["shape"])
        if kind == "tensor":
            raw = bytearray.fromhex(value["bytes"])
            found = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            return found.view(DTYPES[value["dtype"]]).view(value["shape"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{what} contains a malformed {kind} ({error!r}).") from None
    raise CheckpointError(f"{what} contains a value of unknown kind {kind!r}.")


def dumps(value: Any) -> str:
    """JSON text of a value that `encode` returned: one form only, so that equal values have equal texts."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False, ensure_ascii=True)


def loads(text: bytes, what: str, *, allows_floats: bool = False) -> Any:
    """Parse JSON text strictly: no duplicate keys, no NaN, no floats unless `allows_floats`, no deep nesting."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("an object has the same key twice")
        return found

    def refuse(token: str) -> Any:
        raise ValueError(f"the number {token} is not allowed")

    parse_float = float if allows_floats else refuse
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_constant=refuse, parse_float=parse_float)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid: {str(error) or 'it is nested too deep'}.") from None
