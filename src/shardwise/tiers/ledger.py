"""Counts bytes per tier and kind, now and at peak. Called wherever memory is reserved or released; never allocates any."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator

import torch

from shardwise.errors import LifecycleError, MemoryBudgetError


class Tier(enum.Enum):
    """Where bytes can live."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


def device_tier(device: torch.device) -> Tier:
    """The tier that a device's memory belongs to. A CPU's memory is the host tier."""
    return Tier.HOST if device.type == "cpu" else Tier.DEVICE


class Kind(enum.Enum):
    """What bytes are used for."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    MOMENT = "moment"
    ACTIVATION = "activation"
    BUFFER = "buffer"
    SPARE = "spare"
    """Space for activations that holds none now."""


Observer = Callable[[Tier, Kind, int], None]
"""Called with a tier, a kind and the bytes of it that are held now, by whichever thread has changed them."""


class Ledger:
    """Counts reserved and released bytes, and keeps the peak of each (tier, kind) and of each tier."""

    def __init__(self) -> None:  # keyed by the enums' values: hashing a member is slow, and this is called per gradient
        self._now: dict[tuple[str, str], int] = {(t.value, k.value): 0 for t in Tier for k in Kind}
        self._peak = dict(self._now)
        self._tier_now = dict.fromkeys((t.value for t in Tier), 0)
        self._tier_peak = dict(self._tier_now)
        self._limits = dict.fromkeys((t.value for t in Tier), 1 << 62)
        self._beside = dict.fromkeys((t.value for t in Tier), 0)  # bytes held that do not count towards the limit
        self._reclaims: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._observer: Observer | None = None

    @property
    def is_observed(self) -> bool:
        """Whether somebody is told of every change."""
        return self._observer is not None

    @contextlib.contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Inside the context, call `observer` with what is held now, once for each tier and kind, and after every change."""
        if self._observer is not None:
            raise LifecycleError("the ledger has an observer already, and can have only one.")
        self._observer = observer
        try:
            for (tier, kind), num_bytes in list(self._now.items()):
                observer(Tier(tier), Kind(kind), num_bytes)
            yield
        finally:
            self._observer = None

    def limit(self, tier: Tier, num_bytes: int) -> None:
        """Limit a tier: from now on `reserve` raises instead of going beyond `num_bytes`."""
        self._limits[tier.value] = num_bytes

    def reclaim_with(self, drop: Callable[[], None]) -> None:
        """Register a method that frees memory which is only kept for reuse. It is called before a reservation is refused."""
        self._reclaims.append(weakref.WeakMethod(drop))

    def reclaim(self) -> None:
        """Free all memory that is only kept for reuse."""
        for reference in self._reclaims:
            drop = reference()
            if drop is not None:
                drop()

    def room(self, tier: Tier) -> int:
        """Bytes that may still be reserved."""
        return self._limits[tier.value] + self._beside[tier.value] - self._tier_now[tier.value]

    def reserve(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Count `num_bytes` as reserved; raise if that would exceed the limit."""
        at = tier._value_
        if self._tier_now[at] + num_bytes > self._limits[at] + self._beside[at]:
            self.reclaim()
        now = self._tier_now[at] - self._beside[at]
        if now + num_bytes > self._limits[at]:
            raise MemoryBudgetError(
                f"{num_bytes} bytes of {kind.value} would take the {at} tier from {now} to {now + num_bytes} bytes, above its "
                f"budget of {self._limits[at]}. Raise Offload(host_bytes=...), move more states to disk, or use smaller Units "
                "(max_unit_bytes)."
            )
        self._add(tier, kind, num_bytes)

    def note(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Count bytes that other code has allocated, or (if negative) freed. They do not count towards the limit."""
        self._beside[tier._value_] += num_bytes
        if num_bytes >= 0:
            self._add(tier, kind, num_bytes)
        else:
            self.release(tier, kind, -num_bytes)

    def _add(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        at = tier._value_
        key = (at, kind._value_)
        self._now[key] += num_bytes
        self._tier_now[at] += num_bytes
        if self._now[key] > self._peak[key]:
            self._peak[key] = self._now[key]
        if self._tier_now[at] > self._tier_peak[at]:
            self._tier_peak[at] = self._tier_now[at]
        if self._observer is not None:
            self._observer(tier, kind, self._now[key])

    def release(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Count `num_bytes` as released; raise if that is more than was reserved."""
        at = tier._value_
        key = (at, kind._value_)
        if num_bytes > self._now[key]:
            raise LifecycleError(
                f"ledger: {num_bytes} bytes of {kind.value} given back to {tier.value}, only {self._now[key]} were taken."
            )
        self._now[key] -= num_bytes
        self._tier_now[at] -= num_bytes
        if self._observer is not None:
            self._observer(tier, kind, self._now[key])

    def set(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Set the total of memory that other code allocates (the states of a user's optimizer)."""
        self.note(tier, kind, num_bytes - self._now[(tier.value, kind.value)])

    def now(self, tier: Tier, kind: Kind | None = None) -> int:
        """Bytes held now, of one kind or of all."""
        return self._tier_now[tier.value] if kind is None else self._now[(tier.value, kind.value)]

    def peak(self, tier: Tier, kind: Kind | None = None) -> int:
        """The most that was held at once, of one kind or of all together."""
        return self._tier_peak[tier.value] if kind is None else self._peak[(tier.value, kind.value)]

    def reset_peak(self) -> None:
        """Start measuring peaks anew."""
        self._peak = dict(self._now)
        self._tier_peak = dict(self._tier_now)
