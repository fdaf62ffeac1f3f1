"""Point-to-point messages between CPU ranks, over gloo groups that torch.distributed does not know of.

torch.distributed keeps every group it makes, with its sockets and threads, until all ranks destroy it in the same order.
Transports are made and closed with their runs, at times that differ between ranks. So their groups are not registered there;
a group ends with its last reference.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shardwise.comm.world import World

_NO_TAG = (1 << 31) - 1
"""Tag of a message that no rank sends."""
_made: collections.Counter[tuple[int, ...]] = collections.Counter()  # groups made so far; all ranks make them in the same order


def network_devices() -> list[Any]:
    """What gloo sends and receives with, chosen as torch.distributed does. Channels that share it share its thread."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    make = dist.ProcessGroupGloo.create_device
    return [make(interface=name) for name in names.split(",")] if names else [dist.ProcessGroupGloo.create_default_device()]


class Messages:
    """A channel between the ranks of a world, with its own order of messages."""

    def __init__(self, world: World, devices: Sequence[Any]) -> None:
        assert world.group is not None
        ranks = tuple(dist.get_process_group_ranks(world.group))
        prefix = f"shardwise-messages-{'-'.join(map(str, ranks))}-{_made[ranks]}"
        _made[ranks] += 1
        self._rank = world.rank
        store = c10d.PrefixStore(prefix, c10d._get_default_store())
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = list(devices)
        options._threads = 1  # of collectives, which are not used here
        options._timeout = timedelta(minutes=30)
        self._group: Any = dist.ProcessGroupGloo(store, world.rank, world.world_size, options)

    def interrupt(self) -> None:
        """Make every wait for a message raise, also on the peers: in gloo a wait that times out closes the connections."""
        peer = 1 if self._rank == 0 else 0
        nothing = torch.empty(1)
        with contextlib.suppress(RuntimeError):
            self._group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))

    def send(self, values: torch.Tensor, peer: int, tag: int) -> Any:
        """Start sending; `values` must not change before the returned work has ended."""
        return self._group.send([values], peer, tag)

    def receive(self, out: torch.Tensor, peer: int, tag: int) -> Any:
        """Start receiving into `out`."""
        return self._group.recv([out], peer, tag)
