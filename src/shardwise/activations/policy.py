"""Which forward calls are forgotten and computed again, and what is moved away: applied to an unmodified model by hooks.

`choose` names the modules before anything is changed; `apply` attaches the hooks, around those of the engine: a module's inputs
are kept before its Unit is gathered, and autograd's saved tensors pass through the engine's hooks first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.activations.elsewhere import Elsewhere
from shardwise.activations.keeping import Keeping, check_directory, make_keeping
from shardwise.activations.recompute import Call, Stretch
from shardwise.config import Activations, ShardConfig
from shardwise.engine import Hook, Runtime, is_inside_autograd, is_inside_checkpoint
from shardwise.errors import ConfigError
from shardwise.partition import find_units


def choose(model: nn.Module, config: ShardConfig) -> tuple[str, ...]:
    """The paths of the modules whose calls will be computed again, in order; nested ones belong to the outermost."""
    asked = config.activations
    if asked is None or not isinstance(model, nn.Module):
        return ()
    check_directory(asked, config.offload)
    if asked.checkpoint is None:
        return ()
    if callable(asked.checkpoint):
        chosen = [path for path, module in model.named_modules() if path and asked.checkpoint(path, module)]
        problem = f"checkpoint={asked.checkpoint!r} returns True for none of the model's modules"
    else:
        blocks = {spec.module_path for spec in find_units(model, config.units, config.max_unit_bytes)}
        chosen = [path for path, module in model.named_modules() if path in blocks and _is_worth_it(path, module, blocks)]
        problem = "the model has no repeated blocks that would be Units"
    found: list[str] = []
    for path in chosen:
        if not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    if not found:
        raise ConfigError(
            f"Activations: {problem}. Name modules with checkpoint=lambda name, module: ..., or use checkpoint=None."
        )
    return tuple(found)


def _is_worth_it(path: str, module: nn.Module, blocks: set[str]) -> bool:
    """Neither a module that contains other blocks, nor one operation of torch's, which would save its input anyway."""
    if not path or any(other.startswith(f"{path}.") for other in blocks):
        return False
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")


def apply(model: nn.Module, runtime: Runtime, asked: Activations, paths: Sequence[str]) -> Keeping:
    """Attach the hooks; called once, after the engine's. Returns what keeps the tensors."""
    keeping = make_keeping(runtime, asked)
    policy = Policy(runtime, keeping, asked.checkpoint if isinstance(asked.checkpoint, int) else 1)
    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(_Before(policy, path), prepend=True, with_kwargs=True)
        module.register_forward_hook(_After(policy, path), always_call=True)
    model.register_forward_pre_hook(_BeforeModel(policy, moves_saved=asked.checkpoint is None), prepend=True, with_kwargs=True)
    model.register_forward_hook(_AfterModel(policy), always_call=True)
    return keeping


class Policy:
    """What is under way in the running forward pass."""

    def __init__(self, runtime: Runtime, keeping: Keeping, length: int) -> None:
        """`length`: how many calls that follow each other are computed again at once."""
        self._keeping = keeping
        self._length = length
        self._elsewhere = Elsewhere(keeping, runtime)
        self._stretch: Stretch | None = None
        self._running: list[tuple[nn.Module, Call | None]] = []  # calls of chosen modules that have begun and not ended
        self._hooks: list[contextlib.AbstractContextManager[Any] | None] = []  # of running calls of the model

    def begin_call(self, path: str, module: nn.Module, inputs: Any) -> None:
        """A chosen module is called."""
        is_done_already = is_inside_autograd() or is_inside_checkpoint() or any(call is not None for _, call in self._running)
        if is_done_already or not torch.is_grad_enabled():
            self._running.append((module, None))
            return
        if self._stretch is None or len(self._stretch.calls) >= self._length:
            self._stretch = Stretch(self._keeping.begin_stretch())
        call = Call(path, module, self._stretch, inputs, self._keeping)
        call.begin()
        self._running.append((module, call))

    def end_call(self, module: nn.Module, output: Any) -> None:
        """It has ended, or raised."""
        if self._running and self._running[-1][0] is module:
            call = self._running.pop()[1]
            if call is not None:
                call.end(output)
                if not self._hooks:  # it was called on its own
                    self.end_forward()

    def begin_model(self, *, moves_saved: bool) -> None:
        """The model is called."""
        moves = moves_saved and torch.is_grad_enabled() and not is_inside_autograd()
        self._hooks.append(self._elsewhere.begin() if moves else None)

    def end_model(self) -> None:
        """The model's call has ended, or raised."""
        if self._hooks:
            hooks = self._hooks.pop()
            if hooks is not None:
                hooks.__exit__(None, None, None)
        if not self._hooks:
            self.end_forward()

    def end_forward(self) -> None:
        """The outermost call has ended."""
        self._stretch = None
        if torch.is_grad_enabled() and not is_inside_autograd():
            self._keeping.end_forward()


class _PolicyHook(Hook):
    """A hook of one model; its copies do nothing."""

    def __init__(self, policy: Policy | None, path: str = "", *, moves_saved: bool = False) -> None:
        super().__init__(None)
        self._policy, self._path, self._moves_saved = policy, path, moves_saved


class _Before(_PolicyHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._policy is not None:
            self._policy.begin_call(self._path, module, (args, kwargs))


class _After(_PolicyHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._policy is not None:
            self._policy.end_call(module, output)


class _BeforeModel(_PolicyHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._policy is not None:
            self._policy.begin_model(moves_saved=self._moves_saved)


class _AfterModel(_PolicyHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._policy is not None:
            self._policy.end_model()
