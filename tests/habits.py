"""What user code does around a training step: every habit as a function that is run on a sharded and on a plain model alike."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from cases import sharded
from shardwise.testing.parity import in_rank_order

WHEN = ("before the first step", "inside forward", "between forward and backward", "between backward and step", "after the step")
BEFORE, FORWARD, BETWEEN, BACKWARD, AFTER = WHEN
OUTSIDE = (BEFORE, AFTER)
ANY = WHEN


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.lin(self.norm(x)))


class Net(nn.Module):
    """Blocks, a frozen layer, running statistics, and a place in the middle of forward where user code may act."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inp = nn.Linear(6, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(3))
        self.frozen = nn.Linear(size, size).requires_grad_(False)
        self.bn = nn.BatchNorm1d(size)
        self.head = nn.Linear(size, 4)
        self.register_buffer("scale", torch.ones(size))
        self.inside: Callable[[], None] | None = None

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](torch.tanh(self.inp(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encode(x)
        if self.inside is not None:
            self.inside()
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(self.bn(x + torch.tanh(self.frozen(x)) * self.scale))


@dataclasses.dataclass
class Side:
    """One of the two models in training, and what a habit may use."""

    model: Any
    optimizer: Any
    run: sw.Run | None
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)
    seen: list[Any] = dataclasses.field(default_factory=list)
    loss: Any = None
    number: int = 0
    make_loss: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x).square().mean()
    masters: list[tuple[nn.Parameter, nn.Parameter]] = dataclasses.field(default_factory=list)
    """(parameter, master) of the plain side; the same object twice in fp32."""
    stored: torch.dtype | None = None
    frozen: frozenset[int] = frozenset()
    """Ids of parameters that were frozen when the model was sharded."""

    def see(self, value: Any) -> None:
        """A value that must be the same on both sides."""
        self.seen.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run a backward; on the plain side average over ranks and accumulate."""
        if self.run is not None:
            loss.backward(**options)
            return
        params = [p for p in self.model.parameters()]
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        loss.backward(**options)
        for p, old, mean in zip(params, before, _means(params), strict=True):
            p.grad = mean if old is None else (old if mean is None else old + mean)
        if _size() > 1:
            _share_buffers(list(self.model.buffers()))
        self._lend_grads()

    def _lend_grads(self) -> None:
        for p, master in self.masters if self.stored is not None else ():
            master.grad = p.grad

    def round(self) -> None:
        """Plain side, 16-bit storage: what user code wrote reaches the masters, and the model computes with what is stored."""
        with torch.no_grad():
            for p, master in self.masters if self.stored is not None else ():
                differs = p != master.to(self.stored).float()
                master.copy_(torch.where(differs, p, master))
                if id(p) in self.frozen and not p.requires_grad:  # it has no master but what is stored
                    master.copy_(master.to(self.stored))
                p.copy_(master.to(self.stored))

    def loaded(self, module: nn.Module) -> None:
        """Plain side: masters take every loaded value as it is."""
        inside = {id(p) for p in module.parameters()}
        with torch.no_grad():
            for p, master in self.masters if self.stored is not None else ():
                if id(p) in inside:
                    master.copy_(p)

    def publish(self) -> None:
        """Plain side: the model shows new masters."""
        with torch.no_grad():
            for p, master in self.masters if self.stored is not None else ():
                p.copy_(master.to(self.stored))
                p.grad = None

    def step(self) -> None:
        """Update and clear."""
        if self.run is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        self.round()
        if self.stored is not None:
            by_id = {id(p): master for p, master in self.masters}
            for group in self.optimizer.param_groups:
                group["params"] = [by_id.get(id(p), p) for p in group["params"]]
            for p, master in self.masters:
                if p.grad is None:
                    master.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.stored is not None:
            known = {id(m) for group in self.optimizer.param_groups for m in group["params"]}
            with torch.no_grad():
                for p, master in self.masters:
                    p.copy_(master.to(self.stored))
                    if id(master) in known:
                        p.grad = None


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _means(params: list[nn.Parameter]) -> list[torch.Tensor | None]:
    """Every gradient's mean over ranks, summed in rank order; None where no rank has one."""
    if _size() == 1:
        return [p.grad for p in params]
    flags = torch.tensor([int(p.grad is not None) for p in params])
    dist.all_reduce(flags)
    flat = torch.cat([(torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1)).float() for p in params])
    parts = [torch.empty_like(flat) for _ in range(_size())]
    dist.all_gather(parts, flat)
    means = (in_rank_order(parts) / _size()).split([p.numel() for p in params])
    return [mean.view(p.shape) if flag else None for p, mean, flag in zip(params, means, flags.tolist(), strict=True)]


