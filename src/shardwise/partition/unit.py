"""One Unit: the parameters gathered together, this rank's shard of them, and how they appear in the module.

Owned by an `Owner` (the runtime, or construction), which decides when to gather and free. A Unit never communicates;
it only holds tensors and keeps parameters, full vector and shard consistent.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardwise.errors import FreedParameterError, ModelError
from shardwise.partition.layout import Layout, Piece
from shardwise.partition.lifecycle import (
    Handle,
    Owner,
    UnitState,
    check_move,
    managed_classes,
    own_data,
    own_grad,
    point_at,
    set_own_grad,
)
from shardwise.tiers import (
    FixedBuffer,
    FullBuffer,
    Kind,
    Ledger,
    OverlaidBuffer,
    SparePages,
    Tier,
    checksum,
    make_full_buffer,
    own_storage,
)

_CHUNK_NUMEL = 1 << 20  # elements compared at a time when values are written back
_num_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # without it only `.data` is noticed


@dataclasses.dataclass(frozen=True)
class UnitDtypes:
    """The dtypes of one Unit, resolved from the precision asked for and the parameters' own."""

    original: torch.dtype
    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    master: torch.dtype


class Span(NamedTuple):
    """The part of a flat vector that this rank updates."""

    start: int
    numel: int


@dataclasses.dataclass(frozen=True)
class UpdatePiece:
    """One parameter's part inside this rank's span, as the optimizer sees it."""

    piece: Piece
    master: nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """The piece's reduced gradient, whatever its class answers to others."""
        return own_grad(self.master)

    def set_grad(self, grad: torch.Tensor | None) -> None:
        """Give the optimizer this gradient."""
        set_own_grad(self.master, grad)


