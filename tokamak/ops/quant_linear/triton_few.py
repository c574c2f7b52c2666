# pyright: reportArgumentType=false, reportCallIssue=false
"""Few rows times a scaled 8-bit weight in Triton: a program per tile of features, one pass over the columns.

Every program rounds the rows itself, group by group, as it comes to their columns: a launch less than rounding
them first, and bytes of the weight are on their way meanwhile. Slices of columns take turns, each summed apart;
the sums are joined at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.quant_linear.reference import ScaleBlocks
from tokamak.ops.quantize.triton import code_of, scale_of

FEW_ROWS = 32
LEAST_ROWS = 8
"""Rows that matrix units multiply at least."""


@dataclass(frozen=True, slots=True)
class FewTile:
    """What a program takes at a time."""

    features: int
    slices: int
    """Groups of columns multiplied at a time, as many as warps."""
    stages: int


@triton.jit
def _few_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    rows,
    features,
    stride_x_row,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    SLICES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    SCALE_COLUMNS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    slices = tl.arange(0, SLICES)
    cols = slices[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside, here = feature < features, row < rows
    # Features beyond the last are the last once more, and are not stored.
    known = tl.minimum(feature, features - 1)
    code_ptrs = codes_ptr + known.to(tl.int64)[None, :, None] * COLUMNS + cols[:, None, :]
    scale_row = (known // BLOCK_ROWS)[None, :] * SCALE_COLUMNS
    x_ptrs = x_ptr + row[None, None, :] * stride_x_row + cols[:, :, None]
    total = tl.zeros([SLICES, FEATURES, ROWS], tl.float32)
    for begin in range(0, COLUMNS, SLICES * GROUP):
        near_end = begin + cols < COLUMNS
        if WHOLE:
            code = tl.load(code_ptrs + begin)
            x = tl.load(x_ptrs + begin, mask=here[None, None, :], other=0.0)
        else:
            code = tl.load(code_ptrs + begin, mask=near_end[:, None, :], other=0.0)
            x = tl.load(x_ptrs + begin, mask=here[None, None, :] & near_end[:, :, None], other=0.0)
        x = x.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(x), axis=1), POWER_OF_TWO)
        rounded = code_of(x, tl.broadcast_to(scale[:, None, :], (SLICES, GROUP, ROWS)))
        part = tl.dot(code, rounded)
        of_block = tl.minimum((begin + slices * GROUP) // BLOCK_COLUMNS, SCALE_COLUMNS - 1)
        block_scale = tl.load(scales_ptr + scale_row + of_block[:, None])
        total += part * block_scale[:, :, None] * scale[:, None, :]
    out = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + row[None, :].to(tl.int64) * features + feature[:, None]
    tl.store(out_ptrs, out, mask=inside[:, None] & here[None, :])


def tile_for(rows: int, features: int, columns: int, group: int) -> FewTile:
    """The tile of a [features, columns] weight for 1 to FEW_ROWS rows."""
    slices = 4
    while slices > 1 and slices * group > triton.next_power_of_2(columns):
        slices //= 2
    return FewTile(16 if features <= 8192 and rows <= 16 else 32, slices, 4)


def multiply_few(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    blocks: ScaleBlocks,
    group: int,
    out: Tensor,
    tile: FewTile | None = None,
) -> None:
    """Write products of 1 to FEW_ROWS rows to `out`; arguments as of `scaled_linear`."""
    rows, columns = x.shape
    features = codes.shape[0]
    tile = tile or tile_for(rows, features, columns, group)
    _few_kernel[(triton.cdiv(features, tile.features),)](
        x, codes, scales, out, rows, features, x.stride(0),
        COLUMNS=columns, BLOCK_ROWS=blocks.rows, BLOCK_COLUMNS=min(blocks.columns, columns),
        POWER_OF_TWO=blocks.power_of_two, GROUP=group, ROWS=max(triton.next_power_of_2(rows), LEAST_ROWS),
        FEATURES=tile.features, SLICES=tile.slices, WHOLE=columns % (tile.slices * group) == 0,
        num_warps=tile.slices, num_stages=tile.stages,
    )  # fmt: skip
