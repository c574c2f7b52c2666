"""Which codes and scales does a weight get that a checkpoint would store in 8 bits? The inverse of `ScaledWeight.dense`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.weight import ScaledWeight

LARGEST = 448.0
"""The largest number of E4M3."""


def scaled_weight(values: Tensor, block: tuple[int, int]) -> ScaledWeight:
    """E4M3 with a float32 scale per block of rows and columns: the block's largest magnitude over 448.

    values: [rows, columns] of floats; blocks at the edges may be smaller. Codes are rounded to the nearest, ties to even.
    """
    rows, columns = values.shape
    block = min(block[0], rows), min(block[1], columns)
    down, right = -(-rows // block[0]), -(-columns // block[1])
    whole = down * block[0], right * block[1]
    padded = functional.pad(values.float(), (0, whole[1] - columns, 0, whole[0] - rows))
    tiles = padded.view(down, block[0], right, block[1])
    # A block of zeros has any scale that is one.
    scales = (tiles.abs().amax((1, 3)) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (tiles / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return ScaledWeight(codes.view(whole)[:rows, :columns].contiguous(), scales, block)
