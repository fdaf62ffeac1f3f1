"""Gives the user's optimizer this rank's pieces instead of whole parameters, and listens to its steps.

The optimizer object, its class, its groups and their hyperparameters stay; only the tensors in `params` change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import OptimizerError
from shardwise.optim.elementwise import check_elementwise, fresh_state, has_stepped
from shardwise.partition import ParamInfo, Piece, Unit, UpdatePiece


def check_optimizer(optimizer: torch.optim.Optimizer, infos: Sequence[ParamInfo]) -> None:
    """Refuse an optimizer that is not the model's, has stepped, or cannot update pieces."""
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
    if has_stepped(optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} already holds state for {len(optimizer.state)} parameters: it has stepped, or loaded "
            "a checkpoint, before sharding. Call sw.shard() before the first step."
        )
    check_elementwise(optimizer)


def make_pieces(units: Sequence[Unit]) -> None:
    """Cut every trainable Unit's masters into one flat parameter per original parameter."""
    for unit in units:
        if unit.is_trainable:
            unit.pieces = tuple(UpdatePiece(piece, nn.Parameter(_master_of(unit, piece))) for piece in _pieces_of_span(unit))


def _master_of(unit: Unit, piece: Piece) -> torch.Tensor:
    """A piece's part of the masters, or something of its shape while those live elsewhere."""
    if unit.master.numel() == 0:
        return torch.full((), float("nan"), dtype=unit.dtypes.master, device=unit.device).expand(piece.numel)
    return unit.master[piece.shard_start : piece.shard_start + piece.numel]


def _pieces_of_span(unit: Unit) -> tuple[Piece, ...]:
    if unit.span.numel == unit.layout.shard_numel:
        return unit.layout.pieces(unit.rank)
    return tuple(Piece(i, 0, slot.offset, slot.numel) for i, slot in enumerate(unit.layout.slots) if slot.numel)


def adopt_optimizer(
    optimizer: torch.optim.Optimizer,
    units: Sequence[Unit],
    before_step: Callable[[bool], None],
    after_closure: Callable[[], None],
    after_step: Callable[[], None],
    take_over: Callable[[torch.optim.Optimizer], Callable[[], None] | None],
) -> None:
    """Swap parameters for pieces, in place, keeping each group's order, and have every step announced."""
    pieces: dict[int, list[nn.Parameter]] = {}
    for unit in units:
        for update in unit.pieces:
            pieces.setdefault(id(unit.params[update.piece.slot_index]), []).append(update.master)
    for param, state in list(optimizer.state.items()):
        del optimizer.state[param]
        for piece in pieces.get(id(param), []):
            optimizer.state[piece] = fresh_state(param, state, piece)
    for group in optimizer.param_groups:
        group["params"] = [piece for param in group["params"] for piece in pieces.get(id(param), [])]
    stream = take_over(optimizer)
    steps = _PlainSteps if stream is None else functools.partial(_StreamedSteps, stream)
    steps(before_step, after_closure, after_step).listen(optimizer)


class _PlainSteps:
    """Announces every step around the optimizer's own body: before it, after its closure, after it."""

    def __init__(
        self, before_step: Callable[[bool], None], after_closure: Callable[[], None], after_step: Callable[[], None]
    ) -> None:
        self._before_step, self._after_closure, self._after_step = before_step, after_closure, after_step

    def listen(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self.begin)
        optimizer.register_step_post_hook(self.end)

    def begin(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = _closure_in(args, kwargs)
        self._before_step(closure is not None)
        if closure is None:
            return None

        def followed() -> Any:
            loss = closure()
            self._after_closure()
            return loss

        return (args[0],), {**kwargs, "closure": followed}

    def end(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._after_step()


class _StreamedSteps(_PlainSteps):
    """Updates before the optimizer's own body, which then finds nothing to do."""

    def __init__(self, stream: Callable[[], None], *announce: Callable[..., None]) -> None:
        super().__init__(*announce)
        self._stream = stream
        self._params: list[list[nn.Parameter]] = []  # of every group, while the body runs
        self._depth = 0  # a subclass's step may call its parent's, which announces itself too

    def listen(self, optimizer: torch.optim.Optimizer) -> None:
        super().listen(optimizer)
        optimizer.register_state_dict_pre_hook(_refuse_states)
        optimizer.register_load_state_dict_pre_hook(_refuse_states)

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._depth += 1
        if self._depth > 1:
            return None
        closure = _closure_in(args, kwargs)
        loss = None
        try:
            self._before_step(closure is not None)
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                self._after_closure()
            self._stream()
        except BaseException:
            self._depth = 0
            raise
        self._params = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        return None if closure is None else ((args[0],), {**kwargs, "closure": lambda: loss})

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for group, params in zip(optimizer.param_groups, self._params, strict=True):
                group["params"] = params
            super().end(optimizer, args, kwargs)


def _closure_in(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


def _refuse_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise OptimizerError(
        f"{type(optimizer).__name__}: states that stream are not in the optimizer, so its state_dict() would be incomplete "
        "and a loaded one ignored. Saving them is not built yet; run.full_state_dict() has the parameters."
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer states that are as long as their piece (moments); step counters are left out."""
    return sum(
        value.numel() * value.element_size() for param, state in optimizer.state.items() for value in _long_states(param, state)
    )


def _long_states(param: torch.Tensor, state: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in state.values() if isinstance(v, torch.Tensor) and v.shape == param.shape]


def num_moments(optimizer: torch.optim.Optimizer | None) -> int:
    """How many piece-long states each parameter will have: known for torch's own optimizers, else read off the state."""
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
