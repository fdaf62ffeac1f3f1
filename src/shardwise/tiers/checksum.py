"""One checksum for everything: ranges on disk, values that ranks compare, memory that user code may have written.

The bytes are padded with zeros to blocks of 512 words of 64 bits. Each word is multiplied by a fixed odd weight for its place in
the block, and each block's sum by an odd number for the block; all sums wrap around at 64 bits. Any change of a single word
changes the sum. The native version and the one in torch give the same values, on any device.
"""

from __future__ import annotations

import functools

import torch

from shardwise import native

_WORDS = 512
_CHUNK_WORDS = 1 << 20  # per chunk in torch, which allocates memory for the products
_ALL = (1 << 64) - 1


@functools.cache
def _weights() -> torch.Tensor:
    """Fixed odd numbers, made by a linear congruential generator."""
    found, state = [], 0x9E3779B97F4A7C15
    for _ in range(_WORDS):
        state = (state * 6364136223846793005 + 1442695040888963407) & _ALL
        word = (state >> 1) | 1
        found.append(word)
    return torch.tensor(found, dtype=torch.int64)


def checksum(values: torch.Tensor) -> int:
    """A checksum of a tensor's bytes in row-major order, the same on every device and with or without the native library."""
    values = values.detach().contiguous()
    length = values.numel() * values.element_size()
    library = native.library() if values.device.type == "cpu" else None
    if library is not None:
        return _folded(int(library.sw_checksum(values.data_ptr(), length, _weights().data_ptr())))
    flat = values.view(-1).view(torch.uint8) if length else torch.empty(0, dtype=torch.uint8)
    whole = length - length % (8 * _WORDS)
    parts = [flat[:whole]]
    if whole < length:
        last = torch.zeros(8 * _WORDS, dtype=torch.uint8, device=flat.device)
        last[: length - whole] = flat[whole:]
        parts.append(last)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    number = 0
    weights = _weights().to(values.device)
    for part in parts:
        for chunk in part.split(8 * _CHUNK_WORDS):
            if chunk.data_ptr() % 8:  # a view of another dtype needs an aligned start
                chunk = chunk.clone()
            sums = (chunk.view(torch.int64).view(-1, _WORDS) * weights).sum(1)
            numbers = torch.arange(number, number + sums.numel(), dtype=torch.int64, device=values.device)
            total += (sums * (2 * numbers + 1)).sum()
            number += sums.numel()
    return _folded((int(total) + length) & _ALL)


def _folded(total: int) -> int:
    """Fold 64 bits into 62, so that the negative also fits a 64-bit integer."""
    return (total ^ (total >> 32)) & ((1 << 62) - 1)
