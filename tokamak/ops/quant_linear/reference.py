"""Products of rows with scaled 8-bit weights in plain PyTorch: both sides are widened, sums are float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.weight import widened
from tokamak.ops.quantize.rows import quantize_rows
from tokamak.ops.registry import op

GROUP = 128
"""Columns of a row that share a scale, where blocks of the weight are as wide or wider."""


class ScaleBlocks(NamedTuple):
    """How scales lie over a weight."""

    rows: int
    columns: int
    """Rows and columns that share a scale; a weight with one scale a row has blocks of 1 x all columns."""
    power_of_two: bool = False
    """Whether scales are powers of two; those of activations are then rounded up to them too."""


def group_of(blocks: ScaleBlocks, columns: int) -> int | None:
    """Columns of a row that get one scale before it is multiplied: those of a block, at most GROUP.

    None where such groups and blocks would not fit each other: those weights are widened instead.
    """
    if blocks.columns >= columns:
        return GROUP
    if blocks.columns % GROUP == 0:
        return GROUP
    return blocks.columns if blocks.columns in (32, 64) else None


@op
def scaled_linear(
    x: Tensor, codes: Tensor, scales: Tensor, blocks: ScaleBlocks, out_dtype: torch.dtype
) -> Tensor:
    """Multiply rows, rounded to 8 bits, with a matrix of 8-bit numbers; W8A8.

    Rows are rounded as `quantize_rows` does by groups of `group_of(blocks, columns)`. Products are summed in
    float32 within a group, by matrix units of less if they have no more, and scaled sums are added in float32.

    x: [rows, columns]. codes: float8_e4m3fn [features, columns]; scales: float32 [features / blocks.rows, columns /
    blocks.columns], rounded up. Returns [rows, features] in `out_dtype`, rounded once.
    """
    return functional.linear(fake_quantized(x, blocks), widened(codes, scales, blocks[:2])).to(
        out_dtype
    )


def fake_quantized(x: Tensor, blocks: ScaleBlocks) -> Tensor:
    """The float32 numbers that rounded rows stand for; x: [rows, columns]."""
    columns = x.shape[1]
    group = group_of(blocks, columns)
    assert group is not None, f"no kernel takes a weight of {columns} columns in blocks of {blocks}"
    codes, scales = quantize_rows.reference(x, group, blocks.power_of_two)
    return codes.float() * scales.repeat_interleave(group, 1)[:, :columns]
