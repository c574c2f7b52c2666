"""Which random number does a row draw with? On a device, from the request's key and the token's position alone.

The mixing function is SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195).
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def uniforms_of(keys: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, of 53 random bits. keys: int64 with a key's bits; positions: integers; float64."""
    bits = keys + (positions.long() + 1) * _signed(GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(SECOND)
    return _shifted(bits ^ _shifted(bits, 31), 11).double() * 2.0**-53


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Shift to the right, zeros coming in; PyTorch's own shift repeats the sign."""
    return (bits >> places) & (_MASK >> places)


def _signed(value: int) -> int:
    """The int64 of these 64 bits; products wrap the same."""
    return value - (1 << 64) if value >> 63 else value
