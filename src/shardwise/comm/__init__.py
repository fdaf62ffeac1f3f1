"""How do ranks combine?

Public names: `World` (rank, size, small collectives on `torch.distributed`), `Transport`, `Reservation`, `Counters`,
`make_transport` (gather and reduce of flat vectors).

Invariants: every CPU transport gives the same bits for two ranks. The shared-memory, pairwise and alone transports form sums
in rank order, in fp32 or wider, through exchange buffers that do not grow with the model; the reference and NCCL transports
leave order and buffers to their library. Every element sent is counted.
"""

from shardwise.comm.transport import Counters, Reservation, Sink, Source, Transport
from shardwise.comm.transports import make_transport
from shardwise.comm.world import World

__all__ = ["Counters", "Reservation", "Sink", "Source", "Transport", "World", "make_transport"]
