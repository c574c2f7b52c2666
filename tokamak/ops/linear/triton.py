# pyright: reportArgumentType=false, reportCallIssue=false
"""Products of few rows in Triton: one program per tile of features, one pass over the columns, float32 sums.

A norm in front is not done first: rows are multiplied with the norm's weight, and the sum of squares that is
gathered beside the product scales the result. So weights are on their way before anything is known of a row.
One row runs on vector arithmetic; 2 to 16 rows on tensor cores, where every warp takes columns of its own.

START and READY are what a chip may do when a program begins, and before it reads what kernels before it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.linear.few_rows import (
    FEW_ROWS,
    few_rows_after_norm,
    few_rows_gated,
    few_rows_into,
    few_rows_linear,
)
from tokamak.ops.linear.tile import LANE_COLUMNS, Tile, row_class, tile_for
from tokamak.ops.triton_facts import fits

KINDS = (torch.bfloat16, torch.float16)
"""Dtypes of weights and rows; others take the reference, whose float32 products are exact."""


@triton.jit
def _nothing():
    """Kernels follow each other by themselves: the stream starts one when the one before is done."""


IN_ORDER: Mapping[str, object] = {"START": _nothing, "READY": _nothing}
"""How kernels are launched unless a chip knows better."""


@triton.jit
def _lane_sums(products, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr):
    """Sum what one lane holds of a row of a tile: no lane waits for another inside the loop."""
    return tl.sum(tl.reshape(products, [FEATURES, COLUMNS // LANE, LANE]), axis=2)


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    out_ptr,
    features,
    eps,
    COLUMNS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    LANE: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    INTO: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    first = tl.program_id(0) * TILE_FEATURES
    near = tl.arange(0, TILE_FEATURES)
    cols = tl.arange(0, TILE_COLUMNS)
    inside = first + near < features
    tile_ptr = weight_ptr + first.to(tl.int64) * COLUMNS
    tile_ptr += near[:, None] * COLUMNS + cols[None, :]
    up_ptr = tile_ptr + tl.cast(features, tl.int64) * COLUMNS
    total = tl.zeros([TILE_FEATURES, TILE_COLUMNS // LANE], tl.float32)
    up_total = tl.zeros([TILE_FEATURES, TILE_COLUMNS // LANE], tl.float32)
    squares = tl.zeros([TILE_COLUMNS], tl.float32)
    for begin in tl.static_range(0, COLUMNS, TILE_COLUMNS):
        near_end = begin + cols < COLUMNS
        # Masks cost: they are left out where tiles divide the weight.
        if WHOLE:
            weight = tl.load(tile_ptr + begin)
        else:
            mask = inside[:, None] & near_end[None, :]
            weight = tl.load(tile_ptr + begin, mask=mask, other=0.0)
        up_weight = weight
        if GATED:
            if WHOLE:
                up_weight = tl.load(up_ptr + begin)
            else:
                mask = inside[:, None] & near_end[None, :]
                up_weight = tl.load(up_ptr + begin, mask=mask, other=0.0)
        if begin == 0:
            READY()
        x = tl.load(x_ptr + begin + cols, mask=near_end, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            norm_weight = tl.load(norm_weight_ptr + begin + cols, mask=near_end, other=0.0)
            x = x * norm_weight.to(tl.float32)
        total += _lane_sums(weight.to(tl.float32) * x[None, :], TILE_FEATURES, TILE_COLUMNS, LANE)
        if GATED:
            products = up_weight.to(tl.float32) * x[None, :]
            up_total += _lane_sums(products, TILE_FEATURES, TILE_COLUMNS, LANE)
    out = tl.sum(total, axis=1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)
        out = out * scale
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * (tl.sum(up_total, axis=1) * scale)
    place_ptr = out_ptr + first + near
    if INTO:
        out += tl.load(place_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(place_ptr, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _several_rows_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    out_ptr,
    rows,
    features,
    columns,
    stride_x_row,
    stride_out_row,
    eps,
    ROWS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    INTO: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    first = tl.program_id(0) * TILE_FEATURES
    near = tl.arange(0, TILE_FEATURES)
    row = tl.arange(0, ROWS)
    # The first axis of every tile is the warp: each has columns of its own, and sums are joined at the end.
    warp_cols = tl.arange(0, WARPS)[:, None] * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    inside = first + near < features
    here = row < rows
    tile_ptr = weight_ptr + first.to(tl.int64) * columns
    tile_ptr += near[None, :, None] * columns + warp_cols[:, None, :]
    up_ptr = tile_ptr + tl.cast(features, tl.int64) * columns
    rows_ptr = x_ptr + row[None, None, :] * stride_x_row + warp_cols[:, :, None]
    norm_ptr = norm_weight_ptr + warp_cols[:, :, None]
    total = tl.zeros([WARPS, TILE_FEATURES, ROWS], tl.float32)
    up_total = tl.zeros([WARPS, TILE_FEATURES, ROWS], tl.float32)
    squares = tl.zeros([WARPS, TILE_COLUMNS, ROWS], tl.float32)
    READY()
    for begin in range(0, columns, WARPS * TILE_COLUMNS):
        near_end = begin + warp_cols < columns
        if WHOLE:
            weight = tl.load(tile_ptr + begin)
            x = tl.load(rows_ptr + begin, mask=here[None, None, :], other=0.0)
        else:
            mask = inside[None, :, None] & near_end[:, None, :]
            weight = tl.load(tile_ptr + begin, mask=mask, other=0.0)
            mask = here[None, None, :] & near_end[:, :, None]
            x = tl.load(rows_ptr + begin, mask=mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            if WHOLE:
                norm_weight = tl.load(norm_ptr + begin)
            else:
                norm_weight = tl.load(norm_ptr + begin, mask=near_end[:, :, None], other=0.0)
            x = (wide * norm_weight.to(tl.float32)).to(x.dtype)
        total = tl.dot(weight, x, total)
        if GATED:
            if WHOLE:
                up_weight = tl.load(up_ptr + begin)
            else:
                mask = inside[None, :, None] & near_end[:, None, :]
                up_weight = tl.load(up_ptr + begin, mask=mask, other=0.0)
            up_total = tl.dot(up_weight, x, up_total)
    out = tl.sum(total, axis=0)
    up = tl.sum(up_total, axis=0)
    if NORM:
        mean = tl.sum(tl.sum(squares, axis=1), axis=0) / columns
        scale = tl.rsqrt(mean + eps)[None, :]
        out, up = out * scale, up * scale
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up
    place_ptr = out_ptr + row[None, :].to(tl.int64) * stride_out_row + (first + near)[:, None]
    mask = inside[:, None] & here[None, :]
    if INTO:
        out += tl.load(place_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(place_ptr, out.to(out_ptr.dtype.element_ty), mask=mask)


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    into: bool = False,
    tile: Tile | None = None,
    launch: Mapping[str, object] = IN_ORDER,
) -> None:
    """Launch the kernel for x's rows, at most FEW_ROWS, writing `out` or adding to it.

    x: [rows, columns], a row in one piece; weight: [features, columns] contiguous; out: [rows, features],
    or half as many features where the weight is gate and up.
    """
    rows, columns = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    if not rows:
        return
    tile = tile or tile_for(rows, weight.shape[0], columns, gated=gated)
    taken = tile.columns if rows == 1 else tile.columns * tile.warps
    whole = features % tile.features == 0 and columns % taken == 0
    grid = (triton.cdiv(features, tile.features),)
    norm = x if norm_weight is None else norm_weight
    if rows == 1:
        _one_row_kernel[grid](
            x, weight, norm, out, features, eps,
            COLUMNS=columns, TILE_FEATURES=tile.features, TILE_COLUMNS=tile.columns, LANE=LANE_COLUMNS,
            WHOLE=whole, NORM=norm_weight is not None, GATED=gated, INTO=into, num_warps=tile.warps, **launch,
        )  # fmt: skip
        return
    _several_rows_kernel[grid](
        x, weight, norm, out, rows, features, columns, x.stride(0), out.stride(0), eps,
        ROWS=row_class(rows), TILE_FEATURES=tile.features, TILE_COLUMNS=tile.columns, WARPS=tile.warps,
        WHOLE=whole, NORM=norm_weight is not None, GATED=gated, INTO=into,
        num_warps=tile.warps, num_stages=tile.stages, **launch,
    )  # fmt: skip


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take these rows: few, of 16 bits, each in one piece."""
    return (
        x.shape[0] <= FEW_ROWS
        and x.dtype in KINDS
        and weight.dtype == x.dtype
        and x.stride(1) == 1
        and weight.is_contiguous()
    )


