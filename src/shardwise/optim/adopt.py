"""Gives the user's optimizer this rank's pieces instead of whole parameters.

The optimizer object, its class, its groups and their hyperparameters stay; only the tensors in `params` change. `step.py` hooks
into its steps.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import OptimizerError
from shardwise.optim.elementwise import check_elementwise, fresh_state
from shardwise.optim.step import Step, StepListener, StreamedUpdate
from shardwise.partition import ParamInfo, Unit, UpdatePiece


def innermost(optimizer: Any) -> Any:
    """The optimizer inside a wrapper such as Accelerate's, or the optimizer itself if it is not wrapped."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and isinstance(
        getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = optimizer.optimizer
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer, infos: Sequence[ParamInfo]) -> None:
    """Raise if the optimizer is not the model's, or cannot update pieces."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer is needed.")
    known = {id(info.param) for info in infos}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise OptimizerError(
                    f"{type(optimizer).__name__} was built on other parameters: group {number}, parameter {position} (shape "
                    f"{list(param.shape)}) is not in the model. Build it with model.parameters() of this model."
                )
    check_elementwise(optimizer)


class Adopted:
    """The user's optimizer with pieces as parameters. Knows which parameter is in which group, and hooks into every step.

    `mark` identifies the rank and run of these pieces; state dicts contain it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        listener: StepListener,
        take_over: Callable[[torch.optim.Optimizer], StreamedUpdate | None],
        mark: dict[str, Any],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)  # weak: the optimizer's hooks hold this object
        self._listener = listener
        self._owner = units[0].owner
        self._mark = mark
        self._group_of: dict[tuple[int, int], int] = {}  # group number by Unit and slot, also of frozen parameters
        self._pieces: set[int] = set()  # ids of the pieces that groups may hold
        self.asleep: dict[tuple[int, int], dict[str, Any]] = {}
        """States of frozen parameters, flat as this rank's Piece of them, by Unit and slot. They wake when their Unit thaws."""
        places: dict[int, list[tuple[int, int]]] = {}  # of a tiled parameter several
        for unit in units:
            for slot, param in enumerate(unit.held):
                places.setdefault(id(param), []).append((unit.index, slot))
        self._places = [[places[id(param)][0] for param in group["params"]] for group in optimizer.param_groups]
        for number, group in enumerate(optimizer.param_groups):
            self._group_of |= {place: number for param in group["params"] for place in places[id(param)]}
        states = {id(param): (param, state) for param, state in optimizer.state.items() if state}
        optimizer.state.clear()
        for unit in units:
            self._take_fresh_states(optimizer, unit, states)
        by_param: dict[int, list[UpdatePiece]] = {}
        for unit in units:
            for slot, param in enumerate(unit.held):
                by_param.setdefault(id(param), []).extend(unit.pieces_of(slot))
        for group in optimizer.param_groups:
            group["params"] = [piece.master for param in group["params"] for piece in by_param[id(param)]]
        self._stream = take_over(optimizer)
        are_whole = all(unit.span.numel == unit.layout.numel for unit in units)
        self._step = Step(listener, self._stream, is_guarded=not are_whole, prepare=self._prepare)
        for group in optimizer.param_groups:
            for master in group["params"]:
                self._know(master)
        optimizer.register_step_pre_hook(self._step.begin)
        optimizer.register_step_post_hook(self._step.end)
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        optimizer.register_state_dict_post_hook(self._after_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.zero_grad = types.MethodType(_ZeroGrad(self), optimizer)  # type: ignore[method-assign]
        # With this flag torch.amp.GradScaler always calls step(), where `_refuse_stock_scaler` raises, instead of deciding on
        # each rank whether to step. A single rank whose gradients are in memory may use torch's scaler.
        self._refuses_scalers = mark["world_size"] > 1 or self._stream is not None
        if self._refuses_scalers:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _take_fresh_states(
        self, optimizer: torch.optim.Optimizer, unit: Unit, states: dict[int, tuple[torch.Tensor, dict[str, Any]]]
    ) -> None:
        """Make this rank's states of a Unit from those that the optimizer was built with; their elements are all alike."""
        masters = {update.slot: update.master for update in unit.pieces}
        for piece in unit.span_pieces:
            found = states.get(id(unit.held[piece.slot_index]))
            if found is not None and unit.is_trainable:
                master = masters[piece.slot_index]
                optimizer.state[master] = fresh_state(*found, master)
            elif found is not None:
                one = fresh_state(*found, torch.empty(1, dtype=unit.dtypes.master, device=unit.blueprint.device))
                self.asleep[unit.index, piece.slot_index] = {
                    key: value.expand(piece.numel) if isinstance(value, torch.Tensor) and value.dim() else value
                    for key, value in one.items()
                }

    def _know(self, master: nn.Parameter) -> nn.Parameter:
        self._pieces.add(id(master))
        self._step.guard(master)
        return master

    def add(self, unit: Unit) -> None:
        """Add the pieces of a Unit that was unfrozen to the groups that listed its parameters."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._step.recover(optimizer)
        for piece in unit.pieces:
            master = self._know(piece.master)
            number = self._group_of.get((unit.index, piece.slot))
            if optimizer is not None and number is not None:
                optimizer.param_groups[number]["params"].append(master)
                state = self.asleep.pop((unit.index, piece.slot), None)
                if state is not None:
                    optimizer.state[master] = {
                        key: value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value
                        for key, value in state.items()
                    }

    def places(self, optimizer: torch.optim.Optimizer) -> list[list[tuple[int, int]]]:
        """Unit and slot of every group's parameters, in the order in which the user's groups list them, frozen ones too.

        Of a tiled parameter those of its first tile.
        """
        self._step.recover(optimizer)
        self._take_new_groups(optimizer)
        if len(optimizer.param_groups) != len(self._places):
            raise OptimizerError(
                f"{type(optimizer).__name__} had {len(self._places)} groups, and has {len(optimizer.param_groups)} now: groups "
                "were removed after sw.shard(). Set their learning rate to zero instead."
            )
        return self._places

    # -- groups -----------------------------------------------------------------------------------------------

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Before each step, refuse torch's own scaler and replace new parameters by pieces."""
        self._refuse_stock_scaler(optimizer)
        self._take_new_groups(optimizer)

    def _refuse_stock_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        if self._refuses_scalers and getattr(optimizer, "found_inf", None) is not None:
            raise OptimizerError(
                "torch.amp.GradScaler looks for overflow in this rank's own pieces only, so ranks would come to different "
                "decisions. Use the run's own scaler, with the same methods: run.scaler.scale(loss).backward(), "
                "run.scaler.step(optimizer), run.scaler.update(); sw.Precision(loss_scale=sw.LossScale()) turns it on."
            )

    def _take_new_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace parameters that `add_param_group` added since the last step by their pieces."""
        for number, group in enumerate(optimizer.param_groups):
            if number == len(self._places):
                self._places.append([])
            if all(id(param) in self._pieces for param in group["params"]):
                continue
            params: list[nn.Parameter] = []
            for position, param in enumerate(group["params"]):
                if id(param) in self._pieces:
                    params.append(param)
                    continue
                handle = getattr(param, "_shardwise", None)
                if handle is None or handle.unit.owner is not self._owner:
                    raise OptimizerError(
                        f"group {number}, parameter {position} (shape {list(param.shape)}) was given to "
                        f"{type(optimizer).__name__} "
                        "after sw.shard() and belongs to no part of the sharded model: its gradients would not be averaged over "
                        "ranks, and it would not be saved. Add modules to the model before sw.shard()."
                    )
                place = (handle.unit.index, handle.slot)
                if self._group_of.get(place, number) != number:
                    raise OptimizerError(
                        f"parameter {handle.unit.layout.slots[handle.slot].name!r} was given to group {number} of "
                        f"{type(optimizer).__name__}, but is in group {self._group_of[place]} already."
                    )
                if self._stream is not None:
                    raise OptimizerError(
                        f"parameter {handle.unit.layout.slots[handle.slot].name!r} was given to {type(optimizer).__name__} after "
                        "sw.shard(); states that stream are laid out when the model is sharded. Give it to the optimizer before."
                    )
                if place not in self._group_of:
                    self._places[number].append(place)
                for unit, slot in handle.places:
                    self._group_of[unit.index, slot] = number
                    params += [self._know(piece.master) for piece in unit.pieces_of(slot)]
            group["params"] = params

    # -- zero_grad and state dicts ----------------------------------------------------------------------------

    def zero_grad(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool) -> None:
        """`optimizer.zero_grad()` was called."""
        is_stepping = self._step.is_running  # True if a closure calls this
        self._step.open()
        try:
            type(optimizer).zero_grad(optimizer, set_to_none=set_to_none)
        finally:
            self._step.open(is_open=is_stepping)
        self._listener.cleared(self._group_of.keys(), set_to_none=set_to_none)

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        self._step.recover(optimizer)
        for param in [param for param in optimizer.state if id(param) not in self._pieces and not optimizer.state[param]]:
            del optimizer.state[param]  # made when user code read the state of a whole parameter
        if self._stream is not None and self._stream.has_states:
            raise _not_in_optimizer(optimizer)

    def _after_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, _MARK: dict(self._mark)}

    def _before_load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self._step.recover(optimizer)
        found = state.get(_MARK)
        if found is None:
            if state.get("state"):
                raise OptimizerError(
                    f"{type(optimizer).__name__}.load_state_dict: this state dict was not made by a sharded optimizer, so its "
                    "states are those of whole parameters, not of this rank's pieces. Load it before sw.shard(), which divides "
                    "the states that it finds."
                )
        elif found != self._mark:
            which = [key for key in self._mark if found.get(key) != self._mark[key]]
            shown = ", ".join(f"{key} {found.get(key)} (here {self._mark[key]})" for key in which)
            raise OptimizerError(
                f"{type(optimizer).__name__}.load_state_dict: this state dict has the pieces of another rank or run: {shown}. "
                "Every rank must load the one that it saved itself, at the same stage and world size."
            )
        if self._stream is not None and state.get("state"):
            raise _not_in_optimizer(optimizer)


_MARK = "shardwise"


class _ZeroGrad:
    """Replaces `optimizer.zero_grad()`: also clears gradients of which this rank owns no piece."""

    def __init__(self, adopted: Adopted) -> None:
        self._adopted = adopted

    def __call__(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        self._adopted.zero_grad(optimizer, set_to_none=set_to_none)


def _not_in_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__}: states that stream are not in the optimizer, so its state_dict() would be incomplete "
        "and a loaded one ignored. Use run.save() and run.load(), run.state_dict() and run.load_state_dict(), or "
        "run.full_optimizer_state_dict() for plain torch; a plain state dict is loaded before sw.shard()."
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer states that are as long as their piece (moments); step counters are left out."""
    return sum(
        value.numel() * value.element_size() for param, state in optimizer.state.items() for value in _long_states(param, state)
    )


def _long_states(param: torch.Tensor, state: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in state.values() if isinstance(v, torch.Tensor) and v.shape == param.shape]


def num_moments(optimizer: torch.optim.Optimizer | None) -> int:
    """How many states as long as its piece each parameter will have: known for torch's optimizers, else counted."""
    if optimizer is None:
        return 0
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    counts = {
        "Adam": 2 + bool(group.get("amsgrad")),
        "AdamW": 2 + bool(group.get("amsgrad")),
        "Adamax": 2,
        "NAdam": 2,
        "RAdam": 2,
        "Adagrad": 1,
        "Adadelta": 2,
        "RMSprop": 1 + bool(group.get("centered")) + bool(group.get("momentum")),
        "SGD": int(bool(group.get("momentum"))),
    }
    known = counts.get(type(optimizer).__name__)
    if known is not None:
        return known
    return max((len(_long_states(param, state)) for param, state in optimizer.state.items()), default=0)
