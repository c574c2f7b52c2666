"""Rows and scaled weights: one row, few, many; blocks of checkpoints, weights that no block divides, powers of two."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import BFLOAT16, Case, seeded
from tokamak.ops.quant_linear.reference import ScaleBlocks
from tokamak.ops.quantize.blocks import e4m3_of

ROWS = (0, 1, 3, 8, 17, 40)
SQUARE, PER_ROW, SMALL = (128, 128), (1, 1 << 20), (32, 32)
SHAPES = (
    (256, 256, SQUARE),
    (200, 384, SQUARE),
    (96, 320, PER_ROW),
    (64, 128, SMALL),
    (72, 96, SMALL),
    (40, 32, SMALL),
)
"""Features, columns, rows and columns of a block."""


TOLERANCE = 2 * BFLOAT16
"""Matrix units add up 8-bit products in less than float32, whatever the dtype of rows is."""


def scaled_numbers(
    shape: tuple[int, ...], blocks: ScaleBlocks, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random codes [..., features, columns] whose numbers have a mean square of 1 / columns, and their scales."""
    features, columns = shape[-2:]
    down, right = -(-features // blocks.rows), -(-columns // blocks.columns)
    scales = torch.rand((*shape[:-2], down, right), generator=generator).add(0.5)
    scales *= columns**-0.5 / 100
    if blocks.power_of_two:
        scales = scales.log2().ceil().exp2()
    return e4m3_of(torch.randn(shape, generator=generator).mul(100)), scales


def _make(
    name: str, rows: int, shape: tuple[int, int, tuple[int, int]], dtype: torch.dtype
) -> tuple[object, ...]:
    features, columns, (block_rows, block_columns) = shape
    blocks = ScaleBlocks(block_rows, min(block_columns, columns), block_rows == 32)
    generator = seeded(name)
    x = torch.randn((rows, columns), generator=generator).to(dtype)
    codes, scales = scaled_numbers((features, columns), blocks, generator)
    return x, codes, scales, blocks, dtype


scaled_linear_cases = [
    Case(name, partial(_make, name, rows, shape, dtype), TOLERANCE)
    for dtype in (torch.float32, torch.bfloat16)
    for shape in SHAPES
    for rows in ROWS
    for name in [
        f"{rows} rows, {shape[0]}x{shape[1]} in {shape[2][0]}x{shape[2][1]}, {str(dtype)[6:]}"
    ]
]
