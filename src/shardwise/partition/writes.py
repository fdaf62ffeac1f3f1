"""Has user code changed a Unit's parameters, or kept hold of their memory?

Autograd counts a version for writes through a parameter. Writes through `.data`, a kept view or an array count none; they are
noticed by who uses the memory, by a checksum, or by the kernel's account of pages. Owned by a Unit; changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from shardwise.partition.raw import own_data
from shardwise.tiers import FullBuffer, OverlaidBuffer, checksum

_num_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # without it only `.data` is noticed


class Writes:
    """What is known of writes to one Unit's gathered values."""

    def __init__(self, params: Sequence[nn.Parameter], *, is_always_full: bool) -> None:
        self._params = params
        self._is_always_full = is_always_full
        self.epochs = [0] * len(params)
        """How often each parameter was given other memory; a view that was taken before is out of date."""
        self._full: FullBuffer | None = None
        self._views: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []  # when the parameters were exposed or last written back
        self._addresses: list[int] = []
        self._base_uses: list[int] = []  # of each parameter's storage while nobody but the Unit uses it
        self._has_alias = False  # user code has taken `.data`, through which writes count no version, since the last look
        self._aliases: dict[int, weakref.WeakSet[torch.Tensor]] = {}  # those that may still be alive, by parameter
        self._shown: int | None = None  # checksum when the values were last known, if somebody could write past autograd
        self._freed: int | None = None  # the same when the Unit was freed and somebody still used its memory
        self.is_untouched = False
        """Whether the last look at an overlay found no page of this process's own."""

    def begin(self, full: FullBuffer, views: Sequence[torch.Tensor]) -> None:
        """The parameters have memory from now on: `views` of `full`."""
        self._full, self._views = full, views
        self._addresses = [view.data_ptr() for view in views]
        if _num_uses is not None:
            self._base_uses = [_num_uses(view.untyped_storage()._cdata) for view in views]

    def add_alias(self, slot: int, alias: torch.Tensor) -> None:
        """User code has taken `.data` of a parameter."""
        self._has_alias = True
        self._aliases.setdefault(slot, weakref.WeakSet()).add(alias)

    def has_alias_at(self, slot: int) -> bool:
        """Whether user code still holds a `.data` that shows a parameter's place in the full vector."""
        return any(alias.data_ptr() == self._addresses[slot] for alias in self._aliases.get(slot, ()))

    def is_shared(self, *, is_gathered: bool) -> bool:
        """Whether anybody else holds memory of the full vector: a view that a module returned, `.data`, an array."""
        if not self._views or _num_uses is None:
            return any(len(aliases) > 0 for aliases in self._aliases.values())
        for view, base in zip(self._views, self._base_uses, strict=True):
            if _num_uses(view.untyped_storage()._cdata) > base + is_gathered:  # gathered parameters hold it too
                return True
        return False

    def note(self) -> None:
        """Shards hold what the gathered parameters show now."""
        self.is_untouched = False
        self._has_alias = self._is_always_full and any(len(aliases) > 0 for aliases in self._aliases.values())
        is_watched = not self._is_always_full and not isinstance(self._full, OverlaidBuffer) and self.is_shared(is_gathered=True)
        self._shown = self._mark() if is_watched else None
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [param._version for param in self._params]

    def may_have_happened(self) -> bool:
        """Whether gathered values may differ from the shards: written through the parameter or an alias of it, or replaced.

        The same answer on every rank whose user code has done the same: it does not depend on which slice is whose.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self._versions != [p._version for p in self._params]:
                return True
            if any(p.data_ptr() != address for p, address in zip(self._params, self._addresses, strict=True)):
                return True
        if isinstance(self._full, OverlaidBuffer) and self._full.can_tell:
            self.is_untouched = self._full.is_untouched()
            return not self.is_untouched
        return self._has_alias or (self._shown is not None and self._shown != self._mark())

    def replaced(self) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """(slot, the tensor in its place, whether the Unit's own view has moved) of parameters with other memory."""
        for slot, (param, address) in enumerate(zip(self._params, self._addresses, strict=True)):
            with torch._C.DisableTorchFunctionSubclass():
                if param.data_ptr() != address:
                    yield slot, own_data(param), self._views[slot].data_ptr() != address

    # -- while the Unit is freed ------------------------------------------------------------------------------

    def begin_freed(self, *, keeps_memory: bool, is_shared: bool) -> None:
        """The Unit is freed; `is_shared`: somebody still uses its memory, which `keeps_memory` or shows the shards."""
        self._freed = None
        if is_shared:
            self._freed = self._mark() if keeps_memory else 0

    def happened_while_freed(self, *, keeps_memory: bool) -> bool:
        """Whether memory that was in use when the Unit was freed has been written since."""
        if self._freed is None or self._full is None:
            return False
        if keeps_memory:
            return self._freed != self._mark()
        return isinstance(self._full, OverlaidBuffer) and not self._full.is_untouched()

    def forget_freed(self) -> None:
        """Report what was written while freed once only."""
        self._freed = self._mark()

    def _mark(self) -> int:
        assert self._full is not None
        return checksum(self._full.tensor)
