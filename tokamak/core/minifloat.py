"""What numbers do the bits of small floats stand for, and which bits does a number get?

E2M1 has one sign, two exponent and one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, codes 0 to 7, and their negatives,
codes 8 to 15. Two codes share a byte, the even column in the low half. UE8M0 is an exponent alone: byte b stands for
2^(b - 127), byte 255 for NaN. Both are defined by the OCP Microscaling Formats specification (MX v1.0).
E4M3 needs nothing here: PyTorch converts it, rounding to even and never using the FNUZ variant.

All functions work on any device, take tensors of any shape and never wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MOST = 6.0
E4M3_MOST = 448.0

UE8M0 = torch.float8_e8m0fnu
"""The dtype of scale bytes. Going to and from uint8 is a `view`: a cast would convert the numbers."""

_NAN_BITS = 0x7FC00000
_HALF_OF_SMALLEST_BITS = 0x00400000
"""2^-127 as a float32, which has no exponent for it."""


def ue8m0_at_least(numbers: Tensor) -> Tensor:
    """The smallest power of two that is not less than a number, 2^ceil(log2 x), read off the bits of x.

    numbers: float32, not negative. Returns float8_e8m0fnu of the same shape. Infinity, NaN and numbers above 2^127
    give NaN; 0 gives 2^-127 and other numbers below 2^-126 give 2^-126.
    """
    bits = numbers.view(torch.int32)
    exponents = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0)
    return exponents.clamp_(max=255).to(torch.uint8).view(UE8M0)


def float_of_ue8m0(scales: Tensor) -> Tensor:
    """float8_e8m0fnu to the float32 powers of two they stand for."""
    exponents = scales.view(torch.uint8).int()
    bits = torch.where(exponents == 0, _HALF_OF_SMALLEST_BITS, exponents << 23)
    return torch.where(exponents == 255, _NAN_BITS, bits).view(torch.float32)


def factors_of(scales: Tensor) -> Tensor:
    """Scales of any dtype as the float32 numbers they stand for."""
    return float_of_ue8m0(scales) if scales.dtype == UE8M0 else scales.float()


def e2m1_of(numbers: Tensor) -> Tensor:
    """The nearest E2M1 codes, halfway cases to the even code: float32 to uint8, 0 to 15.

    Numbers beyond 6 give 6; NaN gives any code. The sign of zero is kept.
    """
    sizes = numbers.abs().clamp_(max=E2M1_MOST)
    # Steps are 0.5 below 2, 1 below 4 and 2 above, and each of these borders is two codes ahead of its steps.
    low = torch.round(sizes * 2.0)
    middle, high = torch.round(sizes) + 2.0, torch.round(sizes * 0.5) + 4.0
    codes = torch.where(sizes < 2.0, low, torch.where(sizes < 4.0, middle, high))
    return (codes.to(torch.uint8) & 7) | (torch.signbit(numbers).to(torch.uint8) << 3)


def float_of_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes, uint8 0 to 15, to the float32 numbers they stand for."""
    # Exponent and mantissa are moved to where float16 has them; its exponents are counted from 14 lower.
    wide = codes.short()
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.view(torch.float16).float() * 2.0**14


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two neighbours of the last axis into a byte, the even one low: [..., n] to [..., n / 2] uint8."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes to codes, the low half first: [..., n] to [..., 2 n] uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
