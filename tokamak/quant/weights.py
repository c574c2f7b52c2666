"""Which codes and scales does a weight get in the number formats of checkpoints?

The inverse of `Weight.dense`: what comes out is what such a checkpoint would hold. DeepSeek V4 and V4.1 have powers of
two as scales, as `tokamak/ops/quantize/blocks.py` defines them for rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.minifloat import E4M3_MOST, factors_of
from tokamak.core.weight import PackedWeight, ScaledWeight
from tokamak.ops.quantize.blocks import e4m3_of, encode_mxfp4, fp8_scales

TINY = torch.finfo(torch.float32).tiny


def fp8_weight(
    values: Tensor, block: tuple[int, int], *, powers_of_two: bool = True
) -> ScaledWeight:
    """E4M3 with a scale per block of rows and columns; values: [rows, columns], blocks at the edges may be smaller.

    A scale is the block's largest size over 448, as float32 or rounded up to a power of two. Of powers of two, a weight
    that came from blocks of this size gets back its numbers, and its codes too unless the largest size
    of a block is 224 times its scale or less: such a block then has half the scale.
    """
    rows, columns = values.shape
    block = min(block[0], rows), min(block[1], columns)
    down, right = -(-rows // block[0]), -(-columns // block[1])
    whole = (down * block[0], right * block[1])
    padded = functional.pad(values.float(), (0, whole[1] - columns, 0, whole[0] - rows))
    tiles = padded.view(down, block[0], right, block[1])
    largest = tiles.abs().amax((1, 3))
    # A block of zeros has any scale that is one.
    scales = fp8_scales(largest) if powers_of_two else (largest / E4M3_MOST).clamp_min(TINY)
    codes = e4m3_of(tiles / factors_of(scales)[:, None, :, None])
    return ScaledWeight(codes.view(whole)[:rows, :columns].contiguous(), scales, block)


def mxfp4_weight(values: Tensor) -> PackedWeight:
    """E2M1 with a power of two per 32 columns; values: [rows, columns], columns a multiple of 32.

    A weight that came from this format gets back its numbers, and its codes too unless the largest size of a group
    is 3 times its scale or less.
    """
    return PackedWeight(*encode_mxfp4(values))
