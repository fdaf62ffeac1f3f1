"""Gives a causal model of transformers the loss in chunks: `model(input_ids, labels=labels).loss` without all logits.

The model's own forward runs unchanged. Hooks on this one model ask it for no logits (`logits_to_keep`) and keep its last hidden
states, and its `loss_function`, which transformers lets every model choose, returns the loss that was formed from them. No class
and no function of transformers is replaced, and transformers is not imported.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.tiling.loss import CHUNK_BYTES, linear_cross_entropy

_OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""What a caller of the model may pass on to the loss."""


def fuse_causal_loss(
    model: nn.Module,
    *,
    soft_cap: float | None = None,
    logit_scale: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    recomputes: bool = False,
) -> CausalLoss:
    """Have a causal model of transformers compute its loss with `linear_cross_entropy`.

    Call it before or after `shard`. From then on `model(..., labels=...)` returns the same loss, and `logits` of no token unless
    `logits_to_keep` asks for some. Calls without labels, `generate()` too, do not change. In the first call the model's own
    logits of one token are compared with what the loss takes for them; if they differ, it raises.

    Args:
        model: a causal model of transformers, or a peft model around one. Its head must be an `nn.Linear`.
        soft_cap: as in `linear_cross_entropy`; None: the configuration's `final_logit_softcapping`, if it has one.
        logit_scale: as in `linear_cross_entropy`; None: the configuration's `logit_scale`, or 1 / `logits_scaling`, or 1.
        chunk_bytes: as in `linear_cross_entropy`.
        recomputes: as in `linear_cross_entropy`.

    Returns: a handle; its `remove()` gives the model its own loss back.
    """
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # peft: the model without its adapters' wrapper
        inner = inner.get_base_model()
    return CausalLoss(inner, soft_cap, logit_scale, chunk_bytes, recomputes)


@dataclasses.dataclass
class _Call:
    """One call of the model with labels."""

    labels: torch.Tensor
    options: dict[str, Any]
    is_probe: bool = False
    """Whether the model was asked for the logits of one token, to compare them."""
    hidden: torch.Tensor | None = None
    head_output: torch.Tensor | None = None
    loss: torch.Tensor | None = None


