"""Which numbers do the bits of small floats stand for? In registers, without conversions that only some chips have.

What `tokamak/core/minifloat.py` says of tensors, for tiles of kernels. Every result is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float_of_ue8m0(code):
    """uint8 exponents to float32 powers of two."""
    exponent = code.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def float_of_e4m3(code):
    """uint8 codes to float32; the codes without a number, which hold NaN, give NaN."""
    wide = code.to(tl.int16)
    # Exponent and mantissa are moved to where float16 has them; its exponents are counted from 8 lower.
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def float_of_e2m1(code):
    """Codes, uint8 0 to 15, to float32."""
    wide = code.to(tl.int16)
    # The same, with exponents counted from 14 lower.
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
