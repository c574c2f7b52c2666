"""Round trips through narrow number formats: what a model was trained to see, in any float dtype.

In and out: the same shape and dtype. Blocks lie along the last dimension, whose size they divide.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
FP4_MAX = 6.0


def fake_fp8(x: Tensor, block: int) -> Tensor:
    """E4M3 with a power of two as scale for every `block` numbers."""
    blocks, largest = _blocks(x, block)
    scale = _power_of_two_above(largest.clamp(min=1e-4) * (1 / FP8_MAX))
    codes = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).view(x.shape).to(x.dtype)


def fake_nvfp4(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 number as scale for every 16 numbers, and no scale over all."""
    blocks, largest = _blocks(x, 16)
    scale = largest.clamp(min=FP4_MAX * 2.0**-9) / FP4_MAX
    scale = scale.to(torch.float8_e4m3fn).float()
    return (_to_fp4_grid(blocks / scale) * scale).view(x.shape).to(x.dtype)


def fake_mxfp4(x: Tensor) -> Tensor:
    """E2M1 with a power of two as scale for every 32 numbers."""
    blocks, largest = _blocks(x, 32)
    scale = _power_of_two_above(largest.clamp(min=FP4_MAX * 2.0**-126) * (1 / FP4_MAX))
    return (_to_fp4_grid(blocks / scale) * scale).view(x.shape).to(x.dtype)


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    blocks = x.float().unflatten(-1, (-1, block))
    return blocks, blocks.abs().amax(dim=-1, keepdim=True)


def _power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two that is not below each positive, normal number."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


def _to_fp4_grid(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of each number; ties to the even code."""
    size = x.abs().clamp(max=FP4_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, x)
