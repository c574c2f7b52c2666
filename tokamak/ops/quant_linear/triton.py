"""Products with scaled 8-bit weights: rows are rounded in a launch of their own, then multiplied by Triton or PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.quant_linear import library, triton_words
from tokamak.ops.quant_linear.reference import ScaleBlocks, group_of, scaled_linear
from tokamak.ops.quant_linear.triton_few import FEW_ROWS, multiply_few
from tokamak.ops.quant_linear.triton_many import multiply_many
from tokamak.ops.quantize.triton_rows import triton_quantize_rows
from tokamak.ops.triton_facts import fits_e4m3


@scaled_linear.backend("triton", fits=fits_e4m3)
def triton_scaled_linear(
    x: Tensor, codes: Tensor, scales: Tensor, blocks: ScaleBlocks, out_dtype: torch.dtype
) -> Tensor:
    """Multiply rows, rounded to 8 bits, with a matrix of 8-bit numbers."""
    rows, columns = x.shape
    group = group_of(blocks, columns)
    assert group is not None, f"no kernel takes a weight of {columns} columns in blocks of {blocks}"
    if rows > 1 and triton_words.takes(columns, blocks, group):
        out = torch.empty((rows, codes.shape[0]), dtype=out_dtype, device=x.device)
        triton_words.multiply_words(x, codes, scales, blocks, group, out)
        return out
    rounded, row_scales = triton_quantize_rows(x, group, blocks.power_of_two)
    if library.takes(rows, columns, blocks, out_dtype) and library.agrees(x.device):
        return library.multiply(rounded, row_scales, codes, scales)
    out = torch.empty((rows, codes.shape[0]), dtype=out_dtype, device=x.device)
    if rows:
        multiply = multiply_few if rows <= FEW_ROWS else multiply_many
        multiply(rounded, row_scales, codes, scales, blocks, group, out)
    return out
