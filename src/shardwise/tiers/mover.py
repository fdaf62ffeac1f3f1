"""The offload engine: copies between host and device memory beside the computation, through a few buffers that stay.

On a CPU host and device are one memory and nothing is copied. On CUDA every copy is a job of a thread with a stream of its own:
it waits for what comes before it (a read from disk, the work that was queued when it was asked for), copies, and has ended when
the bytes are there, for the host and for every stream. The CUDA calls follow torch's documentation and have not been run on a
GPU; all the rest is run by tests that treat one memory as two.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import MemoryBudgetError
from shardwise.observe import pause
from shardwise.ticket import Done, Lane, Ticket
from shardwise.tiers.buffers import Buffers
from shardwise.tiers.disk import aligned_memory
from shardwise.tiers.ledger import Ledger, Tier


def are_apart(device: torch.device) -> bool:
    """Whether a device has memory of its own, beside the host's."""
    return device.type != "cpu"


class Mover:
    """A thread that copies up, one that copies down, and the buffers on both sides.

    Two, because what goes down may wait for other ranks (a reduction), and they may wait for what comes up.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.device = device
        self.is_apart = are_apart(device)
        """Whether host and device are two memories."""
        self.buffers = Buffers(ledger, Tier.HOST, self.host_memory)
        """In host memory, where disks read and write and the CPU updates."""
        self.device_buffers = self.buffers
        """Where gradients are formed and parameters are computed with."""
        if self.is_apart:
            self.device_buffers = Buffers(ledger, Tier.HOST if device.type == "cpu" else Tier.DEVICE, self._device_memory)
        self._up, self._down = _Way("shardwise-up", device), _Way("shardwise-down", device)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Host memory of exactly this size in whole pages, as bytes, that the device can copy from and to by itself."""
        memory = aligned_memory(num_bytes)
        if self.device.type == "cuda":
            _pin(memory)
        return memory

    def _device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy_up(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None = None) -> Ticket:
        """Start copying to device memory once `after` has ended; neither side may be used otherwise until the Ticket has."""
        return self._up.copy(target, source, first=Done() if after is None else after, then=lambda: None)

    def copy_down(self, target: torch.Tensor, source: torch.Tensor, then: Callable[[], None] = lambda: None) -> Ticket:
        """Start copying from device memory, and run `then` when the bytes are there."""
        return self._down.copy(target, source, first=Done(), then=then)

    def close(self) -> None:
        """Finish what was started and end the threads."""
        self._up.close()
        self._down.close()


class _Way:
    """Copies in one direction, one after the other."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._lane = Lane(name)
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: torch.Tensor, source: torch.Tensor, first: Ticket, then: Callable[[], None]) -> Ticket:
        queued = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def work() -> None:
            first.wait()
            pause("mover.copy")
            if self._stream is None:
                target.copy_(source)
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(queued)
                    target.copy_(source, non_blocking=True)
                self._stream.synchronize()
            then()

        return self._lane.submit(work)

    def close(self) -> None:
        self._lane.close()


def _pin(memory: torch.Tensor) -> None:
    """Register memory with CUDA: unlike an allocation by torch, which is rounded up to a power of two, it keeps its size."""
    runtime = torch.cuda.cudart()
    result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        raise MemoryBudgetError(
            f"CUDA could not pin {memory.numel()} bytes of host memory (error {int(result)}). Keep fewer states on the host, or "
            "raise the limit of locked memory (ulimit -l)."
        )
    weakref.finalize(memory.untyped_storage(), _unpin, runtime, memory.data_ptr())


def _unpin(runtime: Any, address: int) -> None:
    with contextlib.suppress(RuntimeError):  # the driver may be gone at the end of the process
        runtime.cudaHostUnregister(address)
