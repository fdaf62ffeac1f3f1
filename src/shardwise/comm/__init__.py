"""How do ranks combine?

Public names: `World` (rank, size, small collectives on `torch.distributed`), `Transport`, `Reservation`, `Counters`,
`make_transport` (gather and reduce of flat vectors).

Invariants: every transport gives the same bits for two ranks; sums are formed in rank order and in fp32 or wider (the
reference and NCCL transports leave the order to their library); exchange buffers do not grow with the model; every
element sent is counted.
"""

from shardwise.comm.transport import Counters, Reservation, Sink, Source, Transport
from shardwise.comm.transports import make_transport
from shardwise.comm.world import World

__all__ = ["Counters", "Reservation", "Sink", "Source", "Transport", "World", "make_transport"]
