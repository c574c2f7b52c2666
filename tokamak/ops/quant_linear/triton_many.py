# pyright: reportArgumentType=false, reportCallIssue=false
"""Many rows of 8-bit numbers times a scaled 8-bit weight in Triton: tiles of rows and features, a group of columns at a time."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.quant_linear.reference import ScaleBlocks
from tokamak.ops.quant_linear.triton_scales import scale_rows


@dataclass(frozen=True, slots=True)
class ManyTile:
    """What a program takes: rows by features, and how."""

    rows: int
    features: int
    warps: int
    stages: int


TOGETHER = 8
"""Tiles of rows that follow each other under one tile of features, whose weights then come from the second cache."""


@triton.jit
def _many_kernel(
    x_ptr,
    row_scales_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    rows,
    features,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    GROUPS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
    row_tiles, feature_tiles = tl.cdiv(rows, ROWS), tl.cdiv(features, FEATURES)
    place = tl.program_id(0)
    first = place // (TOGETHER * feature_tiles) * TOGETHER
    high = tl.minimum(row_tiles - first, TOGETHER)
    within = place % (TOGETHER * feature_tiles)
    row = (first + within % high) * ROWS + tl.arange(0, ROWS)
    feature = within // high * FEATURES + tl.arange(0, FEATURES)
    # Beyond the last row and feature the last is taken once more, and not stored.
    known_row = tl.minimum(row, rows - 1).to(tl.int64)
    known = tl.minimum(feature, features - 1)
    cols = tl.arange(0, GROUP)
    x_ptrs = x_ptr + known_row[:, None] * COLUMNS + cols[None, :]
    code_ptrs = codes_ptr + known.to(tl.int64)[:, None] * COLUMNS + cols[None, :]
    row_scale_ptrs = row_scales_ptr + known_row * GROUPS
    scale_ptrs = scale_rows(scales_ptr, known, COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for at in range(GROUPS):
        if COLUMNS % GROUP == 0:
            x, code = tl.load(x_ptrs), tl.load(code_ptrs)
        else:
            inside = (at * GROUP + cols < COLUMNS)[None, :]
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            code = tl.load(code_ptrs, mask=inside, other=0.0)
        row_scale = tl.load(row_scale_ptrs + at)
        if BLOCK_ROWS % FEATURES == 0:
            # One block holds all features of the tile.
            tile_ptr = scale_rows(
                scales_ptr, within // high * FEATURES, COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS
            )
            tile_scale = tl.load(tile_ptr + at * GROUP // BLOCK_COLUMNS)
            factor = (row_scale * tile_scale)[:, None]
        else:
            factor = row_scale[:, None] * tl.load(scale_ptrs + at * GROUP // BLOCK_COLUMNS)[None, :]
        total += tl.dot(x, tl.trans(code)) * factor
        x_ptrs += GROUP
        code_ptrs += GROUP
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * features + feature[None, :]
    stored = (row < rows)[:, None] & (feature < features)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=stored)


def tile_for(rows: int) -> ManyTile:
    """Measured on an H200 with Llama 3 8B's matrices (`benchmarks/ops/gpu_quant_linear.py --tune`)."""
    return ManyTile(64, 64 if rows <= 128 else 128, 4, 4)


def multiply_many(
    x: Tensor,
    row_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    blocks: ScaleBlocks,
    group: int,
    out: Tensor,
    tile: ManyTile | None = None,
) -> None:
    """Write products of rows that are rounded already to `out`; arguments as of `scaled_linear` and `quantize_rows`."""
    rows, columns = x.shape
    features = codes.shape[0]
    tile = tile or tile_for(rows)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(features, tile.features),)
    _many_kernel[grid](
        x, row_scales, codes, scales, out, rows, features,
        COLUMNS=columns, BLOCK_ROWS=blocks.rows, BLOCK_COLUMNS=min(blocks.columns, columns), GROUP=group,
        ROWS=tile.rows, FEATURES=tile.features, TOGETHER=TOGETHER,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