@few_rows_linear.backend("triton", fits=fits)
def triton_few_rows_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply rows with a matrix, accumulating in float32."""
    if not suits(x, weight):
        return few_rows_linear.reference(x, weight, out_dtype)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    multiply(x, weight, out)
    return out


@few_rows_after_norm.backend("triton", fits=fits)
def triton_few_rows_after_norm(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Norm rows of the residual stream, then multiply with a matrix."""
    if not suits(residual, weight):
        return few_rows_after_norm.reference(residual, norm_weight, eps, weight, out_dtype)
    shape = (residual.shape[0], weight.shape[0])
    out = torch.empty(shape, dtype=out_dtype, device=residual.device)
    multiply(residual, weight, out, norm_weight=norm_weight, eps=eps)
    return out


@few_rows_gated.backend("triton", fits=fits)
def triton_few_rows_gated(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor
) -> Tensor:
    """Norm rows of the residual stream, multiply with gate and up, and multiply silu(gate) with up."""
    if not suits(residual, weight):
        return few_rows_gated.reference(residual, norm_weight, eps, weight)
    shape = (residual.shape[0], weight.shape[0] // 2)
    out = torch.empty(shape, dtype=residual.dtype, device=residual.device)
    multiply(residual, weight, out, norm_weight=norm_weight, eps=eps, gated=True)
    return out


@few_rows_into.backend("triton", fits=fits)
def triton_few_rows_into(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Multiply rows with a matrix and add the result to the residual stream in place."""
    if not suits(x, weight) or residual.stride(1) != 1:
        return few_rows_into.reference(x, weight, residual)
    multiply(x, weight, residual, into=True)
    return residual
