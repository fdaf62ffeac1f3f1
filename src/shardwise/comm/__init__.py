"""How do ranks combine?

Public names: `World`, `Axis` (rank, size, small collectives on `torch.distributed`), `Transport`, `Reservation`, `Counters`,
`make_transport` (gather and reduce of flat vectors), `JoinedSource` and `JoinedSink` (several of them in one reduction),
`host_identity`.

Invariants: every CPU transport gives the same bits for two ranks. The shared-memory, pairwise and alone transports form sums
in rank order, the combined one inside hosts and then over hosts, in fp32 or wider, through exchange buffers that do not grow
with the model; the reference and NCCL transports leave order and buffers to their library. Every element sent is counted. Every
operation of the shared-memory, pairwise and combined transports is named, no wait of theirs lasts longer than its limit, and
after its first failure a transport refuses work.
"""

from shardwise.comm.joined import JoinedSink, JoinedSource
from shardwise.comm.segment import host_identity
from shardwise.comm.transport import Counters, PeerShards, Reservation, Sink, Source, Transport, own_slice
from shardwise.comm.transports import make_transport
from shardwise.comm.world import Axis, World

__all__ = [
    "Axis",
    "Counters",
    "JoinedSink",
    "JoinedSource",
    "PeerShards",
    "Reservation",
    "Sink",
    "Source",
    "Transport",
    "World",
    "host_identity",
    "make_transport",
    "own_slice",
]
