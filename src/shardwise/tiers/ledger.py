"""Bytes per tier and kind, now and at peak. Called wherever memory is taken or given back."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable

import torch

from shardwise.errors import LifecycleError, MemoryBudgetError


class Tier(enum.Enum):
    """Where bytes can live."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


def device_tier(device: torch.device) -> Tier:
    """Which tier memory of a device counts to: a CPU's is the host's."""
    return Tier.HOST if device.type == "cpu" else Tier.DEVICE


class Kind(enum.Enum):
    """What bytes are for."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    MOMENT = "moment"
    ACTIVATION = "activation"
    BUFFER = "buffer"


class Ledger:
    """Counts bytes taken and given back; knows the peak of each (tier, kind) and of each tier."""

    def __init__(self) -> None:  # keyed by value: hashing an enum's member is slow, and this is called per gradient
        self._now: dict[tuple[str, str], int] = {(t.value, k.value): 0 for t in Tier for k in Kind}
        self._peak = dict(self._now)
        self._tier_now = dict.fromkeys((t.value for t in Tier), 0)
        self._tier_peak = dict(self._tier_now)
        self._limits = dict.fromkeys((t.value for t in Tier), 1 << 62)
        self._reclaims: list[weakref.WeakMethod[Callable[[], None]]] = []

    def limit(self, tier: Tier, num_bytes: int) -> None:
        """Refuse from here on what would go beyond."""
        self._limits[tier.value] = num_bytes

    def reclaim_with(self, drop: Callable[[], None]) -> None:
        """Before anything is refused, `drop` (a method) gives back what is only held for later use."""
        self._reclaims.append(weakref.WeakMethod(drop))

    def room(self, tier: Tier) -> int:
        """Bytes that may still be taken."""
        return self._limits[tier.value] - self._tier_now[tier.value]

    def reserve(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Count `num_bytes` as taken; raises before a limit is passed."""
        at = tier._value_
        if self._tier_now[at] + num_bytes > self._limits[at]:
            for reference in self._reclaims:
                drop = reference()
                if drop is not None:
                    drop()
        if self._tier_now[at] + num_bytes > self._limits[at]:
            raise MemoryBudgetError(
                f"{num_bytes} bytes of {kind.value} would take the {at} tier from {self._tier_now[at]} to "
                f"{self._tier_now[at] + num_bytes} bytes, above its budget of {self._limits[at]}. Raise Offload(host_bytes=...), "
                "move more states to disk, or use smaller Units (max_unit_bytes)."
            )
        key = (at, kind._value_)
        self._now[key] += num_bytes
        self._tier_now[at] += num_bytes
        if self._now[key] > self._peak[key]:
            self._peak[key] = self._now[key]
        if self._tier_now[at] > self._tier_peak[at]:
            self._tier_peak[at] = self._tier_now[at]

    def release(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Count `num_bytes` as given back; giving back more than was taken is a broken invariant."""
        at = tier._value_
        key = (at, kind._value_)
        if num_bytes > self._now[key]:
            raise LifecycleError(
                f"ledger: {num_bytes} bytes of {kind.value} given back to {tier.value}, only {self._now[key]} were taken."
            )
        self._now[key] -= num_bytes
        self._tier_now[at] -= num_bytes

    def set(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """State a total that is owned elsewhere (optimizer states, measured activations)."""
        difference = num_bytes - self._now[(tier.value, kind.value)]
        if difference >= 0:
            self.reserve(tier, kind, difference)
        else:
            self.release(tier, kind, -difference)

    def now(self, tier: Tier, kind: Kind | None = None) -> int:
        """Bytes held now, of one kind or of all."""
        return self._tier_now[tier.value] if kind is None else self._now[(tier.value, kind.value)]

    def peak(self, tier: Tier, kind: Kind | None = None) -> int:
        """The most that was held at once, of one kind or of all together."""
        return self._tier_peak[tier.value] if kind is None else self._peak[(tier.value, kind.value)]

    def reset_peak(self) -> None:
        """Measure peaks from here on."""
        self._peak = dict(self._now)
        self._tier_peak = dict(self._tier_now)
