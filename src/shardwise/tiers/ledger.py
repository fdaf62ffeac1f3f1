"""Bytes per tier and kind, now and at peak. Called wherever memory is taken or given back."""

from __future__ import annotations

import enum

from shardwise.errors import LifecycleError


class Tier(enum.Enum):
    """Where bytes can live."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


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

    def __init__(self) -> None:
        self._now: dict[tuple[Tier, Kind], int] = {(t, k): 0 for t in Tier for k in Kind}
        self._peak = dict(self._now)
        self._tier_now = dict.fromkeys(Tier, 0)
        self._tier_peak = dict.fromkeys(Tier, 0)

    def take(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Count `num_bytes` as taken."""
        key = (tier, kind)
        self._now[key] += num_bytes
        self._tier_now[tier] += num_bytes
        if self._now[key] > self._peak[key]:
            self._peak[key] = self._now[key]
        if self._tier_now[tier] > self._tier_peak[tier]:
            self._tier_peak[tier] = self._tier_now[tier]

    def give(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Count `num_bytes` as given back; giving back more than was taken is a broken invariant."""
        key = (tier, kind)
        if num_bytes > self._now[key]:
            raise LifecycleError(
                f"ledger: {num_bytes} bytes of {kind.value} given back to {tier.value}, only {self._now[key]} were taken."
            )
        self._now[key] -= num_bytes
        self._tier_now[tier] -= num_bytes

    def set(self, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """State a total that is owned elsewhere (optimizer states, measured activations)."""
        difference = num_bytes - self._now[(tier, kind)]
        if difference >= 0:
            self.take(tier, kind, difference)
        else:
            self.give(tier, kind, -difference)

    def now(self, tier: Tier, kind: Kind | None = None) -> int:
        """Bytes held now, of one kind or of all."""
        return self._tier_now[tier] if kind is None else self._now[(tier, kind)]

    def peak(self, tier: Tier, kind: Kind | None = None) -> int:
        """The most that was held at once, of one kind or of all together."""
        return self._tier_peak[tier] if kind is None else self._peak[(tier, kind)]

    def reset_peak(self) -> None:
        """Measure peaks from here on."""
        self._peak = dict(self._now)
        self._tier_peak = dict(self._tier_now)