def _share_buffers(buffers: list[torch.Tensor]) -> None:
    parts = [buffer.detach().clone().view(-1).view(torch.uint8) for buffer in buffers]
    values = torch.cat(parts)
    dist.broadcast(values, 0)
    for buffer, part in zip(buffers, values.split([part.numel() for part in parts]), strict=True):
        buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _no_grad(function: Callable[[Side], Any]) -> Callable[[Side], Any]:
    def inner(s: Side) -> Any:
        with torch.no_grad():
            return function(s)

    return inner


def _each(function: Callable[[Any], Any], *, only: str = "") -> Callable[[Side], None]:
    """Do something to every parameter, without recording it."""

    def inner(s: Side) -> None:
        with torch.no_grad():
            for name, p in s.model.named_parameters():
                if only in name:
                    function(p)

    return inner


def _set_data(p: Any) -> None:
    p.data = torch.full(p.shape, 0.015625)


def _ema(s: Side) -> None:
    for name, p in s.model.named_parameters():
        ema = s.kept.setdefault(name, p.detach().clone())
        ema.lerp_(p.detach(), 0.5)
        s.see(ema)


def _ema_swap(s: Side) -> None:
    with torch.no_grad():
        backup = {n: p.detach().clone() for n, p in s.model.named_parameters()}
        for p in s.model.parameters():
            p.copy_(torch.full(p.shape, 0.25))
        s.round()
        s.model.eval()
        s.see(s.model(torch.ones(2, 6)))
        s.model.train()
        for n, p in s.model.named_parameters():
            p.copy_(backup[n])


def _ema_swap_data(s: Side) -> None:
    backup = {n: p.data.clone() for n, p in s.model.named_parameters()}
    for p in s.model.parameters():
        p.data = torch.full(p.shape, 0.25)
    s.round()
    s.model.eval()
    with torch.no_grad():
        s.see(s.model(torch.ones(2, 6)))
    s.model.train()
    for n, p in s.model.named_parameters():
        p.data = backup[n]


def _pointer_swap(s: Side) -> None:
    backup = {n: p.data for n, p in s.model.named_parameters()}
    for p in s.model.parameters():
        p.data = torch.full(p.shape, 0.25)
    s.round()
    s.model.eval()
    with torch.no_grad():
        s.see(s.model(torch.ones(2, 6)))
    s.model.train()
    for n, p in s.model.named_parameters():
        p.data = backup[n]


def _vector(s: Side) -> None:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(s.model.parameters())
        s.see(vector)
        nn.utils.vector_to_parameters(vector * 0.5, s.model.parameters())


def _noise(s: Side) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in s.model.parameters():
            p.add_(torch.randn(p.shape, generator=generator))


def _reset(s: Side) -> None:
    torch.manual_seed(11)
    s.model.head.reset_parameters()


def _init(s: Side) -> None:
    torch.manual_seed(11)
    nn.init.xavier_uniform_(s.model.blocks[1].lin.weight)
    nn.init.zeros_(s.model.blocks[1].lin.bias)


def _read(s: Side) -> None:
    with torch.no_grad():
        s.see(sum(p.norm() for p in s.model.parameters()))
        s.see(s.model.head.weight[0].tolist())
        s.see(float(s.model.head.bias.max()))
        s.see(bool((s.model.head.weight == 0).any()))
        s.see(s.model.head.weight.detach().numpy().tolist())


def _penalty(s: Side) -> None:
    s.loss = s.loss + 0.5 * sum(p.square().sum() for p in s.model.parameters() if p.requires_grad)


def _weight_in_loss(s: Side) -> None:
    s.loss = s.loss + s.model.head.weight.sum() + s.model.blocks[0].lin.weight.abs().mean()


