"""Which codes and scales does a weight get in the number formats of DeepSeek V4 and V4.1?

The inverse of `Weight.dense`: what comes out is what such a checkpoint would hold. Scales are powers of two, as
`tokamak/ops/quantize/blocks.py` defines them for rows.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokamak.core.minifloat import float_of_ue8m0
from tokamak.core.weight import PackedWeight, ScaledWeight
from tokamak.ops.quantize.blocks import e4m3_of, encode_mxfp4, fp8_scales


def fp8_weight(values: Tensor, block: tuple[int, int]) -> ScaledWeight:
    """E4M3 with a power of two per block of rows and columns; values: [rows, columns], blocks at the edges may be smaller.

    A weight that came from blocks of this size gets back its numbers, and its codes too unless the largest size
    of a block is 224 times its scale or less: such a block then has half the scale.
    """
    rows, columns = values.shape
    down, right = -(-rows // block[0]), -(-columns // block[1])
    whole = (down * block[0], right * block[1])
    padded = functional.pad(values.float(), (0, whole[1] - columns, 0, whole[0] - rows))
    tiles = padded.view(down, block[0], right, block[1])
    scales = fp8_scales(tiles.abs().amax((1, 3)))
    codes = e4m3_of(tiles / float_of_ue8m0(scales)[:, None, :, None])
    return ScaledWeight(codes.view(whole)[:rows, :columns].contiguous(), scales, block)


def mxfp4_weight(values: Tensor) -> PackedWeight:
    """E2M1 with a power of two per 32 columns; values: [rows, columns], columns a multiple of 32.

    A weight that came from this format gets back its numbers, and its codes too unless the largest size of a group
    is 3 times its scale or less.
    """
    return PackedWeight(*encode_mxfp4(values))
