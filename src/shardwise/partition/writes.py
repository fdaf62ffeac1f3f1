"""Has user code changed a Unit's parameters, and does it hold views of their memory?

Autograd counts a version for writes through a parameter, but not for writes through `.data`, a kept view or an array. Those are
noticed by the storage's use count, a checksum, or the kernel's record of written pages. Owned by a Unit; it only observes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from shardwise.partition.raw import address_of, own_data, version_of
from shardwise.tiers import FullBuffer, OverlaidBuffer, checksum

_num_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # without it only `.data` is noticed


class Writes:
    """What is known of writes to one Unit's gathered values."""

    def __init__(self, params: Sequence[nn.Parameter], *, is_always_full: bool) -> None:
        self._params = params
        self._is_always_full = is_always_full
        self.epochs = [0] * len(params)
        """How often `p.data` was assigned, for each parameter; a view that was taken before is out of date."""
        self._full: FullBuffer | None = None
        self._views: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []  # of the parameters at the last `note`
        self._addresses: list[int] = []
        self._base_uses: list[int] = []  # use count of each parameter's storage while only the Unit uses it
        self._has_alias = False  # user code has taken `.data` since the last `note`; writes through it count no version
        self._aliases: dict[int, weakref.WeakSet[torch.Tensor]] = {}  # `.data` tensors that may be alive, by slot
        self._shown: int | None = None  # checksum at the last `note`, if writes without a version were possible
        self._freed: int | None = None  # checksum when the Unit was freed, if its memory was still in use

    def begin(self, full: FullBuffer, views: Sequence[torch.Tensor]) -> None:
        """Start to observe the parameters, which are `views` of `full` from now on."""
        self._full, self._views = full, views
        self._addresses = [view.data_ptr() for view in views]
        if _num_uses is not None:
            self._base_uses = [_num_uses(view.untyped_storage()._cdata) for view in views]

    def add_alias(self, slot: int, alias: torch.Tensor) -> None:
        """Record that user code has taken `.data` of a parameter."""
        self._has_alias = True
        self._aliases.setdefault(slot, weakref.WeakSet()).add(alias)

    def has_alias_at(self, slot: int) -> bool:
        """Whether user code still holds a `.data` that shows a parameter's place in the full vector."""
        return any(address_of(alias) == self._addresses[slot] for alias in self._aliases.get(slot, ()))

    def is_shared(self, *, is_shown: bool) -> bool:
        """Whether anything but the Unit and (`is_shown`) its parameters uses the memory: a returned view, `.data`, an array."""
        if not self._views or _num_uses is None:
            return any(len(aliases) > 0 for aliases in self._aliases.values())
        for view, base in zip(self._views, self._base_uses, strict=True):
            if _num_uses(view.untyped_storage()._cdata) > base + is_shown:
                return True
        return False

    def is_held(self, slot: int, *, is_shown: bool) -> bool:
        """Whether anything but the Unit and (`is_shown`) the parameter uses one parameter's memory, such as a graph."""
        if not self._views or _num_uses is None:
            return False
        return _num_uses(self._views[slot].untyped_storage()._cdata) > self._base_uses[slot] + is_shown

    def note(self) -> None:
        """Record that the shards hold the gathered values as they are now."""
        self._has_alias = self._is_always_full and any(len(aliases) > 0 for aliases in self._aliases.values())
        is_watched = not self._is_always_full and not isinstance(self._full, OverlaidBuffer) and self.is_shared(is_shown=True)
        self._shown = self._mark() if is_watched else None
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [version_of(param) for param in self._params]

    def may_have_happened(self) -> bool:
        """Whether gathered values may differ from the shards: written through the parameter or an alias of it, or replaced.

        The answer does not depend on which slice a rank owns, so it is the same on ranks whose user code has done the same.
        """
        if self.were_counted():
            return True
        if isinstance(self._full, OverlaidBuffer):  # other writes without a version are found before the next step
            return self._has_alias and not self._full.is_untouched()
        return self._has_alias or (self._shown is not None and self._shown != self._mark())

    def were_counted(self) -> bool:
        """Whether a write that autograd counts has happened since the last `note`, or a parameter was given other memory."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._versions != [version_of(param) for param in self._params]:
                return True
            return any(address_of(param) != address for param, address in zip(self._params, self._addresses, strict=True))

    def replaced(self) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """(slot, new tensor, whether the Unit's own view has moved) of parameters that were given other memory."""
        for slot, (param, address) in enumerate(zip(self._params, self._addresses, strict=True)):
            with torch._C.DisableTorchFunctionSubclass():
                if address_of(param) != address:
                    yield slot, own_data(param), self._views[slot].data_ptr() != address

    # -- while the Unit is freed ------------------------------------------------------------------------------

    def begin_freed(self, *, keeps_memory: bool) -> None:
        """The Unit is freed. `keeps_memory`: its memory is still in use."""
        self._freed = self._mark() if keeps_memory else None

    def happened_while_freed(self, *, keeps_memory: bool) -> bool:
        """Whether memory that user code held when the Unit was freed has been written since."""
        if isinstance(self._full, OverlaidBuffer):
            return not self._full.is_untouched()
        return keeps_memory and self._freed is not None and self._freed != self._mark()

    def forget_freed(self) -> None:
        """Accept the current values, so that a write while freed is reported only once."""
        self._freed = self._mark()

    def _mark(self) -> int:
        assert self._full is not None
        return checksum(self._full.tensor)
