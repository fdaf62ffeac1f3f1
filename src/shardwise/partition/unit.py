"""One Unit: the parameters gathered together, this rank's shard of them, and how they appear in the module.

Built from its Blueprint and the memory it is given. Its owner (the engine, or construction) decides when to gather and free.
A Unit never communicates; it only holds tensors and keeps parameters, full vector and shard consistent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from shardwise.errors import FreedParameterError
from shardwise.partition.blueprint import Blueprint, Span, UnitDtypes
from shardwise.partition.dtensors import retype
from shardwise.partition.freed import managed_classes
from shardwise.partition.layout import Layout, Piece
from shardwise.partition.lifecycle import Handle, Owner, UnitState, check_move
from shardwise.partition.raw import DATA, GRAD, is_dtensor, point_at, set_local, set_own_grad
from shardwise.partition.update_piece import UpdatePiece
from shardwise.partition.writes import Writes
from shardwise.tiers import (
    FixedBuffer,
    FullBuffer,
    Kind,
    Ledger,
    OverlaidBuffer,
    SparePages,
    aligned_zeros,
    device_tier,
    make_full_buffer,
    own_storage,
)


class Unit:
    """Parameters that are gathered, reduced and freed together."""

    def __init__(
        self,
        blueprint: Blueprint,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        owner: Owner,
        ledger: Ledger,
        memory: torch.Tensor,
        *,
        full: FullBuffer | None = None,
        spare_pages: SparePages | None = None,
        held: Sequence[nn.Parameter] | None = None,
    ) -> None:
        """`memory`: `blueprint.reserved_numel` elements of the stored dtype, none if the shard is offloaded. `full`: an
        overlay of all ranks' shards, if there is one. `spare_pages`: pages of freed Units, to be used again. `held`: the
        parameters as modules hold them, if those are not `params`: of a tile, the tiled parameter.
        """
        self.blueprint = blueprint
        self.index = blueprint.index
        """Its number, and the tag of its operations."""
        self.module = module
        self.params = list(params)
        self.held = self.params if held is None else list(held)
        """The parameters as modules and the user's optimizer hold them."""
        self.owner = owner
        self.state = UnitState.SHARDED
        self.writes = Writes(self.params, is_always_full=blueprint.is_always_full)
        self.keeps_memory = False
        """Whether it is freed, but its full vector keeps its pages because user code holds views of them."""
        # Covered: a shared parameter placed above the modules that hold it. While gathered it looks freed to all others, so that
        # their touch is noticed, and it can be freed before the backward of the module above has ended.
        is_above = len(params) == 1 and all(p is not params[0] for p in module._parameters.values())
        self.is_covered = is_above and not blueprint.is_always_full and not blueprint.tile_of
        self._ledger = ledger
        self._tier = device_tier(blueprint.device)
        self._spare_pages = spare_pages
        self._classes = [managed_classes(type(p)) for p in params]
        self._setters = [set_local if is_dtensor(p) else DATA.__set__ for p in params]
        self._views: list[torch.Tensor] | None = None
        blank = torch.full((), float("nan"), dtype=blueprint.dtypes.compute, device=blueprint.device)
        self._blanks = [blank.expand(slot.shape) for slot in blueprint.layout.slots]
        self._full, self.shard = self._allocate(memory, full)
        self.master, self.pieces = self._allocate_master()

    # -- identity ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.blueprint.name

    @property
    def layout(self) -> Layout:
        """The offsets of its parameters in the flat vector."""
        return self.blueprint.layout

    @property
    def dtypes(self) -> UnitDtypes:
        """The dtypes of stored values, computation, reduction and masters."""
        return self.blueprint.dtypes

    @property
    def rank(self) -> int:
        """The number of this rank's slice."""
        return self.blueprint.rank

    @property
    def span(self) -> Span:
        """The part of the flat vector that this rank updates."""
        return self.blueprint.span

    @property
    def span_pieces(self) -> tuple[Piece, ...]:
        """The Pieces in the span, of a frozen Unit too."""
        return self.layout.all_pieces() if self.span.numel == self.layout.numel else self.layout.pieces(self.rank)

    @property
    def is_trainable(self) -> bool:
        """Whether it has masters and gradients."""
        return self.blueprint.is_trainable

    @property
    def is_always_full(self) -> bool:
        """Whether parameters stay full between their uses (below stage 3)."""
        return self.blueprint.is_always_full

    @property
    def has_own_master(self) -> bool:
        """Whether masters have memory of their own, besides the stored and the full parameters."""
        return self.blueprint.has_own_master

    @property
    def full_bytes(self) -> int:
        """Size of the full vector in bytes."""
        return self.blueprint.full_bytes

    # -- memory -----------------------------------------------------------------------------------------------

    def _allocate(self, memory: torch.Tensor, full: FullBuffer | None) -> tuple[FullBuffer | None, torch.Tensor]:
        self._ledger.reserve(self._tier, Kind.PARAM, memory.numel() * memory.element_size())
        layout = self.blueprint.layout
        if self.blueprint.holds_alias:
            start = self.rank * layout.shard_numel
            return FixedBuffer(memory), memory[start : start + layout.shard_numel]
        if self.is_always_full:
            full = FixedBuffer(torch.zeros(layout.numel, dtype=self.dtypes.compute, device=self.blueprint.device))
            self._ledger.reserve(self._tier, Kind.PARAM, full.num_bytes)
        return full, memory

    def _allocate_master(self) -> tuple[torch.Tensor, tuple[UpdatePiece, ...]]:
        if not self.is_trainable:
            return self.shard, ()
        span, dtype, device = self.span, self.dtypes.master, self.blueprint.device
        if not self.has_own_master:
            master = self.shard if span.numel == self.layout.shard_numel else self.full
        elif self.blueprint.offloads_master:
            master = torch.empty(0, dtype=dtype, device=device)
        else:
            self._ledger.reserve(self._tier, Kind.MASTER, span.numel * dtype.itemsize)
            master = aligned_zeros(span.numel, dtype, device)
        # While masters are offloaded a piece has a shape but no values.
        whole = master if master.numel() else torch.full((), float("nan"), dtype=dtype, device=device).expand(span.numel)
        pieces = self.span_pieces
        return master, tuple(UpdatePiece(p, nn.Parameter(whole[p.shard_start : p.shard_start + p.numel])) for p in pieces)

    def renumber(self, index: int) -> None:
        """Change the index: ranks that have built Units in different orders must use the same numbers."""
        self.blueprint = dataclasses.replace(self.blueprint, index=index)
        self.index = index

    def thaw(self) -> None:
        """Make a frozen Unit trainable; its masters start from the stored values."""
        self.blueprint = dataclasses.replace(self.blueprint, is_trainable=True)
        self.master, self.pieces = self._allocate_master()
        if self.has_own_master:
            self.master.copy_(self.full if self.span.numel == self.layout.numel and self.is_always_full else self.shard)

    def grads(self) -> list[torch.Tensor | None]:
        """The reduced gradient of every Piece, or None."""
        get_grad = GRAD.__get__
        with torch._C.DisableTorchFunctionSubclass():
            return [get_grad(update.master) for update in self.pieces]

    def pieces_of(self, slot: int) -> list[UpdatePiece]:
        """The Pieces of one parameter in this rank's span."""
        return [update for update in self.pieces if update.slot == slot]

    @property
    def full(self) -> torch.Tensor:
        """The full vector in the compute dtype; its contents are valid only while gathered."""
        return self._buffer().tensor

    def _buffer(self) -> FullBuffer:
        if self._full is None:
            with torch.inference_mode(False):  # the first use may be inside inference_mode, and training comes later
                self._full = make_full_buffer(self.layout.numel, self.dtypes.compute, self.blueprint.device, self._spare_pages)
        return self._full

    @property
    def views(self) -> Sequence[torch.Tensor]:
        """Every parameter's view of the full vector; empty before the first gather."""
        return self._views or ()

    @property
    def is_overlaid(self) -> bool:
        """Whether the full vector is an overlay: a mapping over all ranks' shards."""
        return isinstance(self._full, OverlaidBuffer)

    def drop_own_pages(self) -> None:
        """After a write back: drop written pages, so that an overlay shows the shards, all of them after the next fence."""
        if self._full is not None and self.is_overlaid:
            self._full.discard()

    def has_address(self, address: int) -> bool:
        """Whether an address lies in the full vector, whose address never changes."""
        if self._full is None:
            return False
        start = self._full.tensor.data_ptr()
        return start <= address < start + self.full_bytes

    # -- lifecycle --------------------------------------------------------------------------------------------

    def adopt(self, *, keeps_unit: bool = False) -> None:
        """Take over the module's parameters: from now on they are views of the full vector or, while freed, placeholders.

        `keeps_unit`: parameters hold a strong reference to the Unit, because nothing else does yet.
        """
        for index, (param, (_, freed)) in enumerate(zip(self.params, self._classes, strict=True)):
            set_own_grad(param, None)
            retype(param, self.dtypes.compute)
            point_at(param, self._blanks[index])
            param._shardwise = Handle(self, index, keeps_unit=keeps_unit)  # type: ignore[attr-defined]
            param.__class__ = freed
        if self.is_always_full:
            self.state = UnitState.GATHERING
            self.expose()

    @property
    def is_gathered(self) -> bool:
        """Whether parameters can be used now."""
        return self.state is UnitState.GATHERED

    def begin_gather(self) -> torch.Tensor:
        """Allocate the full vector's memory and return the vector, to be filled."""
        check_move(self.name, self.state, UnitState.GATHERING)
        buffer = self._buffer()
        if self.keeps_memory:
            self._refuse_late_writes()
            self.keeps_memory = False
        else:
            buffer.claim()
            try:
                self._ledger.reserve(self._tier, Kind.BUFFER, buffer.num_bytes)
            except BaseException:
                buffer.discard()
                raise
        self.state = UnitState.GATHERING
        return buffer.tensor

    def _refuse_late_writes(self) -> None:
        if self.was_written_while_freed:
            self.writes.forget_freed()
            raise FreedParameterError(
                f"parameters of Unit {self.name!r} ({self.layout.slots[0].name!r} ..., rank {self.rank}) were written through an "
                "alias that was taken during a forward pass (`.data`, `.detach()`, a returned view) and kept after it; the next "
                "gather would overwrite that. Write through the parameter itself, as in `param.mul_(...)` under torch.no_grad()."
            )

    def cancel_gather(self) -> None:
        """Release the memory of a gather that failed or is not needed."""
        check_move(self.name, self.state, UnitState.SHARDED)
        self.state = UnitState.SHARDED
        self._discard(is_quiet=False)

    def expose(self) -> None:
        """The full vector is filled: point the module's parameters at it."""
        check_move(self.name, self.state, UnitState.GATHERED)
        is_shown = self._views is not None and self.is_overlaid  # since the first time
        if self._views is None:
            full = self.full
            base = full.storage_offset()
            with torch.inference_mode(False):
                flat = [torch.as_strided(full, s.shape, s.stride, base + s.offset) for s in self.layout.slots]
                self._views = [own_storage(view) for view in flat]
            self.writes.begin(self._buffer(), self._views)
        with torch._C.DisableTorchFunctionSubclass():
            for param, view, (gathered, _), set_data in zip(self.params, self._views, self._classes, self._setters, strict=True):
                param.__class__ = gathered
                if not is_shown:
                    set_data(param, view)
        self.state = UnitState.GATHERED
        self.writes.note()

    def reopen(self) -> None:
        """Point the parameters at the memory that was kept when the Unit was freed, without a gather."""
        check_move(self.name, self.state, UnitState.GATHERING)
        self.state = UnitState.GATHERING
        self.keeps_memory = False
        self.expose()

    def free(self) -> None:
        """Turn parameters into placeholders and release the full vector's memory, unless user code holds views of it.

        An overlay costs nothing and always shows the shards, so its parameters only change their class: user code's touches are
        noticed, and backward reads them as they are. Pages that user code has written without a version stay until they are
        stored (`was_written_while_freed`).
        """
        check_move(self.name, self.state, UnitState.SHARDED)
        is_overlaid = self.is_overlaid
        with torch._C.DisableTorchFunctionSubclass():
            for param, blank, (_, freed), set_data in zip(self.params, self._blanks, self._classes, self._setters, strict=True):
                if not is_overlaid:
                    set_data(param, blank)
                param.__class__ = freed
        self.state = UnitState.SHARDED
        self.keeps_memory = not is_overlaid and self.is_shared
        self.writes.begin_freed(keeps_memory=self.keeps_memory)
        if not is_overlaid and not self.keeps_memory:
            self._discard()

    def discard_kept(self) -> None:
        """Release memory that was kept when the Unit was freed, if user code holds no views of it any more."""
        if self.keeps_memory and self.state is UnitState.SHARDED and not self.is_shared and not self.was_written_while_freed:
            self.keeps_memory = False
            self._discard()

    def _discard(self, *, is_quiet: bool = True) -> None:
        buffer = self._buffer()
        self._ledger.release(self._tier, Kind.BUFFER, buffer.num_bytes)
        buffer.discard(is_quiet=is_quiet)

    def uncover(self) -> None:
        """Make a covered parameter usable by the running call."""
        if self.is_covered and self.state is UnitState.GATHERED:
            self.params[0].__class__ = self._classes[0][0]

    def cover(self) -> None:
        """Make a covered parameter look freed, so that the next touch is noticed."""
        if self.is_covered and self.state is UnitState.GATHERED:
            self.params[0].__class__ = self._classes[0][1]

    # -- writes -----------------------------------------------------------------------------------------------

    def may_be_written(self) -> bool:
        """Whether gathered values may differ from the shards."""
        return self.state is UnitState.GATHERED and self.writes.may_have_happened()

    @property
    def is_shared(self) -> bool:
        """Whether anything but the Unit and its parameters uses the full vector's memory."""
        return self.writes.is_shared(is_shown=self.state is UnitState.GATHERED or self.is_overlaid)

    @property
    def was_written_while_freed(self) -> bool:
        """Whether memory that user code held when the Unit was freed has been written since."""
        return self.state is UnitState.SHARDED and self.writes.happened_while_freed(keeps_memory=self.keeps_memory)

    def was_any_page_written(self) -> bool:
        """Whether any page of a freed full vector was written: such a write is lost."""
        return self.state is UnitState.SHARDED and self._full is not None and not self._full.is_untouched()

    def rebind(self, slot: int) -> None:
        """After `p.data = ...`: views and graphs that need the old values of the parameter are out of date."""
        self.writes.epochs[slot] += 1

    def changed(self, slots: Iterable[int] | None = None) -> None:
        """Note that values of these parameters (default: all) are new: graphs that read the old ones are out of date."""
        with torch._C.DisableTorchFunctionSubclass():
            touched = self.params if slots is None else [self.params[slot] for slot in slots]
            if touched:
                torch.autograd.graph.increment_version(touched)
        self.outdate_views()
        self.writes.note()

    def outdate_views(self) -> None:
        """Make autograd notice that graphs which saved views of an overlay itself (`FreedView`s) are out of date."""
        if self.is_overlaid:
            torch.autograd.graph.increment_version(self.full)
