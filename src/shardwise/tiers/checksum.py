"""One checksum for everything: ranges on disk, values that ranks compare, memory that user code may have written.

The bytes are padded with zeros to blocks of 512 words of 64 bits. Both 32-bit halves of every word are multiplied by fixed 32-bit
weights of their own and added up, so that no bit of a word is lost in the sum; each block's sum is mixed with the block's number,
and the mixed sums are added and mixed with the length. All arithmetic wraps around. The native form and the one in torch give the
same values, on any device.
"""

from __future__ import annotations

import functools

import torch

from shardwise import native
from shardwise.tiers.held import own_part

_WORDS = 512
_CHUNK_WORDS = 1 << 19  # Words processed at a time by the torch form, which needs memory for the products.
_ALL = (1 << 64) - 1
_HALF = (1 << 32) - 1
_STEP = 0x9E3779B97F4A7C15
_FACTOR = 0xD6E8FEB86659FD93


@functools.cache
def _weights() -> torch.Tensor:
    """Odd 32-bit numbers from splitmix64: for the low halves of a block's words, then for the high halves."""
    found, state = [], 0
    for _ in range(2 * _WORDS):
        state = (state + _STEP) & _ALL
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _ALL
        found.append(((word ^ (word >> 31)) & _HALF) | 1)
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def checksum(values: torch.Tensor) -> int:
    """A checksum of a tensor's bytes in row-major order, the same on every device and with or without the native library.

    Of a DTensor, of what this rank has. 62 bits, so that its negative also fits a 64-bit integer.
    """
    values = own_part(values.detach()).contiguous()
    length = values.numel() * values.element_size()
    library = native.library() if values.device.type == "cpu" else None
    if library is not None:
        total = int(library.sw_block_checksum(values.data_ptr(), length, _weights().data_ptr()))
    else:
        total = _mixed(_sum_in_torch(values, length), length)
    return (total ^ (total >> 62)) & ((1 << 62) - 1)


def _sum_in_torch(values: torch.Tensor, length: int) -> int:
    """The sum of the mixed blocks."""
    if not length:
        return 0
    device, block = values.device, 8 * _WORDS
    flat = values.view(-1).view(torch.uint8)
    whole = length - length % block
    parts = list(flat[:whole].split(8 * _CHUNK_WORDS)) if whole else []
    if whole < length:
        last = torch.zeros(block, dtype=torch.uint8, device=device)
        last[: length - whole] = flat[whole:]
        parts.append(last)
    low, high = _weights().to(device).split(_WORDS)
    total, number = 0, 0
    for part in parts:
        if part.data_ptr() % 8:  # A view as int64 needs an aligned start.
            part = part.clone()
        words = part.view(torch.int64).view(-1, _WORDS)
        sums = ((words & _HALF) * low + (_shifted(words)) * high).sum(1)
        sums = sums + torch.arange(number, number + sums.numel(), dtype=torch.int64, device=device) * _signed(_STEP)
        for _ in range(2):
            sums = (sums ^ _shifted(sums)) * _signed(_FACTOR)
        total += int((sums ^ _shifted(sums)).sum())
        number += words.shape[0]
    return total & _ALL


def _shifted(words: torch.Tensor) -> torch.Tensor:
    """`words >> 32` without the sign."""
    return (words >> 32) & _HALF


def _mixed(total: int, number: int) -> int:
    total = (total + number * _STEP) & _ALL
    for _ in range(2):
        total = ((total ^ (total >> 32)) * _FACTOR) & _ALL
    return total ^ (total >> 32)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
