"""Which operators are too large to gather?

Public names: `linear_cross_entropy` (the loss of a head with a large vocabulary, without all logits); `fuse_causal_loss` (the
same for a causal model of transformers) and `CausalLoss`, its handle; `CHUNK_BYTES`.

Invariants: logits and their gradient exist for a few tokens at a time, within the bytes that were asked for. What is computed is
the same at every stage, because a sharded weight is gathered as by any other operation.
"""

from shardwise.tiling.causal import CausalLoss, fuse_causal_loss
from shardwise.tiling.loss import CHUNK_BYTES, linear_cross_entropy

__all__ = ["CHUNK_BYTES", "CausalLoss", "fuse_causal_loss", "linear_cross_entropy"]
