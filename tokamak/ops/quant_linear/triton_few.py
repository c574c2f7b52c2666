# pyright: reportArgumentType=false, reportCallIssue=false
"""Few rows of 8-bit numbers times a scaled 8-bit weight in Triton: a program per tile of features, one pass over the columns.

One row runs on vector arithmetic, where no lane waits for another before the end. More rows run on matrix units, the
weight as their first operand: it fills the 64 rows these want, however few there are of the other. Where tiles of
features are too few for the device, programs share their columns out; a second launch adds up what they found, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.quant_linear.reference import ScaleBlocks
from tokamak.ops.quant_linear.triton_scales import scale_rows
from tokamak.ops.triton_order import order_on

FEW_ROWS = 64
LEAST_ROWS = 8
"""Rows that matrix units multiply at least."""
LANE_COLUMNS = 16
"""8-bit numbers a lane loads at a time: 16 bytes."""
MOST_PROGRAMS = 288
LEAST_GROUPS = 4
"""Groups of columns that are worth a program of their own."""
SUM_TILE = 1024
PROGRAM_COLUMNS = 2048
"""Columns of a feature that a program has on their way at most."""


@dataclass(frozen=True, slots=True)
class FewTile:
    """What a program takes: so many features, with so many warps, groups of columns under way (0: one row)."""

    features: int
    warps: int
    stages: int
    splits: int = 1
    """Programs that share out the columns of a tile."""


@triton.jit
def _one_row_kernel(
    x_ptr,
    row_scales_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    features,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    LANE: tl.constexpr,
):
    SCALE_COLUMNS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    LANES: tl.constexpr = TILE_COLUMNS // LANE
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    # Features beyond the last are the last once more, and are not stored.
    known = tl.minimum(feature, features - 1)
    cols = tl.arange(0, TILE_COLUMNS)
    lanes = tl.arange(0, LANES) * LANE
    code_ptrs = codes_ptr + known.to(tl.int64)[:, None] * COLUMNS + cols[None, :]
    scale_ptrs = scale_rows(scales_ptr, known[:, None], COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    total = tl.zeros([FEATURES, LANES], tl.float32)
    for begin in tl.static_range(0, COLUMNS, TILE_COLUMNS):
        inside = begin + cols < COLUMNS
        if begin + TILE_COLUMNS <= COLUMNS:
            code = tl.load(code_ptrs + begin)
        else:
            code = tl.load(code_ptrs + begin, mask=inside[None, :], other=0.0)
        x = tl.load(x_ptr + begin + cols, mask=inside, other=0.0).to(tl.float32)
        products = tl.reshape(code.to(tl.float32) * x[None, :], [FEATURES, LANES, LANE])
        there = begin + lanes < COLUMNS
        row_scale = tl.load(row_scales_ptr + (begin + lanes) // GROUP, mask=there, other=0.0)
        of_block = tl.minimum((begin + lanes) // BLOCK_COLUMNS, SCALE_COLUMNS - 1)
        factor = tl.load(scale_ptrs + of_block[None, :]) * row_scale[None, :]
        total += tl.sum(products, axis=2) * factor
    out = tl.sum(total, axis=1).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + feature, out, mask=feature < features)


@triton.jit
def _few_rows_kernel(
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
    SPLITS: tl.constexpr,
):
    GROUPS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
    EACH: tl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    # Beyond the last row and feature the last is taken once more, and not stored.
    known_row, known = tl.minimum(row, rows - 1), tl.minimum(feature, features - 1)
    cols = tl.arange(0, GROUP)
    x_ptrs = x_ptr + known_row[None, :] * COLUMNS + cols[:, None]
    code_ptrs = codes_ptr + known.to(tl.int64)[:, None] * COLUMNS + cols[None, :]
    row_scale_ptrs = row_scales_ptr + known_row * GROUPS
    scale_ptrs = scale_rows(scales_ptr, known, COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    first = tl.program_id(1) * EACH
    x_ptrs += first * GROUP
    code_ptrs += first * GROUP
    for at in range(first, tl.minimum(first + EACH, GROUPS)):
        if COLUMNS % GROUP == 0:
            code, x = tl.load(code_ptrs), tl.load(x_ptrs)
        else:
            inside = at * GROUP + cols < COLUMNS
            code = tl.load(code_ptrs, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=inside[:, None], other=0.0)
        factor = tl.load(scale_ptrs + at * GROUP // BLOCK_COLUMNS)[:, None]
        factor = factor * tl.load(row_scale_ptrs + at)[None, :]
        total += tl.dot(code, x) * factor
        x_ptrs += GROUP
        code_ptrs += GROUP
    out_ptrs = out_ptr + (tl.program_id(1) * rows + row[None, :]) * features + feature[:, None]
    stored = (feature < features)[:, None] & (row < rows)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _sum_kernel(
    parts_ptr,
    out_ptr,
    numbers,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < numbers
    total = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * numbers + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def tile_for(rows: int, features: int, groups: int) -> FewTile:
    """The tile of a weight for 1 to FEW_ROWS rows: about two programs for every multiprocessor of an H200."""
    if rows == 1:
        return FewTile(4, 4, 0)
    tiles, splits = triton.cdiv(features, 64), 1
    while tiles * splits * 2 <= MOST_PROGRAMS and groups >= splits * 2 * LEAST_GROUPS:
        splits *= 2
    return FewTile(64, 4, 5, splits)


def multiply_few(
    x: Tensor,
    row_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    blocks: ScaleBlocks,
    group: int,
    out: Tensor,
    tile: FewTile | None = None,
) -> None:
    """Write products of 1 to FEW_ROWS rows to `out`; arguments as of `multiply_many`."""
    rows, columns = x.shape
    features = codes.shape[0]
    tile = tile or tile_for(rows, features, triton.cdiv(columns, group))
    grid = (triton.cdiv(features, tile.features), tile.splits)
    block_columns = min(blocks.columns, columns)
    if not tile.stages:
        _one_row_kernel[grid](
            x, row_scales, codes, scales, out, features,
            COLUMNS=columns, BLOCK_ROWS=blocks.rows, BLOCK_COLUMNS=block_columns, GROUP=group,
            FEATURES=tile.features, TILE_COLUMNS=min(triton.next_power_of_2(columns), PROGRAM_COLUMNS),
            LANE=LANE_COLUMNS, num_warps=tile.warps,
        )  # fmt: skip
        return
    found = parts_of(out, tile.splits)
    _few_rows_kernel[grid](
        x, row_scales, codes, scales, found, rows, features,
        COLUMNS=columns, BLOCK_ROWS=blocks.rows, BLOCK_COLUMNS=block_columns, GROUP=group,
        ROWS=max(triton.next_power_of_2(rows), LEAST_ROWS), FEATURES=tile.features, SPLITS=tile.splits,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.splits > 1:
        add_parts(found, out)


def parts_of(out: Tensor, splits: int) -> Tensor:
    """Where programs that share the columns out `splits` ways leave what they find: float32 [splits, rows, features].

    It is `out` itself where none do.
    """
    if splits == 1:
        return out
    return torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)


def add_parts(parts: Tensor, out: Tensor) -> None:
    """Add up what programs found that shared the columns out, in order. parts: float32 [splits, rows, features]."""
    _sum_kernel[(triton.cdiv(out.numel(), SUM_TILE),)](
        parts,
        out,
        out.numel(),
        SPLITS=len(parts),
        TILE=SUM_TILE,
        num_warps=4,
        **order_on(out.device.type),
    )
