# pyright: reportArgumentType=false, reportCallIssue=false
"""The compressor in Triton: one program per row and tile of columns; a group is read once, its softmax is whole."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.compress.reference import fold_groups, write_rows
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import order_on
from tokamak.ops.triton_rows import (
    BY_TOKEN,
    offsets_of,
    place_of_slot,
    request_of_row,
    slot_of_token,
)

FOLD_NUMBERS = 2048
"""Values a program of four warps folds at a time, and as many gates."""
MOST_COLUMNS = 128
WRITE_COLUMNS = 1024
VARYING = ("requests", "q_width")
"""Arguments whose numbers make no kernel of their own; of the next, whose alignment makes none."""
SLICED = ("table_ptr", "positions_ptr", "starts_ptr")


@triton.jit(do_not_specialize=("ratio",), do_not_specialize_on_alignment=BY_TOKEN)
def _write_rows_kernel(
    cache_ptr,
    rows_ptr,
    slots_ptr,
    positions_ptr,
    ratio,
    width,
    stride_cache_block,
    stride_cache_row,
    stride_rows_row,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = slot_of_token(slots_ptr, positions_ptr, row, ratio)
    inside = (cols < width) & (slot >= 0)
    slot = tl.maximum(slot, 0)
    numbers = tl.load(rows_ptr + row * stride_rows_row + cols, mask=inside)
    place = place_of_slot(slot, stride_cache_block, stride_cache_row, BLOCK_ROWS)
    tl.store(cache_ptr + place + cols, numbers.to(cache_ptr.dtype.element_ty), mask=inside)


@write_rows.backend("triton", fits=fits)
def triton_write_rows(
    cache: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, ratio: int
) -> None:
    """Write rows that end a group to a cache, in its dtype; those of negative slots nowhere."""
    rows = rows_of(rows)
    count, width = rows.shape
    assert cache.shape[1] == 1, f"a cache of {cache.shape[1]} heads"
    assert (cache.stride(3), slots.stride(0)) == (1, 1), "rows and slots lie in one piece"
    if not count:
        return
    tile = min(triton.next_power_of_2(width), WRITE_COLUMNS)
    _write_rows_kernel[(count, triton.cdiv(width, tile))](
        cache, rows, slots, positions, ratio, width, cache.stride(0), cache.stride(2), rows.stride(0),
        BLOCK_ROWS=cache.shape[2], COLUMNS=tile, num_warps=4 if tile > 512 else 2, **order_on(rows.device.type),
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLICED)
def _fold_groups_kernel(
    state_ptr,
    table_ptr,
    positions_ptr,
    starts_ptr,
    bias_ptr,
    out_ptr,
    requests,
    q_width,
    width,
    stride_state_block,
    stride_state_row,
    stride_table_request,
    stride_out_row,
    RATIO: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < width
    position = tl.load(positions_ptr + row)
    out = out_ptr + row.to(tl.int64) * stride_out_row + cols
    if (position + 1) % RATIO == 0:
        request = request_of_row(row, starts_ptr, requests, q_width)
        GROUP: tl.constexpr = 2 * RATIO if OVERLAPPED else RATIO
        rows = tl.arange(0, ROWS)
        at = position - (GROUP - 1) + rows
        there = (rows < GROUP) & (at >= 0)
        table = table_ptr + request.to(tl.int64) * stride_table_request
        places = offsets_of(
            table, tl.maximum(at, 0), there, stride_state_block, stride_state_row, BLOCK_ROWS
        )
        # The first half of a row's columns is for the group behind its own.
        first = tl.where(rows < RATIO, 0, width) if OVERLAPPED else rows * 0
        columns = 2 * width if OVERLAPPED else width
        values_at = state_ptr + places[:, None] + first[:, None] + cols[None, :]
        mask = there[:, None] & inside[None, :]
        gates = tl.load(values_at + columns, mask=mask, other=float("-inf"))
        if bias_ptr is not None:
            bias_at = bias_ptr + (rows % RATIO)[:, None] * columns + first[:, None] + cols[None, :]
            gates += tl.load(bias_at, mask=mask, other=0.0)
        values = tl.load(values_at, mask=mask, other=0.0)
        most = tl.where(inside, tl.max(gates, axis=0), 0.0)
        shares = tl.exp(gates - most[None, :])
        folded = tl.sum(shares * values, axis=0) / tl.sum(shares, axis=0)
        tl.store(out, folded.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out, tl.zeros([COLUMNS], out_ptr.dtype.element_ty), mask=inside)


@fold_groups.backend("triton", fits=fits)
def triton_fold_groups(
    state: Tensor,
    block_table: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    ratio: int,
    overlapped: bool,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Fold each group that ends with a row of this step; other rows become zero."""
    tokens, width = out.shape
    assert state.shape[1] == 1, f"a cache of {state.shape[1]} heads"
    strides = (state.stride(3), block_table.stride(1), out.stride(1))
    assert strides == (1, 1, 1), f"rows and tables lie in steps of {strides}, not of 1"
    if not tokens:
        return
    rows = triton.next_power_of_2((2 if overlapped else 1) * ratio)
    tile = min(max(FOLD_NUMBERS // rows, 16), MOST_COLUMNS, triton.next_power_of_2(width))
    _fold_groups_kernel[(tokens, triton.cdiv(width, tile))](
        state, block_table, positions, query_starts, bias, out, query_starts.shape[0] - 1, q_width, width,
        state.stride(0), state.stride(2), block_table.stride(0), out.stride(0),
        RATIO=ratio, OVERLAPPED=overlapped, BLOCK_ROWS=state.shape[2], ROWS=rows, COLUMNS=tile,
        num_warps=4 if rows * tile >= FOLD_NUMBERS else 1, **order_on(out.device.type),
    )  # fmt: skip