def _tie(s: Side) -> None:
    s.model.blocks[2].lin.weight = s.model.blocks[1].lin.weight


def _new_module(s: Side) -> None:
    torch.manual_seed(13)
    s.model.head = nn.Linear(s.model.head.in_features, 4)


def _delete(s: Side) -> None:
    del s.model.blocks[2]


def _new_group(s: Side) -> None:
    torch.manual_seed(13)
    s.model.extra = nn.Linear(4, 4)
    s.optimizer.add_param_group({"params": list(s.model.extra.parameters())})
    s.make_loss = lambda model, x: model.extra(model(x)).square().mean()


def _late_group(s: Side) -> None:
    s.model.frozen.requires_grad_(True)
    s.optimizer.add_param_group({"params": [s.model.frozen.weight], "lr": 0.5})


def _toggle(s: Side) -> None:
    frozen = s.number % 2 == 0
    for p in s.model.blocks.parameters():
        p.requires_grad_(not frozen)


def _deepcopy(s: Side) -> None:
    copied = copy.deepcopy(s.model)
    copied.inside = None
    copied.eval()
    with torch.no_grad():
        s.see(copied(torch.ones(2, 6)))


def _averaged(s: Side) -> None:
    if "swa" not in s.kept:
        s.kept["swa"] = torch.optim.swa_utils.AveragedModel(s.model)
    s.kept["swa"].update_parameters(s.model)
    for p in s.kept["swa"].parameters():
        s.see(p)


def _save_model(s: Side) -> None:
    buffer = io.BytesIO()
    inside, s.model.inside = s.model.inside, None
    try:
        torch.save(s.model, buffer)
    finally:
        s.model.inside = inside


def _save_state(s: Side) -> None:
    buffer = io.BytesIO()
    torch.save(s.model.state_dict(), buffer)
    buffer.seek(0)
    for value in torch.load(buffer).values():
        s.see(value)


def _save_param(s: Side) -> None:
    buffer = io.BytesIO()
    torch.save(s.model.head.bias, buffer)
    s.see(len(buffer.getvalue()) < 4096)
    buffer.seek(0)
    s.see(torch.load(buffer))


def _state_dict(s: Side) -> None:
    with torch.no_grad():
        for value in s.model.state_dict().values():
            s.see(value.clone())


def _load(s: Side) -> None:
    state = {}
    for name, value in s.model.state_dict().items():
        state[name] = torch.full(value.shape, 0.25) if value.is_floating_point() else value.clone()
    s.model.load_state_dict(state)
    s.loaded(s.model)


def _load_own(s: Side) -> None:
    with torch.no_grad():
        state = {name: value.clone() for name, value in s.model.head.state_dict().items()}
        state["weight"].mul_(0.5)
    s.model.head.load_state_dict(state)
    s.loaded(s.model.head)


def _into_other(s: Side) -> None:
    other = Net(s.model.head.in_features)
    other.load_state_dict(s.model.state_dict())
    for p in other.parameters():
        s.see(p)


def _grads_none(s: Side) -> None:
    for p in s.model.blocks.parameters():
        p.grad = None


def _read_grads(s: Side) -> None:
    for p in s.model.parameters():
        s.see(None if p.grad is None else p.grad.clone())


def _scale_grads(s: Side) -> None:
    for p in s.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def _set_grads(s: Side) -> None:
    for p in s.model.parameters():
        if p.requires_grad:
            p.grad = torch.ones(p.shape)


def _clip(s: Side) -> None:
    s.see(nn.utils.clip_grad_norm_([p for p in s.model.parameters() if p.requires_grad], 0.1))


def _clip_value(s: Side) -> None:
    nn.utils.clip_grad_value_([p for p in s.model.parameters() if p.requires_grad], 0.01)


def _tensor_hook(s: Side) -> None:
    if "hook" not in s.kept:
        s.kept["hook"] = s.model.blocks[1].lin.weight.register_hook(lambda grad: grad * 2)


def _post_hook(s: Side) -> None:
    if "hook" not in s.kept:
        s.kept["hook"] = s.model.blocks[1].lin.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))


