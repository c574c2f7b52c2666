# pyright: reportArgumentType=false, reportCallIssue=false
"""Products of few rows in Triton: one program per tile of features, one pass over the columns, float32 sums.

A norm in front is not done first: rows are multiplied with the norm's weight, and the sum of squares that is
gathered beside the product scales the result. So weights are on their way before anything is known of a row.
Up to 8 rows run on vector arithmetic, where no lane waits for another before the end; 2 to 32 rows run on
tensor cores, where every warp takes columns of its own. The tile says which. Float32 stays on vector arithmetic.

START, AHEAD and READY are what a chip may do when a program begins, to ask for its weights, and before it
reads what kernels before it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops import triton_order
from tokamak.ops.linear.few_rows import (
    FEW_ROWS,
    few_rows_after_norm,
    few_rows_gated,
    few_rows_into,
    few_rows_linear,
)
from tokamak.ops.linear.tile import LANE_COLUMNS, WIDE_ROWS, Tile, row_class, tile_for, wide_tile

KINDS = {torch.bfloat16: FEW_ROWS, torch.float16: FEW_ROWS, torch.float32: WIDE_ROWS}
"""The most rows that kernels take, by the dtype of the weight; others take the reference."""
LEAST_ROWS = 8
"""Rows that tensor cores multiply at least."""
BYTES_AHEAD = 32 * 1024
"""Bytes of weights that a program may ask for before its rows are there: programs of a chip must not need
more than its second cache holds."""


@triton.jit
def _ask_nothing(
    tile_ptr, columns, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr
):
    """Weights are asked for when they are loaded."""


IN_ORDER: Mapping[str, object] = {**triton_order.IN_ORDER, "AHEAD": _ask_nothing}
"""How kernels are launched unless a chip knows better."""


@triton.jit
def _lane_sums(
    products, ROWS: tl.constexpr, FEATURES: tl.constexpr, LANES: tl.constexpr, LANE: tl.constexpr
):
    """Sum what one lane holds of a feature's columns: no lane waits for another inside the loop."""
    return tl.sum(tl.reshape(products, [ROWS, FEATURES, LANES, LANE]), axis=3)


