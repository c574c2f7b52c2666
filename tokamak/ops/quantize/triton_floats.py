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


@triton.jit
def e4m3_of_size(size):
    """Sizes of E4M3, float32, to uint8 codes without a sign; NaN to its code."""
    # The same bits of float16 as `float_of_e4m3` reads.
    half = (size * (1 / 256.0)).to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(size != size, 0x7F, half >> 7).to(tl.uint8)


@triton.jit
def e2m1_of_size(size):
    """Sizes of E2M1, float32, to uint8 codes without a sign, 0 to 7; NaN to one of them."""
    half = (size * (1 / 16384.0)).to(tl.float16).to(tl.int16, bitcast=True)
    return ((half >> 9) & 7).to(tl.uint8)
