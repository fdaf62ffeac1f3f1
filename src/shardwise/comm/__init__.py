"""How do ranks combine?

Public names: `World`, `Axis` (rank, size, small collectives on `torch.distributed`); `Transport`, `Reservation`, `Counters`,
`Source`, `Sink`, `PeerShards`, `make_transport`, `own_slice` (gather and reduce of flat vectors); `BucketSource` and `BucketSink`
(several vectors in one reduction); `host_identity`; `has_pipe` (of a mesh).

Invariants: with two ranks, all CPU transports give bitwise the same results. The shared-memory, pairwise and alone transports
form sums in rank order, the combined one inside hosts and then over hosts, in fp32 or wider, with exchange buffers that do not
grow with the model; the reference and NCCL transports leave order and buffers to their library. Every element sent is counted.
The shared-memory, pairwise and combined transports name their operations in errors, never wait longer than `timeout_s`, and
refuse all work after their first failure.
"""

from shardwise.comm.bucket import BucketSink, BucketSource
from shardwise.comm.meshes import has_pipe
from shardwise.comm.segment import host_identity
from shardwise.comm.transport import Counters, PeerShards, Reservation, Sink, Source, Transport, own_slice
from shardwise.comm.transports import make_transport
from shardwise.comm.world import Axis, World

__all__ = [
    "Axis",
    "BucketSink",
    "BucketSource",
    "Counters",
    "PeerShards",
    "Reservation",
    "Sink",
    "Source",
    "Transport",
    "World",
    "has_pipe",
    "host_identity",
    "make_transport",
    "own_slice",
]
