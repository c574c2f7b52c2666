"""Which codes and scales do rows of numbers get in the block formats of DeepSeek V4 and V4.1, and what do these stand for?

A block is some neighbours of the last axis that share a scale:

| format | codes | block | scale |
|---|---|---|---|
| FP8 | E4M3 | 32, 64 or 128 | UE8M0: 2^ceil(log2(max(largest, 1e-4) / 448)) |
| MXFP4 | E2M1 | 32 | UE8M0: 2^ceil(log2(max(largest, 6 * 2^-126) / 6)) |
| NVFP4 | E2M1 | 16 | E4M3 of max(largest, 6 * 2^-9) / 6; there is no scale of the whole tensor |

The formulas are those of the released models' inference code, which multiplies by the float32 reciprocal for the
powers of two and divides for NVFP4. Numbers are divided by the scale as stored, cut off at the largest code and rounded
to the nearest, halfway cases to the even code. Zero keeps its sign. Code times scale has at most 6 significant bits
and is exact in float32 and bfloat16.

A block that holds an infinity or NaN gets NaN as its scale and is NaN as a whole. In NVFP4 sizes above 2688 become 2688.

All functions work on any device, with any float dtype, and never wait for the device. The last axis must be whole blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokamak.core.minifloat import (
    E2M1_MOST,
    E4M3_MOST,
    e2m1_of,
    factors_of,
    float_of_e2m1,
    float_of_ue8m0,
    pack_nibbles,
    ue8m0_at_least,
    unpack_nibbles,
)

FP8_BLOCK = 32
MXFP4_BLOCK = 32
NVFP4_BLOCK = 16

FP8_LEAST = 1e-4
"""Blocks of smaller numbers are scaled as if this were their largest."""
MXFP4_LEAST = E2M1_MOST * 2.0**-126
NVFP4_LEAST = E2M1_MOST * 2.0**-9


class Blocks(NamedTuple):
    """How a format divides a row: numbers that share a scale, and what the largest of them counts as at least."""

    numbers: int
    least: float


BLOCKS_OF = {
    "fp8": Blocks(FP8_BLOCK, FP8_LEAST),
    "mxfp4": Blocks(MXFP4_BLOCK, MXFP4_LEAST),
    "nvfp4": Blocks(NVFP4_BLOCK, NVFP4_LEAST),
}


def encode_fp8(x: Tensor, block: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """x: [..., n] to codes [..., n] float8_e4m3fn and scales [..., n / block] float8_e8m0fnu."""
    blocks, largest = _in_blocks(x, block)
    scales = fp8_scales(largest)
    codes = blocks / float_of_ue8m0(scales).unsqueeze(-1)
    return e4m3_of(codes).flatten(-2), scales


def decode_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [..., n] times the scale [..., blocks] of their block, float32 [..., n]; scales of any dtype."""
    return _scaled(codes.float(), scales)


def encode_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [..., n] to packed codes [..., n / 2] uint8 and scales [..., n / 32] float8_e8m0fnu."""
    blocks, largest = _in_blocks(x, MXFP4_BLOCK)
    scales = ue8m0_at_least(largest.clamp(min=MXFP4_LEAST) * (1 / E2M1_MOST))
    codes = e2m1_of(blocks / float_of_ue8m0(scales).unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), scales


def encode_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [..., n] to packed codes [..., n / 2] uint8 and scales [..., n / 16] float8_e4m3fn."""
    blocks, largest = _in_blocks(x, NVFP4_BLOCK)
    wanted = e4m3_of(largest.clamp(min=NVFP4_LEAST) / E2M1_MOST)
    scales = torch.where(largest.isfinite(), wanted.float(), torch.nan).to(torch.float8_e4m3fn)
    codes = e2m1_of(blocks / scales.float().unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), scales


def decode_fp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Packed codes [..., n / 2] times the scale [..., blocks] of their block, float32 [..., n]: MXFP4 and NVFP4."""
    return _scaled(float_of_e2m1(unpack_nibbles(packed)), scales)


def fp8_scales(largest: Tensor) -> Tensor:
    """Scales of FP8 blocks by their largest size: float32 to float8_e8m0fnu of the same shape."""
    return ue8m0_at_least(largest.clamp(min=FP8_LEAST) * (1 / E4M3_MOST))


def e4m3_of(numbers: Tensor) -> Tensor:
    """Float32 to float8_e4m3fn, sizes above 448 as 448."""
    return numbers.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)


def _in_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Float32 [..., blocks, block] of x, and the largest size in each block, [..., blocks]."""
    assert x.shape[-1] % block == 0, f"{x.shape[-1]} numbers in blocks of {block}"
    blocks = x.float().unflatten(-1, (x.shape[-1] // block, block))
    return blocks, blocks.abs().amax(-1)


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    """numbers: [..., n] times the scale [..., blocks] of its block; float32."""
    blocks = scales.shape[-1]
    wide = numbers.unflatten(-1, (blocks, numbers.shape[-1] // blocks))
    return (wide * factors_of(scales).unsqueeze(-1)).flatten(-2)
