"""Which torch operations need only a parameter's metadata or strides, and which ones a freed parameter refuses."""

from __future__ import annotations

from typing import Any

import torch

METADATA = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "ndim",
        "names",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "is_complex",
        "is_floating_point",
        "is_signed",
        "is_inference",
        "itemsize",
        "nbytes",
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "element_size",
        "__len__",
        "__hash__",
        "__dir__",
        "grad_fn",
        "_version",
        "retains_grad",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "_base",
        "_grad",
        "_is_view",
        "get_device",
        "output_nr",
        "is_sparse_csr",
        "is_xla",
        "is_mps",
        "is_xpu",
        "is_vulkan",
        "is_maia",
        "is_ipu",
        "is_mtia",
        "is_leaf",
        "is_conj",
        "is_neg",
        "is_same_size",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__torch_function__",
        "is_shared",
        "is_pinned",
        "is_distributed",
        "requires_grad_",
        "setting .requires_grad",
        "retain_grad",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
        "result_type",
        "is_tensor",
    }
)
"""Operations that need no values: answered from the placeholder, which has the true shape, dtype and device."""
COLLECTIVES = "torch.distributed"
"""How names of collectives begin; they change tensors without counting a version."""
GEOMETRY = frozenset({"stride", "is_contiguous", "storage_offset", "is_non_overlapping_and_dense", "dim_order"})
CASTS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous"})
"""Operations that return the tensor itself if nothing would change."""
OVERWRITES = frozenset({"copy_", "fill_", "normal_", "uniform_", "zero_"})
"""Operations that give a tensor new values whatever its old ones were; so do all of `torch.nn.init`."""
REMEDIES = {
    "setting .data while a graph needs the old values": "Assign before the forward pass, or after its backward.",
    "deepcopy": "A copy needs the whole model's memory: make it inside `with run.gathered():`, on every rank.",
    "pickle": "Save `run.full_state_dict()` instead: it is collected Unit by Unit, and its tensors are ordinary ones.",
    "share_memory_": "Shards are in shared memory already where ranks share a host; share tensors of your own instead.",
    "data_ptr": "An address is good only while the parameter is gathered: ask inside `with run.gathered(module):`.",
    "untyped_storage": "Storage is there only while the parameter is gathered: ask inside `with run.gathered(module):`.",
    "storage": "Storage is there only while the parameter is gathered: ask inside `with run.gathered(module):`.",
    "_typed_storage": "Storage is there only while the parameter is gathered: ask inside `with run.gathered(module):`.",
    "__dlpack__": "Memory can be handed out only while the parameter is gathered: do it inside `with run.gathered(module):`.",
    "set_": "Give it values with copy_(), or set_() it inside `with run.gathered(module):`.",
    "tying through .data": "Tie parameters as one, `module.weight = other.weight`, before sw.shard(); or copy values: copy_().",
    "training a view": "It is a place in a sharded parameter, without memory of its own: take a copy, `.detach().clone()`.",
    "torch.autograd.grad": "Its gradient comes tile by tile: use backward(), then run.grad(name).",
    "a view of a tiled parameter": "Take it inside `with run.gathered(module):`, or a copy: `.detach().clone()`.",
    "resize_": "A sharded parameter keeps its shape: change it before sw.shard().",
}
"""Operations that a freed parameter refuses, and what to do instead."""
PAST_PYTHON = "below Python, as in torch.func transforms,"
CONVERSIONS = frozenset({"to", "float", "double", "half", "bfloat16", "cuda", "cpu", "type", "setting .data"})


def name_of(func: Any) -> str:
    """The name of an operation, for messages and the tables above."""
    name = getattr(func, "__name__", None) or str(func)
    if str(getattr(func, "__module__", "")).startswith(COLLECTIVES):
        return f"{COLLECTIVES}.{name}"
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        return attribute if name == "__get__" else f"setting .{attribute}"
    return name


def is_overwrite(func: Any, name: str) -> bool:
    """Whether an operation gives a tensor new values whatever its old ones were, without autograd's record."""
    if getattr(func, "__module__", "") == "torch.nn.init":
        return name.endswith("_")
    return name in OVERWRITES and not torch.is_grad_enabled()