@triton.jit
def _lanes_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    out_ptr,
    rows,
    features,
    stride_x_row,
    stride_out_row,
    eps,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    LANE: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    INTO: tl.constexpr,
    START: tl.constexpr,
    AHEAD: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    LANES: tl.constexpr = TILE_COLUMNS // LANE
    first = tl.program_id(0) * TILE_FEATURES
    near = tl.arange(0, TILE_FEATURES)
    row = tl.arange(0, ROWS)
    inside = first + near < features
    here = row < rows
    # Axes of every tile are rows, features and columns: one layout fits all, and nothing moves between lanes.
    cols = tl.arange(0, TILE_COLUMNS)[None, None, :]
    tile_ptr = weight_ptr + first.to(tl.int64) * COLUMNS
    tile_ptr += near[None, :, None] * COLUMNS + cols
    up_ptr = tile_ptr + tl.cast(features, tl.int64) * COLUMNS
    rows_ptr = x_ptr + row[:, None, None] * stride_x_row + cols
    total = tl.zeros([ROWS, TILE_FEATURES, LANES], tl.float32)
    up_total = tl.zeros([ROWS, TILE_FEATURES, LANES], tl.float32)
    squares = tl.zeros([ROWS, 1, LANES], tl.float32)
    for begin in tl.static_range(0, COLUMNS, TILE_COLUMNS):
        near_end = begin + cols < COLUMNS
        # Masks cost: they are left out where tiles divide the weight.
        if WHOLE:
            weight = tl.load(tile_ptr + begin)
        else:
            weight = tl.load(tile_ptr + begin, mask=inside[None, :, None] & near_end, other=0.0)
        up_weight = weight
        if GATED:
            if WHOLE:
                up_weight = tl.load(up_ptr + begin)
            else:
                mask = inside[None, :, None] & near_end
                up_weight = tl.load(up_ptr + begin, mask=mask, other=0.0)
        if begin == 0:
            READY()
        mask = here[:, None, None] & near_end
        x = tl.load(rows_ptr + begin, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            squares += _lane_sums(x * x, ROWS, 1, LANES, LANE)
            norm_weight = tl.load(norm_weight_ptr + begin + cols, mask=near_end, other=0.0)
            x = x * norm_weight.to(tl.float32)
        products = weight.to(tl.float32) * x
        total += _lane_sums(products, ROWS, TILE_FEATURES, LANES, LANE)
        if GATED:
            products = up_weight.to(tl.float32) * x
            up_total += _lane_sums(products, ROWS, TILE_FEATURES, LANES, LANE)
    out = tl.sum(total, axis=2)
    up = tl.sum(up_total, axis=2)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=2) / COLUMNS + eps)
        out, up = out * scale, up * scale
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up
    place_ptr = out_ptr + row[:, None].to(tl.int64) * stride_out_row + (first + near)[None, :]
    mask = here[:, None] & inside[None, :]
    if INTO:
        out += tl.load(place_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(place_ptr, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _cores_kernel(
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
    COLUMNS_AHEAD: tl.constexpr,
    START: tl.constexpr,
    AHEAD: tl.constexpr,
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
    if COLUMNS_AHEAD:
        AHEAD(tile_ptr, columns, TILE_FEATURES, COLUMNS_AHEAD, WARPS)
        if GATED:
            up_start_ptr = tile_ptr + tl.cast(features, tl.int64) * columns
            AHEAD(up_start_ptr, columns, TILE_FEATURES, COLUMNS_AHEAD, WARPS)
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
    overlapped: Mapping[str, object] = IN_ORDER,
    in_registers: Callable[..., None] | None = None,
) -> None:
    """Launch the kernel for x's rows, at most FEW_ROWS, writing `out` or adding to it.

    x: [rows, columns], a row in one piece; weight: [features, columns] contiguous; out: [rows, features],
    or half as many features where the weight is gate and up. overlapped: how a tile that overlaps is launched;
    in_registers: launches tiles of that kind, where a chip has them.
    """
    rows, columns = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    if not rows:
        return
    has_registers = in_registers is not None
    if tile is None and weight.dtype == torch.float32:
        tile = wide_tile(columns)
    tile = tile or tile_for(rows, weight.shape[0], columns, gated=gated, registers=has_registers)
    whole = tile.divides(features, columns)
    if tile.registers:
        assert in_registers is not None, f"{tile} on a chip without kernels for it"
        assert whole, f"{tile} for a weight of {tuple(weight.shape)}"
        in_registers(
            x, weight, out, norm_weight=norm_weight, eps=eps, gated=gated, into=into, tile=tile
        )
        return
    launch = overlapped if tile.overlaps else IN_ORDER
    grid = (triton.cdiv(features, tile.features),)
    norm = x if norm_weight is None else norm_weight
    if not tile.stages:
        _lanes_kernel[grid](
            x, weight, norm, out, rows, features, x.stride(0), out.stride(0), eps,
            COLUMNS=columns, ROWS=row_class(rows), TILE_FEATURES=tile.features, TILE_COLUMNS=tile.columns,
            LANE=LANE_COLUMNS, WHOLE=whole, NORM=norm_weight is not None, GATED=gated, INTO=into,
            num_warps=tile.warps, **launch,
        )  # fmt: skip
        return
    _cores_kernel[grid](
        x, weight, norm, out, rows, features, columns, x.stride(0), out.stride(0), eps,
        ROWS=max(row_class(rows), LEAST_ROWS), TILE_FEATURES=tile.features, TILE_COLUMNS=tile.columns,
        WARPS=tile.warps, WHOLE=whole, NORM=norm_weight is not None, GATED=gated, INTO=into,
        COLUMNS_AHEAD=_columns_ahead(tile, columns, gated=gated) if whole else 0,
        num_warps=tile.warps, num_stages=tile.stages, **launch,
    )  # fmt: skip


def _columns_ahead(tile: Tile, columns: int, *, gated: bool) -> int:
    """Columns of every feature of a tile to ask for ahead: each lane asks for 16 bytes at least, or nothing is."""
    most = min(BYTES_AHEAD // 2 // tile.features // (2 if gated else 1), columns)
    ahead = 1 << most.bit_length() - 1
    least = LANE_COLUMNS * max(32 * tile.warps // tile.features, 1)
    return ahead if ahead >= least and 32 * tile.warps >= tile.features else 0


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take these rows: few, each in one piece."""
    return (
        x.shape[0] <= KINDS.get(weight.dtype, 0)
        and weight.dtype in (x.dtype, torch.float32)
        and x.stride(1) == 1
        and weight.is_contiguous()
    )


class FewRows:
    """The ops of few rows on these kernels, and on what a chip adds: see `multiply`."""

    def __init__(
        self,
        overlapped: Mapping[str, object] = IN_ORDER,
        in_registers: Callable[..., None] | None = None,
    ) -> None:
        self._multiply = partial(multiply, overlapped=overlapped, in_registers=in_registers)

    def linear(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Multiply rows with a matrix, accumulating in float32."""
        if not suits(x, weight):
            return few_rows_linear.reference(x, weight, out_dtype)
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
        self._multiply(x, weight, out)
        return out

    def after_norm(
        self,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Norm rows of the residual stream, then multiply with a matrix."""
        if not suits(residual, weight):
            return few_rows_after_norm.reference(residual, norm_weight, eps, weight, out_dtype)
        shape = (residual.shape[0], weight.shape[0])
        out = torch.empty(shape, dtype=out_dtype, device=residual.device)
        self._multiply(residual, weight, out, norm_weight=norm_weight, eps=eps)
        return out

    def gated(
        self, residual: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor
    ) -> Tensor:
        """Norm rows of the residual stream, multiply with gate and up, and multiply silu(gate) with up."""
        if not suits(residual, weight):
            return few_rows_gated.reference(residual, norm_weight, eps, weight)
        shape = (residual.shape[0], weight.shape[0] // 2)
        out = torch.empty(shape, dtype=residual.dtype, device=residual.device)
        self._multiply(
            residual, weight, out,
            norm_weight=norm_weight, eps=eps, gated=True,
        )  # fmt: skip
        return out

    def into(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """Multiply rows with a matrix and add the result to the residual stream in place."""
        if not suits(x, weight) or residual.stride(1) != 1:
            return few_rows_into.reference(x, weight, residual)
        self._multiply(x, weight, residual, into=True)
        return residual