class CausalLoss:
    """The hooks on one model, and its loss function."""

    def __init__(self, model: Any, soft_cap: float | None, logit_scale: float | None, chunk_bytes: int, recomputes: bool) -> None:
        """Check the model, a module of any class, and attach the hooks."""
        self._model = model
        self._check_model()
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        if soft_cap is None:
            soft_cap = getattr(config, "final_logit_softcapping", None)
        if logit_scale is None:
            divisor = getattr(config, "logits_scaling", None)
            logit_scale = getattr(config, "logit_scale", None) or (1.0 if divisor is None else 1.0 / divisor)
        self._scale, self._cap = float(logit_scale), soft_cap
        self._chunk_bytes, self._recomputes = chunk_bytes, recomputes
        self._call: _Call | None = None
        self._is_checked = False
        self._names = list(inspect.signature(model.forward).parameters)
        self._own_loss = model.loss_function
        bodies = {model.base_model}
        if hasattr(model, "get_decoder"):  # some models call it without the base model around it
            bodies.add(model.get_decoder())
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            *(body.register_forward_hook(self._keep_hidden) for body in bodies - {model, None}),
            # Before all other hooks: the head is still gathered then, and need not be gathered for the loss again.
            self._head().register_forward_hook(self._compute, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        model.loss_function = self.loss

    def remove(self) -> None:
        """Give the model its own loss back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._model.loss_function = self._own_loss

    def _check_model(self) -> None:
        model = self._model
        missing = [n for n in ("config", "base_model", "get_output_embeddings", "loss_function") if not hasattr(model, n)]
        if missing:
            raise self._refusal(f"has no {', '.join(missing)}; a causal model of transformers was expected")
        if isinstance(getattr(model.loss_function, "__self__", None), CausalLoss):
            raise self._refusal("has a fused loss already; call remove() of its handle first")
        found = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        if found != "ForCausalLMLoss":
            raise self._refusal(f"has the loss {found}; only transformers' ForCausalLMLoss can be fused")
        lacking = {"labels", "logits_to_keep"} - set(inspect.signature(model.forward).parameters)
        if lacking:
            raise self._refusal(
                f"cannot be asked for a loss without logits: its forward has no argument {' and no '.join(sorted(lacking))}. "
                "Call shardwise.linear_cross_entropy in a forward of your own"
            )
        if model.base_model is model:
            raise self._refusal("has no head")
        self._head()

    def _head(self) -> nn.Linear:
        """The head; anything but a plain linear layer (an adapter, a quantized layer) computes other logits."""
        head = self._model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise self._refusal(
                f"has a {type(head).__name__} as its head; a torch.nn.Linear was expected. Leave the head out of what is "
                "adapted or quantized, or use the model's own loss"
            )
        return head

    def _refusal(self, what: str) -> ModelError:
        return ModelError(f"fuse_causal_loss: {type(self._model).__name__} {what}.")

    # -- one call, in order -----------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        labels, self._call = given.get("labels"), None
        if labels is None:
            return None
        self._call = _Call(labels, {name: given[name] for name in _OPTIONS if given.get(name) is not None})
        keep = given.get("logits_to_keep", 0)
        if not isinstance(keep, int) or keep != 0:
            return None  # asked for by the caller
        self._call.is_probe = not self._is_checked
        keep = torch.empty(0, dtype=torch.int64, device=labels.device) if self._is_checked else 1
        place = self._names.index("logits_to_keep")
        if place < len(args):
            return (*args[:place], keep, *args[place + 1 :]), kwargs
        return args, {**kwargs, "logits_to_keep": keep}

    def _keep_hidden(self, body: nn.Module, args: Any, output: Any) -> None:
        if self._call is not None:
            self._call.hidden = output[0]

    def _compute(self, head: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        call = self._call
        if call is None or call.hidden is None or call.loss is not None:
            return
        if call.is_probe:
            if not torch.allclose(args[0], call.hidden[:, -1:], equal_nan=True):
                raise self._refusal("changes its hidden states between its base model and its head")
            call.head_output = output.detach() if output.numel() else None
        call.loss = self._loss_of(call.hidden, call.labels, call.options)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any) -> torch.Tensor:
        """The model's `loss_function`: called by its forward, with the logits it was asked for."""
        call = self._call
        if call is None:  # called by hand, with all logits
            loss: torch.Tensor = self._own_loss(logits=logits, labels=labels, vocab_size=vocab_size, **options)
            return loss
        if call.hidden is None:
            raise self._refusal("does not call its base model or decoder")
        if vocab_size != self._head().out_features:
            raise self._refusal(f"has a head of {self._head().out_features} classes and a vocabulary of {vocab_size}")
        if call.head_output is not None:
            self._check_logits(logits, call.head_output)
        options = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
        is_same = labels is call.labels and options.keys() == call.options.keys()
        if call.loss is not None and is_same and all(value is call.options[name] for name, value in options.items()):
            return call.loss
        return self._loss_of(call.hidden, labels, options)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._call = None

    # -- the loss ---------------------------------------------------------------------------------------------

    def _loss_of(self, hidden: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """What transformers' ForCausalLMLoss computes from logits: each token predicts the next one."""
        head, ignore_index = self._head(), options.get("ignore_index", -100)
        targets = options.get("shift_labels")
        if targets is None:
            targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        count = options.get("num_items_in_batch")
        loss = linear_cross_entropy(
            hidden,
            head.weight,
            targets.to(hidden.device).reshape(hidden.shape[:-1]),
            bias=head.bias,
            ignore_index=ignore_index,
            reduction="mean" if count is None else "sum",
            logit_scale=self._scale,
            soft_cap=self._cap,
            chunk_bytes=self._chunk_bytes,
            recomputes=self._recomputes,
        )
        if count is None:
            return loss
        return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)

    def _check_logits(self, logits: torch.Tensor, head_output: torch.Tensor) -> None:
        """Raise if the model makes other logits from the head's output than the loss does."""
        expected = head_output.float() * self._scale
        if self._cap is not None:
            expected = self._cap * torch.tanh(expected / self._cap)
        rtol = 1e-5 if logits.dtype.itemsize > 2 else 2e-2
        largest = float(expected.abs().max())
        if not torch.allclose(logits.detach().float(), expected, rtol=rtol, atol=rtol * largest, equal_nan=True):
            raise self._refusal(
                f"does not only scale its logits by {self._scale} and cap them at {self._cap}. If other values are meant, pass "
                "logit_scale= and soft_cap=; else remove() the fused loss and use the model's own"
            )
        self._is_checked = math.isfinite(largest)
