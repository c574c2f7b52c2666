# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Round trips through the block formats in Triton: one program for some blocks of a row, one pass.

Numbers are rounded by adding and subtracting 1.5 * 2^23 steps, which rounds to even everywhere, so that no chip needs
conversions to 8 or 4 bits of its own. Sizes are compared as integers: positive floats are ordered like their bits,
and infinities and NaN are the largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.quantize.blocks import BLOCKS_OF
from tokamak.ops.quantize.reference import fake_fp8, fake_mxfp4, fake_nvfp4
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import order_on

TILE_NUMBERS = 512
WARPS = 2

_SIZE = tl.constexpr(0x7FFFFFFF)
_MANTISSA = tl.constexpr(0x7FFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_ROUNDING = tl.constexpr(0x4B400000)
"""The bits of 1.5 * 2^23."""


@triton.jit
def power_at_least(number) -> tl.tensor:
    """The exponent bits of the smallest power of two not less than a positive number; 255 where that is none."""
    bits = number.to(tl.int32, bitcast=True) & _SIZE
    exponent = (bits >> 23) + tl.where((bits & _MANTISSA) != 0, 1, 0)
    return tl.minimum(exponent, 255)


@triton.jit
def power_of(exponent) -> tl.tensor:
    """The power of two with these exponent bits, 1 to 254; NaN for 255."""
    return tl.where(exponent == 255, _NAN, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_steps(size, exponent) -> tl.tensor:
    """A size below 2^22 steps as the nearest multiple of a step, which is a power of two by its exponent."""
    shift = ((exponent << 23) + _ROUNDING).to(tl.float32, bitcast=True)
    return (size + shift) - shift


@triton.jit
def to_e4m3(size) -> tl.tensor:
    """The nearest size of E4M3, as a float32; larger ones are cut off."""
    size = tl.minimum(size, 448.0)
    exponent = (size.to(tl.int32, bitcast=True) >> 23) - 127
    return to_steps(size, tl.maximum(exponent, -6) - 3)


@triton.jit
def to_e2m1(size) -> tl.tensor:
    """The nearest size of E2M1, as a float32; larger ones are cut off."""
    size = tl.minimum(size, 6.0)
    return to_steps(size, tl.where(size < 2.0, -1, tl.where(size < 4.0, 0, 1)))


@triton.jit
def in_blocks(x, least, FORMAT: tl.constexpr):
    """Blocks of float32 numbers [blocks, BLOCK] in a format: the sizes of their codes, and scales [blocks, 1].

    least: a block of smaller numbers is scaled as if this were its largest. A block with an infinity or NaN has NaN as
    its scale.
    """
    size_bits = x.to(tl.int32, bitcast=True) & _SIZE
    size = size_bits.to(tl.float32, bitcast=True)
    largest_bits = tl.max(size_bits, axis=1)[:, None]
    largest = largest_bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest_bits < _INFINITY, tl.maximum(largest, least), largest)
    if FORMAT == "nvfp4":
        scale = to_e4m3(tl.div_rn(largest, 6.0))
        scale = tl.where(largest_bits < _INFINITY, scale, float("nan"))
        rounded = to_e2m1(tl.div_rn(size, scale))
    elif FORMAT == "mxfp4":
        exponent = power_at_least(largest * (1 / 6.0))
        scale = power_of(exponent)
        rounded = to_e2m1(size * power_of(254 - tl.minimum(exponent, 253)))
    else:
        exponent = power_at_least(largest * (1 / 448.0))
        scale = power_of(exponent)
        rounded = to_e4m3(size * power_of(254 - tl.minimum(exponent, 253)))
    return rounded, scale


@triton.jit
def signed_as(size, x) -> tl.tensor:
    """Sizes, float32, with the signs of x."""
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & (~_SIZE))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def column_at(place, A_WORD: tl.constexpr):
    """The column that lies at a place where rows are multiplied with words of eight 4-bit numbers, or four of 8 bits.

    Of 16 columns in a row a thread of the matrix units holds two neighbours and two more 8 further on; it finds all
    columns of these that it holds of 32, or of 16, in one word: pairs of them are a half of the word apart.
    """
    PAIRS: tl.constexpr = A_WORD // 2
    word, pair, high = (place >> 1) & 3, (place >> 3) & (PAIRS - 1), place & 1
    return (place & ~(4 * A_WORD - 1)) + word * A_WORD + pair + high * PAIRS


@triton.jit
def _fake_kernel(
    x_ptr,
    out_ptr,
    blocks,
    stride_x_row,
    least,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    A_WORD: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    cols = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < blocks)[:, None]
    read = column_at(cols, A_WORD) if A_WORD else cols
    x = tl.load(x_ptr + row * stride_x_row + read, mask=inside, other=0.0).to(tl.float32)
    rounded, scale = in_blocks(x, least, FORMAT)
    out_ptrs = out_ptr + row * blocks * BLOCK + cols
    tl.store(out_ptrs, signed_as(rounded * scale, x).to(out_ptr.dtype.element_ty), mask=inside)


def _fake(x: Tensor, form: str, *, block: int = 0, a_word: int = 0) -> Tensor:
    """A round trip of the last axis; x: [..., n], n whole blocks of a power of two. block: 0 for the format's own."""
    width, (own, least) = x.shape[-1], BLOCKS_OF[form]
    block = block or own
    assert width % block == 0, f"{width} numbers in blocks of {block}"
    rows = rows_of(x).reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = width // block
    tile = min(triton.next_power_of_2(blocks), max(TILE_NUMBERS // block, 1))
    _fake_kernel[(rows.shape[0], triton.cdiv(blocks, tile))](
        rows, out, blocks, rows.stride(0), least,
        BLOCK=block, TILE=tile, FORMAT=form, A_WORD=a_word, num_warps=WARPS, **order_on(rows.device.type),
    )  # fmt: skip
    return out


@fake_fp8.backend("triton", fits=fits)
def triton_fake_fp8(x: Tensor, block: int = 32) -> Tensor:
    """E4M3 with a power of two a block."""
    if block & (block - 1):
        return fake_fp8.reference(x, block)
    return _fake(x, "fp8", block=block)


def fake_fp8_in_order(x: Tensor, block: int, a_word: int) -> Tensor:
    """The same of blocks of 32 columns or more, with columns in the order of `column_at`."""
    assert block % 32 == 0, f"blocks of {block} do not hold whole words of four"
    return _fake(x, "fp8", block=block, a_word=a_word)


@fake_mxfp4.backend("triton", fits=fits)
def triton_fake_mxfp4(x: Tensor) -> Tensor:
    """E2M1 with a power of two per 32."""
    return _fake(x, "mxfp4")


@fake_nvfp4.backend("triton", fits=fits)
def triton_fake_nvfp4(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 scale per 16."""
    return _fake(x, "nvfp4")
