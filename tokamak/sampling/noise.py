"""Which random number does a request use at a position?

A counter-based generator: nothing is carried from step to step, so a number depends on (seed, sibling,
position) alone. It is the same alone or in a batch, after a preemption, and on every device, where
`ops/sample/uniform.py` has it. The mixing function is SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from tokamak.ops.sample.uniform import FIRST, GOLDEN, SECOND

UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
_SIBLING = 0xD1342543DE82EF95


def request_key(seed: int, sibling: int) -> int:
    """The 64-bit key of one sibling's stream; seeds lie in [-2**63, 2**63)."""
    return _mix((_mix((seed + GOLDEN) & _MASK) + sibling * _SIBLING) & _MASK)


def seed_of(request_id: str, entropy: bytes) -> int:
    """A seed for a request that brought none; the same again if it is admitted again."""
    digest = hashlib.blake2b(request_id.encode(), key=entropy[:64], digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys: UInt64s, positions: npt.NDArray[np.int32]) -> Float64s:
    """One number in [0, 1) per row, of 53 random bits. keys, positions: [rows]."""
    counters = positions.astype(np.uint64) + np.uint64(1)
    bits = keys + counters * np.uint64(GOLDEN)  # wraps, as it should
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(SECOND)
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 on a Python integer."""
    value = ((value ^ (value >> 30)) * FIRST) & _MASK
    value = ((value ^ (value >> 27)) * SECOND) & _MASK
    return value ^ (value >> 31)
