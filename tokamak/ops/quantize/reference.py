"""Round trips through the block formats in plain PyTorch: what a cache that keeps them gives back.

DeepSeek V4.1 was trained with these in its forward, so they are part of the model and not a choice of the engine.
Every result is a number of bfloat16: a cache may keep the codes and scales, or the results themselves, without a difference.
Formats, and what becomes of infinities and NaN: `tokamak/ops/quantize/blocks.py`.
"""

from __future__ import annotations

from torch import Tensor

from tokamak.ops.quantize.blocks import (
    decode_fp4,
    decode_fp8,
    encode_fp8,
    encode_mxfp4,
    encode_nvfp4,
)
from tokamak.ops.registry import op


@op
def fake_fp8(x: Tensor, block: int = 32) -> Tensor:
    """E4M3 with a power of two a block; x: [..., n], n whole blocks. Returns a new tensor of x's shape and dtype.

    A second round trip changes nothing.
    """
    return decode_fp8(*encode_fp8(x, block)).to(x.dtype)


@op
def fake_mxfp4(x: Tensor) -> Tensor:
    """E2M1 with a power of two per 32; x: [..., n], n whole blocks. Returns a new tensor of x's shape and dtype.

    A second round trip changes nothing.
    """
    return decode_fp4(*encode_mxfp4(x)).to(x.dtype)


@op
def fake_nvfp4(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 scale per 16; x: [..., n], n whole blocks. Returns a new tensor of x's shape and dtype.

    A second round trip changes nothing, but for blocks whose largest size is between 9 and 10 times 2^-9: their scale
    of 2^-8 is so far above what was wanted that the largest code becomes 4, from which the scale 2^-9 is computed.
    """
    return decode_fp4(*encode_nvfp4(x)).to(x.dtype)
