"""Several modules as one model: the stages of an interleaved pipeline that one rank holds.

They are put into one tree under the names that their submodules have in the whole model. Where two stages have a container of the
same name, the tree has a container of its own with the children of both; everything else is the user's own module. The tree is
never called: a schedule calls the stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.errors import ModelError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def one_model(stages: Sequence[nn.Module]) -> nn.Module:
    """The tree of some stages; raises if they are no modules, or if two of them have a module of the same name."""
    if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
        raise ModelError(f"shard() was given {list(stages)!r}; a torch.nn.Module, or several stages of one model, are needed.")
    if len({id(stage) for stage in stages}) < len(stages):
        raise ModelError("shard() was given the same stage twice.")
    return _joined(list(stages), "")


def _joined(modules: list[nn.Module], path: str) -> nn.Module:
    if path and len(modules) == 1:
        return modules[0]
    if path and not all(isinstance(module, _CONTAINERS) for module in modules):
        kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
        raise ModelError(
            f"two stages have a module {path!r} ({kinds}): every module must be in one stage, under the name that it has in the "
            "whole model. nn.ModuleDict keeps the names of layers that are taken out of it."
        )
    tree: nn.Module = nn.ModuleDict() if path else nn.Module()
    children: dict[str, list[nn.Module]] = {}
    for module in modules:
        for name, child in module.named_children():
            children.setdefault(name, []).append(child)
        for name, param in module.named_parameters(recurse=False):
            if name in tree._parameters:
                raise ModelError(f"two stages have a parameter {name!r} of their own.")
            tree.register_parameter(name, param)
        for name, buffer in module.named_buffers(recurse=False):
            tree.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    for name, found in children.items():
        tree._modules[name] = _joined(found, f"{path}.{name}" if path else name)
    return tree
