"""Copies between host and device memory. Copies overlap with computation and reuse a few buffers.

On a CPU, host and device are one memory and nothing is copied. On CUDA, every copy is a job of a thread with its own stream. The
job waits for what must come first (a read from disk, and the work on the current stream when the copy was requested), copies, and
ends when host and all streams can use the copy. The CUDA calls follow torch's documentation and have not been run on a GPU. Tests
run everything else by treating one memory as two.
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
    """Whether a device has its own memory, separate from the host's."""
    return device.type != "cpu"


class Mover:
    """A thread that copies up to the device, one that copies down to the host, and the buffers on both sides.

    There are two threads because a copy down may wait for other ranks (a reduction), and these may be waiting for a copy up.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.device = device
        self.is_apart = are_apart(device)
        """Whether host and device are two memories."""
        self.buffers = Buffers(ledger, Tier.HOST, self.host_memory)
        """Host memory, for disk reads and writes and for updates on the CPU."""
        self.device_buffers = self.buffers
        """Device memory, for forming gradients and for parameters in use."""
        if self.is_apart:
            self.device_buffers = Buffers(ledger, Tier.HOST if device.type == "cpu" else Tier.DEVICE, self._device_memory)
        self._up, self._down = _Way("shardwise-up", device), _Way("shardwise-down", device)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory of whole pages, as bytes. It is pinned if the device is a GPU."""
        memory = aligned_memory(num_bytes)
        if self.device.type == "cuda":
            _pin(memory)
        return memory

    def _device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy_up(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None = None) -> Ticket:
        """Start a copy to device memory that begins when `after` has ended. Use neither tensor before the Ticket has ended."""
        return self._up.copy(target, source, first=Done() if after is None else after, then=lambda: None)

    def copy_down(self, target: torch.Tensor, source: torch.Tensor, then: Callable[[], None] = lambda: None) -> Ticket:
        """Start a copy from device memory; the copying thread runs `then` when it is done."""
        return self._down.copy(target, source, first=Done(), then=then)

    def close(self) -> None:
        """Finish the copies that were started and end the threads."""
        self._up.close()
        self._down.close()


class _Way:
    """Runs the copies of one direction, one after the other."""

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
    """Pin memory by registering it with CUDA. torch's own pinned memory is rounded up to a power of two."""
    runtime = torch.cuda.cudart()
    result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        raise MemoryBudgetError(
            f"CUDA could not pin {memory.numel()} bytes of host memory (error {int(result)}). Keep fewer states on the host, or "
            "raise the limit of locked memory (ulimit -l)."
        )
    weakref.finalize(memory.untyped_storage(), _unpin, runtime, memory.data_ptr())


def _unpin(runtime: Any, address: int) -> None:
    with contextlib.suppress(RuntimeError):  # at exit the driver may already be gone
        runtime.cudaHostUnregister(address)
