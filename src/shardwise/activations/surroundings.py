"""What a forward call depends on besides its inputs: torch's random generators and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Surroundings:
    """The state of random generators and autocast at one moment."""

    def __init__(self, device: torch.device) -> None:
        self._cpu_state = torch.get_rng_state()
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device_state = None if self._module is None else self._module.get_rng_state(device)
        self._casts = [
            dict(
                device_type=kind,
                enabled=torch.is_autocast_enabled(kind),
                dtype=torch.get_autocast_dtype(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys(("cpu", device.type))
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is as it was then; afterwards, as it was before."""
        devices = [] if self._module is None else [self._device]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"))
            for cast in self._casts:
                stack.enter_context(torch.autocast(**cast))  # type: ignore[arg-type]
            torch.set_rng_state(self._cpu_state)
            if self._module is not None:
                self._module.set_rng_state(self._device_state, self._device)
            yield
