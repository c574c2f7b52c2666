"""Products with scaled 8-bit weights in Triton: few rows are rounded by every program that multiplies them, many once."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.quant_linear.reference import ScaleBlocks, group_of, scaled_linear
from tokamak.ops.quant_linear.triton_few import FEW_ROWS, multiply_few
from tokamak.ops.quant_linear.triton_many import multiply_many
from tokamak.ops.quantize.triton import triton_quantize_rows
from tokamak.ops.triton_facts import fits_e4m3, rows_of


@scaled_linear.backend("triton", fits=fits_e4m3)
def triton_scaled_linear(
    x: Tensor, codes: Tensor, scales: Tensor, blocks: ScaleBlocks, out_dtype: torch.dtype
) -> Tensor:
    """Multiply rows, rounded to 8 bits, with a matrix of 8-bit numbers."""
    rows, columns = x.shape
    group = group_of(blocks, columns)
    assert group is not None, f"no kernel takes a weight of {columns} columns in blocks of {blocks}"
    out = torch.empty((rows, codes.shape[0]), dtype=out_dtype, device=x.device)
    if not rows:
        return out
    x = rows_of(x)
    if rows <= FEW_ROWS:
        multiply_few(x, codes, scales, blocks, group, out)
    else:
        rounded, row_scales = triton_quantize_rows(x, group, blocks.power_of_two)
        multiply_many(rounded, row_scales, codes, scales, blocks, group, out)
    return out
