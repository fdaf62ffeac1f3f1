"""How many bytes do tensors hold for backward? Counts their storages in the ledger, each once, however many tensors share it.

Called with what is kept to be computed again, what was computed again, and, while somebody measures, what autograd saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from shardwise.tiers.ledger import Kind, Ledger, Tier


class Hold:
    """A storage that is counted as long as this object lives."""

    __slots__ = ("_address", "_owner", "num_bytes")

    def __init__(self, owner: HeldStorages, address: int, num_bytes: int) -> None:
        self._owner, self._address = owner, address
        self.num_bytes = num_bytes
        """What it added to the count: nothing if the storage was held already."""

    def __del__(self) -> None:
        self._owner._drop(self._address)


class _Entry:
    __slots__ = ("is_saved", "num_bytes", "num_holds")

    def __init__(self, num_bytes: int, is_saved: bool) -> None:
        self.num_bytes, self.is_saved, self.num_holds = num_bytes, is_saved, 0


class HeldStorages:
    """The storages on one tier that are held for backward. Safe for several threads."""

    def __init__(self, ledger: Ledger, tier: Tier, is_parameter: Callable[[int], bool]) -> None:
        """`is_parameter(address)`: whether a storage is counted elsewhere, as parameters."""
        self._ledger, self._tier, self._is_parameter = ledger, tier, is_parameter
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.RLock()  # reentrant: the garbage collector may drop a Hold at any moment
        self.saved_bytes = 0
        """Held now by autograd alone, as far as that is counted."""
        self.peak_saved_bytes = 0

    def hold(self, tensor: torch.Tensor, *, is_saved: bool = False) -> Hold | None:
        """Count a tensor's storage. None if it is a parameter's, or has no memory. `is_saved`: autograd saves it."""
        storage = own_part(tensor).untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not address:
            return None
        with self._lock:
            entry = self._entries.get(address)
            is_new = entry is None
            if entry is None:
                if self._is_parameter(address):
                    return None
                self._ledger.note(self._tier, Kind.ACTIVATION, num_bytes)
                entry = self._entries[address] = _Entry(num_bytes, is_saved)
                if is_saved:
                    self.saved_bytes += num_bytes
                    self.peak_saved_bytes = max(self.peak_saved_bytes, self.saved_bytes)
            entry.num_holds += 1
        return Hold(self, address, num_bytes if is_new else 0)

    def _drop(self, address: int) -> None:
        with self._lock:
            entry = self._entries[address]
            entry.num_holds -= 1
            if not entry.num_holds:
                del self._entries[address]
                self._ledger.note(self._tier, Kind.ACTIVATION, -entry.num_bytes)
                if entry.is_saved:
                    self.saved_bytes -= entry.num_bytes


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the memory: what a DTensor has on this rank, what a collective gives; other tensors themselves."""
    if type(tensor) is torch.Tensor:
        return tensor
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            return own_part(tensor.to_local())
    if hasattr(tensor, "wait") and hasattr(tensor, "elem"):  # torch's AsyncCollectiveTensor, which is there when it is touched
        done: torch.Tensor = tensor.wait()
        return done
    return tensor