class Unit:
    """Parameters that are gathered, reduced and freed together."""

    def __init__(
        self,
        *,
        index: int,
        name: str,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        layout: Layout,
        rank: int,
        dtypes: UnitDtypes,
        device: torch.device,
        owner: Owner,
        ledger: Ledger,
        is_trainable: bool,
        is_always_full: bool,
        updates_full: bool,
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.params = list(params)
        self.layout = layout
        self.rank = rank
        self.dtypes = dtypes
        self.device = device
        self.owner = owner
        self.is_trainable = is_trainable
        self.is_always_full = is_always_full
        self.state = UnitState.SHARDED
        self.scopes = 0  # forward calls now inside this Unit
        self.num_contexts = 0  # of which run.gathered contexts
        self.is_pinned = False  # kept gathered until the next optimizer step
        self.passages: set[object] = set()  # backward passages that need this Unit gathered
        self.may_be_written_while_freed = False  # an alias of it was alive when it was freed
        self.keeps_memory = False  # it is freed, but its full vector keeps its pages: somebody uses them
        self._kept_mark = 0  # a checksum of them
        self._exposed_mark: int | None = None  # the same while it is gathered, if somebody could write past autograd
        self.is_written = False  # gathered values were changed by user code and are not in the shards yet
        # A shared parameter placed above its holders: while gathered it looks freed to everyone but them, so that a touch
        # from elsewhere is noticed and kept safe, and its backward need not last as long as the whole model's.
        self.is_covered = not is_always_full and len(params) == 1 and all(p is not params[0] for p in module._parameters.values())
        self.grad: torch.Tensor | None = None
        self.grad_is_lent = False  # user code has been given a view of it
        self.shard_is_away = False  # the shard lives on another tier and is here only while lent
        self.master_is_away = False  # the same for masters that have memory of their own
        self.spare_pages: SparePages | None = None  # where pages of the full vector come from and go to
        self._ledger = ledger
        self._tier = Tier.HOST if device.type == "cpu" else Tier.DEVICE
        self._classes = [managed_classes(type(p)) for p in params]
        self.epochs = [0] * len(params)
        """How often each parameter was given other memory; a view that was taken before is out of date."""
        self._versions: list[int] = []  # of the parameters when they were exposed or last written back
        self._addresses: list[int] = []
        self._has_lent_data = False  # user code has taken `.data`, through which writes count no version, since the last look
        self._kept_views: dict[int, weakref.WeakSet[torch.Tensor]] = {}  # those of them that may still be alive, by parameter
        self._is_untouched = False  # the last look at an overlay found no page of its own
        self._base_uses: list[int] = []  # of each parameter's storage while nobody but the Unit uses it
        self._views: list[torch.Tensor] | None = None
        self._blanks: list[torch.Tensor] = []
        self._full: FullBuffer | None = None
        self.span = Span(0, layout.numel) if updates_full else Span(rank * layout.shard_numel, layout.shard_numel)
        self.shard: torch.Tensor
        self.master: torch.Tensor
        self.pieces: tuple[UpdatePiece, ...] = ()

    # -- memory -----------------------------------------------------------------------------------------------

    @property
    def full(self) -> torch.Tensor:
        """The full vector in the compute dtype; its contents count only while gathering or gathered."""
        if self._full is None:
            with torch.inference_mode(False):  # the first use may be an evaluation; training comes later
                self._full = make_full_buffer(self.layout.numel, self.dtypes.compute, self.device, self.spare_pages)
        return self._full.tensor

    @property
    def full_bytes(self) -> int:
        """Length of the full vector; what it costs while gathered, unless it is overlaid."""
        return self.layout.numel * self.dtypes.compute.itemsize

    @property
    def is_overlaid(self) -> bool:
        """Whether the full vector shows the ranks' shards where they lie."""
        return isinstance(self._full, OverlaidBuffer)

    @property
    def is_narrow(self) -> bool:
        """Whether values are stored in another dtype than they are computed with."""
        return self.dtypes.stored != self.dtypes.compute

    @property
    def holds_alias(self) -> bool:
        """Whether the shard is this rank's slice of the full vector itself, so that it costs no bytes of its own."""
        return self.is_always_full and not self.is_narrow

    @property
    def reserved_numel(self) -> int:
        """Length of the vector this Unit wants from the transport: the full one if the shard is a slice of it."""
        return self.layout.numel if self.holds_alias else self.layout.shard_numel

    @property
    def can_overlay(self) -> bool:
        """Whether the full vector, which comes and goes, could be the ranks' shards themselves seen as one."""
        return not self.is_always_full and not self.shard_is_away and not self.is_narrow

    def allocate(self, memory: torch.Tensor, full: FullBuffer | None = None) -> None:
        """Take memory for shard, masters and (if it never goes away) the full vector.

        `memory` has `reserved_numel` elements of the stored dtype, where the transport wants them, or none if the shard lives
        elsewhere; `full`, if given, is a full vector that shows every rank's shard.
        """
        self._full = full
        self._ledger.take(self._tier, Kind.PARAM, memory.numel() * memory.element_size())
        if self.holds_alias:
            self._full = FixedBuffer(memory)
            start = self.rank * self.layout.shard_numel
            self.shard = memory[start : start + self.layout.shard_numel]
        else:
            self.shard = memory
            if self.is_always_full:
                self._full = FixedBuffer(torch.zeros(self.layout.numel, dtype=self.dtypes.compute, device=self.device))
                self._ledger.take(self._tier, Kind.PARAM, self._full.num_bytes)
        self.master = self._master_memory() if self.is_trainable else self.shard
        blank = torch.full((), float("nan"), dtype=self.dtypes.compute, device=self.device)
        self._blanks = [blank.expand(slot.shape) for slot in self.layout.slots]

    def pieces_of(self, slot: int) -> list[UpdatePiece]:
        """One parameter's pieces in this rank's span."""
        return [update for update in self.pieces if update.piece.slot_index == slot]

    def thaw(self) -> None:
        """Make a Unit that was frozen trainable: masters begin with the stored values."""
        self.is_trainable = True
        self.master = self._master_memory()
        if self.has_own_master:
            self.master.copy_(self.full if self.span.numel == self.layout.numel and self.is_always_full else self.shard)

    def _master_memory(self) -> torch.Tensor:
        if self.master_is_away:
            return torch.empty(0, dtype=self.dtypes.master, device=self.device)
        if self.dtypes.master == self.dtypes.stored and self.span.numel == self.layout.shard_numel:
            return self.shard
        if self.dtypes.master == self.dtypes.compute == self.dtypes.stored and self.is_always_full:
            return self.full
        self._ledger.take(self._tier, Kind.MASTER, self.span.numel * self.dtypes.master.itemsize)
        return torch.zeros(self.span.numel, dtype=self.dtypes.master, device=self.device)

    def grad_memory(self) -> torch.Tensor:
        """The reduced gradient of this rank's span, taken on first use and kept."""
        if self.grad is None:
            self.grad = torch.zeros(self.span.numel, dtype=self.dtypes.master, device=self.device)
            self._ledger.take(self._tier, Kind.GRAD, self.grad.numel() * self.grad.element_size())
        return self.grad

    def renew_grad(self) -> None:
        """The gradient was dropped: if user code has seen its memory, which is its own then, the next one gets other memory."""
        if self.grad_is_lent and self.grad is not None:
            self._ledger.give(self._tier, Kind.GRAD, self.grad.numel() * self.grad.element_size())
            self.grad = None
        self.grad_is_lent = False

    # -- values -----------------------------------------------------------------------------------------------

    def store(self, index: int, values: torch.Tensor) -> None:
        """Write one parameter's whole value (flat, storage order) into this rank's shard, master and full vector."""
        slot = self.layout.slots[index]
        values = values.detach()
        if self.is_always_full:
            self.full[slot.offset : slot.end].copy_(values.to(self.dtypes.stored))
        self._store_part(self.shard, self.rank * self.layout.shard_numel, slot.offset, values)
        if self.master is not self.shard:
            self._store_part(self.master, self.span.start, slot.offset, values)

    @staticmethod
    def _store_part(target: torch.Tensor, target_start: int, offset: int, values: torch.Tensor) -> None:
        low = max(offset, target_start)
        high = min(offset + values.numel(), target_start + target.numel())
        if low < high:
            target[low - target_start : high - target_start].copy_(values[low - offset : high - offset])

    def store_from_full(self) -> bool:
        """Write gathered values that were changed in place back into shard and master; True if any were.

        Only changed elements are written: an untouched master keeps the digits its stored form has lost.
        """
        own = self.rank * self.layout.shard_numel
        is_changed = self._store_changed(self.shard, own) if not self.holds_alias else False
        if self.has_own_master:
            is_changed |= self._store_changed(self.master, self.span.start)
        if self.is_always_full and self.is_narrow:
            self.full.copy_(self.full.to(self.dtypes.stored))  # compute sees what is stored, as after a step
        if self._full is not None and self.is_overlaid:
            self._full.discard()  # its own pages: it shows the shards again, all of them after the next fence
        return is_changed

    @property
    def has_own_master(self) -> bool:
        """Whether masters are kept beside the stored and the full parameters."""
        return self.master is not self.shard and self.master is not self._full_tensor()

    def lend_alias(self, slot: int, alias: torch.Tensor) -> None:
        """User code has taken `.data` of a parameter: from now on it may be written without autograd's version telling."""
        self._has_lent_data = True
        self._kept_views.setdefault(slot, weakref.WeakSet()).add(alias)

    @property
    def is_lent(self) -> bool:
        """Whether anybody else holds memory of the full vector: a view that a module returned, `.data`, an array."""
        if self._views is None or _num_uses is None:
            return any(len(views) > 0 for views in self._kept_views.values())
        own = self.state is UnitState.GATHERED  # then the parameters hold it too
        for view, base in zip(self._views, self._base_uses, strict=True):
            if _num_uses(view.untyped_storage()._cdata) > base + own:
                return True
        return False

    def rebind(self, slot: int) -> None:
        """A parameter was given other memory by `p.data = ...`: views and graphs that mean the old values have lost them."""
        self.epochs[slot] += 1

    def may_be_written(self) -> bool:
        """Whether gathered values may differ from the shards: written through the parameter or an alias of it, or replaced.

        The same answer on every rank whose user code has done the same: it does not depend on which slice is whose.
        """
        if self.state is not UnitState.GATHERED:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            if self._versions != [p._version for p in self.params]:
                return True
            if any(p.data_ptr() != address for p, address in zip(self.params, self._addresses, strict=True)):
                return True
        if isinstance(self._full, OverlaidBuffer) and self._full.can_tell:
            self._is_untouched = self._full.is_untouched()
            return not self._is_untouched
        return self._has_lent_data or (self._exposed_mark is not None and self._exposed_mark != self._mark())

    def differs(self) -> bool:
        """Whether this rank's part of the full vector has other values than its shard, or masters, by looking at all of them.

        Always True while those live elsewhere, and where the full vector is the shard.
        """
        is_away = self.shard.numel() < self.layout.shard_numel or (self.is_trainable and self.master.numel() < self.span.numel)
        if self.holds_alias or is_away:
            return True
        start = self.rank * self.layout.shard_numel
        if self._first_difference(self.shard, start):
            return True
        return self.has_own_master and self._first_difference(self.master, self.span.start)

    def _first_difference(self, target: torch.Tensor, start: int) -> bool:
        for at in range(0, target.numel(), _CHUNK_NUMEL):
            if bool(self._differing(target[at : at + _CHUNK_NUMEL], start + at).any()):
                return True
        return False

    def _differing(self, old: torch.Tensor, start: int) -> torch.Tensor:
        """Where gathered values differ from what `old`, from element `start` on, is stored as."""
        new = self.full[start : start + old.numel()]
        was = old.to(self.dtypes.stored).to(new.dtype)
        return ~((new == was) | (new.isnan() & was.isnan()))

    def absorb(self) -> None:
        """Copy values in that user code put in the parameters' place (`p.data = x`, `p.set_(x)`); parameters are views again."""
        if self._views is None or self.state is not UnitState.GATHERED:
            return
        for index, (param, address) in enumerate(zip(self.params, self._addresses, strict=True)):
            with torch._C.DisableTorchFunctionSubclass():
                if param.data_ptr() == address:
                    continue
                self._take_in(index, own_data(param), address)
                point_at(param, self._views[index])

    def _take_in(self, index: int, data: torch.Tensor, address: int) -> None:
        assert self._views is not None
        slot, view = self.layout.slots[index], self._views[index]
        if view.data_ptr() != address or data.is_shared():
            raise ModelError(
                f"parameter {slot.name!r} (Unit {self.name!r}, rank {self.rank}) was moved to shared memory by "
                "share_memory(), so updates would not reach it. Call share_memory() before sw.shard(), on a copy."
            )
        if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
            raise ModelError(
                f"parameter {slot.name!r} (Unit {self.name!r}, rank {self.rank}) was replaced by a tensor of shape "
                f"{list(data.shape)}, dtype {data.dtype} on {data.device} (model.to(), .half(), or an assignment to .data); "
                f"it has shape {list(view.shape)}, dtype {view.dtype} on {view.device}. Convert the model before sw.shard()."
            )
        if self.owner.owns(data.data_ptr()):
            raise ModelError(
                f"parameter {slot.name!r} (Unit {self.name!r}, rank {self.rank}) was tied to another one through .data. Tie "
                "them as one Parameter, as in `module.weight = other.weight`, before sw.shard()."
            )
        if any(alias.data_ptr() == address for alias in self._kept_views.get(index, ())):
            raise ModelError(
                f"parameter {slot.name!r} (Unit {self.name!r}, rank {self.rank}) was given other values by an assignment to "
                ".data while its old ones are still held through a `.data` taken before; they would be overwritten now. Keep "
                "a copy "
                "instead (`.data.clone()`), or put the old values back first."
            )
        view.copy_(data)
        self.rebind(index)

    def _store_changed(self, target: torch.Tensor, start: int) -> bool:
        is_changed = False
        for at in range(0, target.numel(), _CHUNK_NUMEL):
            old = target[at : at + _CHUNK_NUMEL]
            differs = self._differing(old, start + at)
            if bool(differs.any()):
                is_changed = True
                new = self.full[start + at : start + at + old.numel()]
                old.copy_(torch.where(differs, new.to(old.dtype), old))
        return is_changed

    def publish_master(self) -> None:
        """After an optimizer step: round the masters into the stored shard (and, if it is whole, into the full)."""
        if self.has_own_master:
            self.publish_part(0, self.master)

    def publish_part(self, low: int, masters: torch.Tensor) -> None:
        """The same for new masters of the span's elements from `low` on."""
        if self.is_always_full and self.span.numel == self.layout.numel:  # nobody gathers after the step
            self.full[low : low + masters.numel()].copy_(masters.to(self.dtypes.stored))
        self._store_part(self.shard, self.rank * self.layout.shard_numel, self.span.start + low, masters)

    def covers(self, address: int) -> bool:
        """Whether an address lies in the full vector, which keeps its place for life."""
        full = self._full_tensor()
        return full is not None and full.data_ptr() <= address < full.data_ptr() + self.full_bytes

    def _full_tensor(self) -> torch.Tensor | None:
        return None if self._full is None else self._full.tensor

    def changed(self, slots: Iterable[int] | None = None) -> None:
        """Note that values of these parameters (default: all) are new: graphs that read the old ones are out of date."""
        with torch._C.DisableTorchFunctionSubclass():
            touched = self.params if slots is None else [self.params[slot] for slot in slots]
            if touched:
                torch.autograd.graph.increment_version(touched)
        self.note_versions()

    def unpin(self) -> None:
        """No longer keep the Unit gathered for a graph that saved its values: autograd would notice if that were run now."""
        if self.is_pinned:
            self.is_pinned = False
            torch.autograd.graph.increment_version(self.full)

    def note_versions(self) -> None:
        """Shards hold what the parameters show now."""
        self._has_lent_data = self.is_always_full and any(len(views) > 0 for views in self._kept_views.values())
        is_watched = not self.is_always_full and not self.is_overlaid and self.is_lent  # through an alias from before
        self._exposed_mark = self._mark() if is_watched else None
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [param._version for param in self.params]

    # -- lifecycle --------------------------------------------------------------------------------------------

    @property
    def is_gathered(self) -> bool:
        """Whether parameters are usable now."""
        return self.state is UnitState.GATHERED

    def begin_gather(self) -> torch.Tensor:
        """Claim the full vector for filling and return it."""
        check_move(self.name, self.state, UnitState.GATHERING)
        full = self.full  # creates the buffer on first use
        assert self._full is not None
        if self.keeps_memory:
            self._refuse_scribbles()
            self.keeps_memory = False
        else:
            self._full.claim()
            try:
                self._ledger.take(self._tier, Kind.BUFFER, self._full.num_bytes)
            except BaseException:
                self._full.discard()
                raise
        self.state = UnitState.GATHERING
        return full

    def _refuse_scribbles(self) -> None:
        if self.is_scribbled:
            self._kept_mark = self._mark()
            raise FreedParameterError(
                f"parameters of Unit {self.name!r} ({self.layout.slots[0].name!r} ..., rank {self.rank}) were written through an "
                "alias that was taken during a forward pass (`.data`, `.detach()`, a returned view) and kept after it; the next "
                "gather would overwrite that. Write through the parameter itself, as in `param.mul_(...)` under torch.no_grad()."
            )

    def cancel_gather(self) -> None:
        """The gather failed: give the memory back."""
        check_move(self.name, self.state, UnitState.SHARDED)
        self.state = UnitState.SHARDED
        self._give_up_full(is_quiet=False)

    def expose(self) -> None:
        """The full vector is filled: point the module's parameters at it."""
        check_move(self.name, self.state, UnitState.GATHERED)
        if self._views is None:
            full = self.full
            base = full.storage_offset()
            with torch.inference_mode(False):
                flat = [torch.as_strided(full, s.shape, s.stride, base + s.offset) for s in self.layout.slots]
                self._views = [own_storage(view) for view in flat]
            self._addresses = [view.data_ptr() for view in self._views]
            if _num_uses is not None:
                self._base_uses = [_num_uses(view.untyped_storage()._cdata) for view in self._views]
        with torch._C.DisableTorchFunctionSubclass():
            for param, view, (gathered, _) in zip(self.params, self._views, self._classes, strict=True):
                param.__class__ = gathered
                point_at(param, view)
        self.state = UnitState.GATHERED
        self._is_untouched = False
        self.note_versions()

    def uncover(self) -> None:
        """Let a covered parameter be used by the call that runs now."""
        if self.is_covered and self.state is UnitState.GATHERED:
            self.params[0].__class__ = self._classes[0][0]

    def cover(self) -> None:
        """Have the next touch of a covered parameter noticed."""
        if self.is_covered and self.state is UnitState.GATHERED and not self.num_contexts:
            self.params[0].__class__ = self._classes[0][1]

    def free(self) -> None:
        """Parameters become placeholders and the full vector's memory is given back."""
        check_move(self.name, self.state, UnitState.SHARDED)
        for param, blank, (_, freed) in zip(self.params, self._blanks, self._classes, strict=True):
            point_at(param, blank)
            param.__class__ = freed
        self.state = UnitState.SHARDED
        is_lent = self.is_lent
        self.may_be_written_while_freed = is_lent
        self.keeps_memory = is_lent and not self.is_overlaid
        if self.keeps_memory:  # a module has returned a view, a hook has kept one; an overlay goes on showing the shards
            self._kept_mark = self._mark()
        elif not self._is_untouched:  # else there is nothing to give back, as a look has just shown
            self._give_up_full()
        self._is_untouched = False

    def _mark(self) -> int:
        return checksum(self.full) if self.device.type == "cpu" else 0

    def give_up_kept(self) -> None:
        """Give back memory that somebody used when the Unit was freed, if nobody does any more."""
        if self.keeps_memory and self.state is UnitState.SHARDED and not self.is_lent:
            self.keeps_memory = False
            self._give_up_full()

    def reopen(self) -> None:
        """Show the parameters in memory that was kept, without a gather."""
        check_move(self.name, self.state, UnitState.GATHERING)
        self.state = UnitState.GATHERING
        self.keeps_memory = False
        self.expose()

    def _give_up_full(self, *, is_quiet: bool = True) -> None:
        assert self._full is not None
        self._ledger.give(self._tier, Kind.BUFFER, self._full.num_bytes)
        self._full.discard(is_quiet=is_quiet)

    @property
    def is_scribbled(self) -> bool:
        """Whether an alias that was alive when the Unit was freed has been written since."""
        if self.state is not UnitState.SHARDED or not self.may_be_written_while_freed or self._full is None:
            return False
        return self._kept_mark != self._mark() if self.keeps_memory else self.is_overlaid and not self._full.is_untouched()

    def was_written_while_freed(self) -> bool:
        """Whether an alias taken while gathered was written after the Unit was freed: such a write is lost."""
        return self.state is UnitState.SHARDED and self._full is not None and not self._full.is_untouched()

    def adopt(self, *, keeps_unit: bool = False) -> None:
        """Make the module's own parameters this Unit's: from here on they are placeholders or views.

        `keeps_unit`: parameters keep the Unit alive, because nobody else does yet.
        """
        for index, (param, (_, freed)) in enumerate(zip(self.params, self._classes, strict=True)):
            set_own_grad(param, None)
            point_at(param, self._blanks[index])
            param._shardwise = Handle(self, index, keeps_unit=keeps_unit)  # type: ignore[attr-defined]
            param.__class__ = freed
        if self.is_always_full:
            self.state = UnitState.GATHERING
            self.expose()


def flat_values(param: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A parameter's elements in storage order, as the layout keeps them."""
    value = param.detach()
    if tuple(value.stride()) == stride:
        return value.as_strided((value.numel(),), (1,))
    return (
        torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
        .copy_(value)
        .as_strided((value.numel(),), (1,))
    )
