"""Random numbers without a generator: each is a hash of what it is for.

A draw is keyed by (seed, position, purpose, token id), so it depends on nothing else: not on how
many draws came before, on other requests, on batching or on speculation. The hash is SplitMix64
(Steele, Lea, Flood 2014): exact 64-bit arithmetic, the same on every machine.
"""

from __future__ import annotations

import enum
import os

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROW_GOLDEN, _ROW_MIX_1, _ROW_MIX_2 = (np.uint64(c) for c in (_GOLDEN, _MIX_1, _MIX_2))
_ROW_ONE = np.uint64(1)
_S12, _S27, _S30, _S31 = (np.uint64(n) for n in (12, 27, 30, 31))
_ONE_BITS = np.uint64(0x3FF0000000000000)
_CHUNK = 8192  # hashes whose temporaries stay in the cache


class Purpose(enum.IntEnum):
    """What a draw decides. Draws of different purposes are independent."""

    PICK = 0  # the next token; a coupled drafter shares these on purpose
    ACCEPT = 1  # whether a draft stands
    DRAFT = 2  # a draft that must not know the pick
    RESIDUAL = 3  # the token that replaces a refused draft
    BLOCK = 4  # whether drafts stand up to this one


def fresh_seed() -> int:
    """A new seed from the operating system, short enough to copy from a receipt (32 bits)."""
    return int.from_bytes(os.urandom(4), "little")


def splitmix(state: int) -> int:
    """SplitMix64's output for a state that already includes the step of its counter."""
    z = state & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int, position: int, purpose: Purpose) -> int:
    """The start of the SplitMix64 stream that belongs to one decision at one position."""
    decision = (position << 8) + purpose  # any int seed works: it counts modulo 2^64
    return splitmix(splitmix(seed + _GOLDEN) + (decision + 1) * _GOLDEN)


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """One number strictly between 0 and 1: (52 hash bits + 1/2) / 2^52."""
    bits = splitmix(stream_key(seed, position, purpose) + _GOLDEN)
    return ((bits >> 12) + 0.5) / (1 << 52)


def uniforms(
    seed: int, position: int, purpose: Purpose, ids: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One number per token id, strictly between 0 and 1, independent of which other ids are asked.

    -ln of it is an Exp(1) waiting time, and -ln of that is Gumbel noise.
    """
    out = np.empty(ids.size)
    key = np.uint64(stream_key(seed, position, purpose))
    for at in range(0, ids.size, _CHUNK):
        z = ids[at : at + _CHUNK].astype(np.uint64)
        z += _ROW_ONE
        z *= _ROW_GOLDEN
        z += key
        z ^= z >> _S30
        z *= _ROW_MIX_1
        z ^= z >> _S27
        z *= _ROW_MIX_2
        z ^= z >> _S31
        z >>= _S12
        z |= _ONE_BITS  # as a float64: 1 + bits / 2^52
        np.subtract(z.view(np.float64), 1.0 - 2.0**-53, out[at : at + _CHUNK])
    return out