def _forward_hooks(s: Side) -> None:
    if "hook" not in s.kept:
        block = s.model.blocks[1]
        s.kept["hook"] = [
            block.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
            block.register_forward_hook(lambda module, args, out: out + module.lin.weight.sum() * 0.125),
        ]


def _backward_hooks(s: Side) -> None:
    if "hook" not in s.kept:
        block = s.model.blocks[1]
        s.kept["hook"] = [
            block.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,)),
            block.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 2,)),
        ]


def _step_hooks(s: Side) -> None:
    if "hook" not in s.kept:
        s.kept["hook"] = [
            s.optimizer.register_step_pre_hook(lambda opt, args, kwargs: opt.param_groups[0].update(lr=0.0625)),
            s.optimizer.register_step_post_hook(lambda opt, args, kwargs: s.see("stepped")),
        ]


def _scaler(s: Side) -> None:
    """torch's own scaler, for one whole step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    s.backward(scaler.scale(s.loss))
    scaler.step(s.optimizer)
    scaler.update()
    s.optimizer.zero_grad()
    s.publish()
    s.loss = s.make_loss(s.model, torch.ones(3, 6))


def _autocast(s: Side) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        s.loss = s.make_loss(s.model, torch.ones(3, 6)).float()


def _functional_call(s: Side) -> None:
    params = {name: torch.full(p.shape, 0.25) for name, p in s.model.named_parameters()}
    with torch.no_grad():
        s.model.eval()
        s.see(torch.func.functional_call(s.model, params, (torch.ones(2, 6),)))
        s.model.train()


def _func_grad(s: Side) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return s.model.encode(x).square().sum()

    s.see(torch.func.grad(loss)(torch.ones(2, 6)))


def _retain(s: Side) -> None:
    s.backward(s.loss, retain_graph=True)


def _inputs(s: Side) -> None:
    s.backward(s.loss, retain_graph=True, inputs=[s.model.head.weight, s.model.blocks[1].lin.weight])


def _autograd_grad(s: Side) -> None:
    params = [p for p in s.model.parameters() if p.requires_grad]
    for grad in torch.autograd.grad(s.loss, params, retain_graph=True):
        s.see(grad)


def _double_backward(s: Side) -> None:
    x = torch.full((3, 6), 0.5, requires_grad=True)
    (grad,) = torch.autograd.grad(s.make_loss(s.model, x), x, create_graph=True)
    s.loss = s.loss + grad.square().sum()


def _evaluate(s: Side) -> None:
    s.model.eval()
    with torch.no_grad():
        s.see(s.model(torch.ones(2, 6)))
    with torch.inference_mode():
        s.see(s.model(torch.ones(2, 6)).clone())
    s.model.train()


def _train_forward_only(s: Side) -> None:
    with torch.no_grad():
        s.model(torch.ones(4, 6) * 0.5)


def _submodule(s: Side) -> None:
    s.loss = s.model.blocks[1].lin(s.model.blocks[0](torch.ones(2, s.model.head.in_features))).square().sum()


def _forward_method(s: Side) -> None:
    s.loss = s.model.forward(torch.ones(3, 6)).square().sum()


def _method(s: Side) -> None:
    s.loss = s.model.encode(torch.ones(2, 6)).square().sum() + F.linear(torch.ones(1, 6), s.model.inp.weight).sum()


def _checkpointed(s: Side) -> None:
    s.loss = s.loss + checkpoint(s.model, torch.full((3, 6), 0.25), use_reentrant=False).square().mean()


def _anomaly(s: Side) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        s.backward(s.make_loss(s.model, torch.ones(3, 6)))


def _buffer_values(s: Side) -> None:
    s.model.bn.running_mean.fill_(0.5)
    s.model.scale.data.mul_(0.5)


def _buffer_replaced(s: Side) -> None:
    s.model.scale = torch.full_like(s.model.scale, 0.5)
    s.model.register_buffer("later", torch.ones(3))


def _rates(s: Side) -> None:
    for group in s.optimizer.param_groups:
        group["lr"] *= 0.5


def _scheduler(s: Side) -> None:
    if "scheduler" not in s.kept:
        s.kept["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(s.optimizer, 0.5)
    if s.number:
        s.kept["scheduler"].step()


def _apply(s: Side) -> None:
    def halve(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.5)

    s.model.apply(halve)


def _metadata(s: Side) -> None:
    for name, p in s.model.named_parameters():
        s.see(
            (
                name,
                tuple(p.shape),
                p.dtype,
                str(p.device),
                p.requires_grad,
                p.is_leaf,
                p.numel(),
                p.stride(),
                isinstance(p, nn.Parameter),
            )
        )
    s.see(len(list(s.model.modules())))


def _flags_setter(s: Side) -> None:
    for p in s.model.head.parameters():
        p.requires_grad = False


def _likes(s: Side) -> None:
    for p in s.model.parameters():
        s.see(torch.zeros_like(p))
        s.see(p.new_ones(2))


def _prune(s: Side) -> None:
    from torch.nn.utils import prune

    if "pruned" not in s.kept:
        s.kept["pruned"] = prune.l1_unstructured(s.model.head, "weight", 0.5)


@dataclasses.dataclass(frozen=True)
class Habit:
    act: Callable[[Side], Any]
    when: tuple[str, ...] = ANY
    why: str = ""
    """Where it is refused: why it cannot be done."""
    every: bool = False
    """At every step, not only at the second."""
    leaves_out: str = ""
    """A parameter that the optimizer is not given at first."""


_VIEWS = "a copy, a pickle or an address of the whole parameter needs it in memory when no pass holds it there"
_NO_STORAGE = "a freed parameter has no storage to set"
_SHARDS = "a rank has only its shard of the gradient"
HABITS: dict[str, Habit] = {
    "`p.mul_(...)` on all parameters": Habit(_each(lambda p: p.mul_(0.5))),
    "`p.data.mul_(...)`": Habit(_each(lambda p: p.data.mul_(0.5))),
    "`p.data.clamp_(...)`": Habit(_each(lambda p: p.data.clamp_(-0.125, 0.125)), every=True),
    "weight clipping of some layers": Habit(_each(lambda p: p.clamp_(-0.125, 0.125), only="lin.weight"), every=True),
    "`p.copy_(tensor)`": Habit(_each(lambda p: p.copy_(torch.full(p.shape, 0.015625)))),
    "`p.data.copy_(tensor)`": Habit(_each(lambda p: p.data.copy_(torch.full(p.shape, 0.015625)))),
    "`p.data = tensor`": Habit(
        _each(_set_data), why="backward needs the old values of what was used already, and they are not kept"
    ),
    "`p.set_(tensor)`": Habit(_each(lambda p: p.set_(torch.full(p.shape, 0.015625))), why=_NO_STORAGE),
    "`p[0] = value`": Habit(_each(lambda p: p.__setitem__(0, 0.5))),
    "`p.data[0] = value`": Habit(_each(lambda p: p.data.__setitem__(0, 0.5))),
    "`p.fill_(value)` of frozen parameters": Habit(_each(lambda p: p.fill_(0.5), only="frozen")),
    "`p.zero_()` of biases": Habit(_each(lambda p: p.zero_(), only="bias")),
    "weight decay by hand": Habit(_each(lambda p: p.data.sub_(p.data, alpha=0.5)), OUTSIDE),
    "noise on parameters": Habit(_noise, OUTSIDE),
    "`parameters_to_vector`, `vector_to_parameters`": Habit(_vector, OUTSIDE),
    "re-initialised layer: `reset_parameters()`": Habit(_reset, OUTSIDE),
    "`nn.init` on a layer": Habit(_init, OUTSIDE),
    "`module.apply(function)`": Habit(_apply, OUTSIDE),
    "EMA of parameters": Habit(_ema, (BEFORE, BETWEEN, BACKWARD, AFTER), every=True),
    "EMA swapped in by `copy_`, evaluated, swapped back": Habit(_ema_swap, OUTSIDE),
    "EMA swapped in by `.data =`, evaluated, swapped back": Habit(_ema_swap_data, OUTSIDE),
    "the same with aliases as backup (`backup = p.data`)": Habit(
        _pointer_swap, OUTSIDE, why="the old values would have to be kept beside the new ones; take `p.data.clone()`"
    ),
    "reading norms, items, lists, arrays": Habit(_read, (BEFORE, FORWARD, BETWEEN, BACKWARD, AFTER)),
    "metadata and names": Habit(_metadata, (BEFORE, FORWARD, BETWEEN, BACKWARD, AFTER)),
    "`zeros_like`, `new_ones`": Habit(_likes, (BEFORE, FORWARD, BETWEEN, BACKWARD, AFTER)),
    "a penalty on parameters in the loss": Habit(_penalty, (BETWEEN,), every=True),
    "a parameter itself in the loss": Habit(_weight_in_loss, (BETWEEN,), every=True),
    "tying after sharding: `a.weight = b.weight`": Habit(_tie, OUTSIDE),
    "a module replaced": Habit(_new_module, OUTSIDE),
    "a module deleted": Habit(_delete, OUTSIDE),
    "a module added with `add_param_group`": Habit(
        _new_group, OUTSIDE, why="it would be neither averaged nor saved, as under DDP"
    ),
    "a frozen parameter unfrozen and given to `add_param_group`": Habit(_late_group, OUTSIDE, leaves_out="frozen.weight"),
    "freezing a layer": Habit(lambda s: s.model.blocks[1].requires_grad_(False), (BEFORE, BETWEEN, BACKWARD, AFTER)),
    "freezing by `p.requires_grad = False`": Habit(_flags_setter, (BEFORE, BETWEEN, BACKWARD, AFTER)),
    "unfreezing what was frozen when it was sharded": Habit(
        lambda s: s.model.frozen.requires_grad_(True), (BEFORE, BACKWARD, AFTER)
    ),
    "freezing and unfreezing in turn": Habit(_toggle, OUTSIDE, every=True),
    "`model.to()` of the same device and dtype": Habit(lambda s: s.model.to("cpu", torch.float32), OUTSIDE),
    "`model.to(float64)`": Habit(
        lambda s: s.model.to(torch.float64), OUTSIDE, why="stored, computing and master dtypes are set when sharding"
    ),
    "`model.half()`": Habit(lambda s: s.model.half(), OUTSIDE, why="stored, computing and master dtypes are set when sharding"),
    "`model.cpu()`, `model.float()`": Habit(lambda s: s.model.cpu().float(), OUTSIDE),
    "`model.share_memory()`": Habit(
        lambda s: s.model.share_memory(), OUTSIDE, why="parameters would move away from their shards"
    ),
    "`copy.deepcopy(model)`": Habit(_deepcopy, OUTSIDE, why=_VIEWS),
    "`swa_utils.AveragedModel(model)`": Habit(_averaged, OUTSIDE, why=_VIEWS),
    "`torch.save(model)`": Habit(_save_model, OUTSIDE, why="a file would hold this rank's run; save run.full_state_dict()"),
    "`torch.save(model.state_dict())`": Habit(_save_state, OUTSIDE, why=_VIEWS),
    "`torch.save(parameter)`": Habit(_save_param, OUTSIDE, why=_VIEWS),
    "`model.state_dict()` read": Habit(_state_dict, (BEFORE, BETWEEN, BACKWARD, AFTER)),
    "`model.load_state_dict(...)`": Habit(_load, OUTSIDE),
    "`submodule.load_state_dict(...)`": Habit(_load_own, OUTSIDE),
    "`other.load_state_dict(model.state_dict())`": Habit(_into_other, OUTSIDE),
    "`model.zero_grad()`": Habit(lambda s: s.model.zero_grad(), (BEFORE, BACKWARD, AFTER)),
    "`model.zero_grad(set_to_none=False)`": Habit(lambda s: s.model.zero_grad(set_to_none=False), (BEFORE, BACKWARD, AFTER)),
    "`optimizer.zero_grad()`": Habit(lambda s: s.optimizer.zero_grad(), (BEFORE, BACKWARD, AFTER)),
    "`optimizer.zero_grad(set_to_none=False)`": Habit(
        lambda s: s.optimizer.zero_grad(set_to_none=False), (BEFORE, BACKWARD, AFTER)
    ),
    "`p.grad = None`": Habit(_grads_none, (BEFORE, BACKWARD, AFTER)),
    "`p.grad` read": Habit(_read_grads, (BEFORE, BACKWARD, AFTER), why=_SHARDS),
    "`p.grad.mul_(...)`": Habit(_scale_grads, (BACKWARD,), why=_SHARDS),
    "`p.grad = tensor`": Habit(_set_grads, (BACKWARD,), why="gradients come from backward, averaged over ranks"),
    "`nn.utils.clip_grad_norm_`": Habit(_clip, (BACKWARD,), why=_SHARDS + "; use run.clip_grad_norm_"),
    "`nn.utils.clip_grad_value_`": Habit(_clip_value, (BACKWARD,), why=_SHARDS),
    "`p.register_hook`": Habit(_tensor_hook, (BEFORE, AFTER)),
    "`p.register_post_accumulate_grad_hook`": Habit(_post_hook, (BEFORE, AFTER), why="it runs before gradients are averaged"),
    "forward hooks of a module": Habit(_forward_hooks, OUTSIDE),
    "backward hooks of a module": Habit(_backward_hooks, OUTSIDE),
    "step hooks of the optimizer": Habit(_step_hooks, OUTSIDE),
    "`torch.amp.GradScaler`": Habit(_scaler, (BETWEEN,), why="ranks would decide by themselves; use run.scaler"),
    "`torch.autocast`": Habit(_autocast, (BETWEEN,), every=True),
    "`torch.func.functional_call`": Habit(_functional_call, OUTSIDE),
    "`torch.func.grad` through a submodule": Habit(_func_grad, OUTSIDE),
    "`retain_graph=True`, backward twice": Habit(_retain, (BETWEEN,), every=True),
    "`loss.backward(inputs=[...])`": Habit(_inputs, (BETWEEN,), every=True),
    "`torch.autograd.grad` of parameters": Habit(_autograd_grad, (BETWEEN,), every=True),
    "a gradient penalty (`create_graph=True`)": Habit(_double_backward, (BETWEEN,), every=True),
    "evaluation, also in inference mode": Habit(_evaluate, (BEFORE, BETWEEN, BACKWARD, AFTER)),
    "a forward in training mode without backward": Habit(_train_forward_only, (BEFORE, BACKWARD, AFTER)),
    "a submodule called by itself": Habit(_submodule, (BETWEEN,), every=True),
    "`model.forward(x)` called by itself": Habit(_forward_method, (BETWEEN,), every=True),
    "a plain method, a functional call on a parameter": Habit(_method, (BETWEEN,), every=True),
    "the whole model checkpointed": Habit(_checkpointed, (BETWEEN,), every=True),
    "`detect_anomaly`": Habit(_anomaly, (BETWEEN,), every=True),
    "buffers changed in place": Habit(_buffer_values, (BEFORE, BACKWARD, AFTER)),
    "buffers replaced and added": Habit(_buffer_replaced, (BEFORE, BACKWARD, AFTER)),
    "`param_groups[i]['lr']` changed": Habit(_rates, (BEFORE, BACKWARD, AFTER)),
    "a learning rate scheduler": Habit(_scheduler, (BEFORE, AFTER), every=True),
    "pruning a layer": Habit(_prune, OUTSIDE, why="a mask is multiplied to a parameter that only a forward pass holds in memory"),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    habit: str
    when: str
    stage: int
    transport: str
    """'alone', 'shared' or 'pairwise'; the first has one rank, the others two."""
    precision: str
    joins: str
    """Whether small Units are joined, as by default, or apart, as large ones are: 'all' or 'none'."""

    @property
    def label(self) -> str:
        return f"{self.habit} {self.when}, stage {self.stage}, {self.transport}, {self.precision}, joins {self.joins}"


def cells() -> list[Cell]:
    return [
        Cell(name, when, stage, transport, precision, joins)
        for name, habit in HABITS.items()
        for when in habit.when
        for stage in range(4)
        for transport in ("alone", "shared", "pairwise")
        for precision in ("fp32", "bf16")
        for joins in (("all", "none") if stage == 3 else ("all",))
    ]


def _inputs_of(number: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(101 * number + rank))


def _train(s: Side, habit: Habit, when: str) -> list[Any]:
    losses = []

    def act(moment: str) -> None:
        if moment == when and (habit.every or s.number == 1 or moment == BEFORE):
            habit.act(s)

    act(BEFORE)
    for s.number in range(4):
        if when == FORWARD:
            s.model.inside = lambda: act(FORWARD)
        s.round()
        s.loss = s.make_loss(s.model, _inputs_of(s.number))
        s.model.inside = None
        act(BETWEEN)
        losses.append(s.loss.detach().clone())
        s.backward(s.loss)
        act(BACKWARD)
        s.step()
        act(AFTER)
    return losses


def outcome(cell: Cell) -> str:
    """Train both ways with the habit: 'equal', 'refused: ...' or what went wrong."""
    habit = HABITS[cell.habit]
    torch.manual_seed(0)
    model = Net(192 if cell.transport == "shared" and cell.precision == "fp32" else 8)
    plain = copy.deepcopy(model)
    stored = torch.bfloat16 if cell.precision == "bf16" else None
    if stored is not None:
        with torch.no_grad():
            for p in plain.parameters():
                if not p.requires_grad:
                    p.copy_(p.to(stored))
    names = [name for name, _ in plain.named_parameters()]
    masters = [(p, p if stored is None else nn.Parameter(p.detach().clone())) for p in plain.parameters()]
    make = lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5)  # noqa: E731
    given = [name != habit.leaves_out for name in names]
    optimizers = [
        make([p for p, is_given in zip(params, given, strict=True) if is_given])
        for params in (list(model.parameters()), [master for _, master in masters])
    ]
    precision = None if stored is None else sw.Precision(param=stored, compute=torch.float32)
    transport = "auto" if cell.transport == "alone" else cell.transport
    options = {"stage": cell.stage, "precision": precision, "transport": transport, "joins": cell.joins, "timeout_s": 20.0}
    run = sharded(model, optimizers[0], **options)
    ours = Side(model, optimizers[0], run)
    frozen = frozenset(id(p) for p in plain.parameters() if not p.requires_grad)
    theirs = Side(plain, optimizers[1], None, masters=masters, stored=stored, frozen=frozen)
    theirs.round()
    answers: list[Any] = []
    try:
        for side in (ours, theirs):
            try:
                answers.append(_train(side, habit, cell.when))
                if side is ours:
                    values = {name: value.clone() for name, value in run.iter_masters()}
                    buffers = {n: b.clone() for n, b in model.named_buffers()}
                else:
                    side.round()
            except sw.ShardwiseError as error:
                if side is ours and isinstance(error, sw.errors.TransportError):
                    raise
                answers.append(error)
            except RuntimeError as error:
                answers.append(error)
            is_stale = isinstance(answers[0], sw.errors.StaleGraphError)
            if side is ours and isinstance(answers[0], sw.ShardwiseError) and not is_stale:
                return f"refused: {answers[0]}"
        if isinstance(answers[0], Exception) or isinstance(answers[1], Exception):
            if all(isinstance(answer, RuntimeError) for answer in answers):
                return "equal"  # plain torch raises too
            return f"{'refused' if is_stale else 'other'}: {answers[0]!r} against {answers[1]!r}"
        for number, (one, other) in enumerate(zip(*answers, strict=True)):
            if not _same(one, other):
                return f"other: loss {number} is {float(one)} against {float(other)}"
        if len(ours.seen) != len(theirs.seen) or not all(map(_same, ours.seen, theirs.seen)):
            return "other: what was read differs"
        for name, (_, master) in zip(names, masters, strict=True):
            if not _same(values[name], master.detach()):
                return f"other: parameter {name} differs by {float((values[name] - master.detach()).abs().max())}"
        for name, buffer in plain.named_buffers():
            if not _same(buffers[name], buffer):
                return f"other: buffer {name} differs"
        return "equal"
    finally:
        run.close()


def _same(one: Any, other: Any) -> bool:
    """To the last bit; a training that overflows may do so on both sides."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(torch.nan_to_num(one, nan=1e30), torch.nan_to_num(other, nan=1e30))
    return bool(one == other)


def outcomes(chosen: list[Cell]) -> list[str]:
    found = []
    for cell in chosen:
        try:
            found.append(outcome(cell))
        except Exception as error:
            found.append(f"other: {type(error).__name__}: {error}")
            if isinstance(error, sw.errors.TransportError):
                raise
    return found
