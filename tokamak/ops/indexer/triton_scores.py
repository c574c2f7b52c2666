# pyright: reportArgumentType=false, reportCallIssue=false
"""Scores of index keys in Triton: one program per stretch of rows and tile of entries, whose keys it reads once.

Or, for few entries listed by row, one program per row and tile of its list. What a row does not see is not written.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.records import KVFormat
from tokamak.ops.records.triton_read import format_of, load_rows
from tokamak.ops.triton_order import order_on
from tokamak.ops.triton_rows import offsets_of, request_of_row

LEAST = 16
"""Of every side of a tile that matrix units multiply."""
STRETCH = 32
"""Rows of a prompt that share a reading of keys."""
VARYING = ("first_row", "end_row", "requests", "q_width", "ratio")
"""Arguments whose numbers make no kernel of their own; of the next, whose alignment makes none."""
SLICED = ("table_ptr", "positions_ptr", "starts_ptr")


@triton.jit
def _score_tile(
    k, q_ptr, weights_ptr, stride_q_head, HEADS: tl.constexpr, WIDE_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE_DIM: tl.constexpr
):  # fmt: skip
    """One row's scores of a tile of keys [tile, WIDE_DIM]: float32 [tile]."""
    heads, cols = tl.arange(0, WIDE_HEADS), tl.arange(0, WIDE_DIM)
    real = (heads < HEADS)[:, None] & (cols < DIM)[None, :]
    q = tl.load(q_ptr + heads[:, None] * stride_q_head + cols[None, :], mask=real, other=0.0)
    weights = tl.load(weights_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    products = tl.dot(k.to(q.dtype), tl.trans(q), input_precision="ieee")
    return tl.sum(tl.maximum(products, 0.0) * weights[None, :], axis=1)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLICED)
def _score_all_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    table_ptr,
    positions_ptr,
    starts_ptr,
    scores_ptr,
    first_row,
    end_row,
    requests,
    q_width,
    ratio,
    stride_q_token,
    stride_q_head,
    stride_weights_token,
    stride_key_block,
    stride_key_row,
    stride_table_request,
    stride_scores_row,
    HEADS: tl.constexpr,
    WIDE_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    first = first_row + tl.program_id(0) * ROWS
    end = tl.minimum(first + ROWS, end_row)
    first_entry = tl.program_id(1) * TILE
    entries = first_entry + tl.arange(0, TILE)
    # Added to a number of a row, it makes what follows 64 bits wide.
    wide = tl.program_id(0).to(tl.int64) * 0
    newest = request_of_row(end - 1, starts_ptr, requests, q_width)
    for request in range(request_of_row(first, starts_ptr, requests, q_width), newest + 1):
        begin, stop = request * q_width, (request + 1) * q_width
        if q_width == 0:
            begin, stop = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
        begin, stop = tl.maximum(begin, first), tl.minimum(stop, end)
        # The last of a request's rows sees what any of them does.
        last = tl.load(positions_ptr + stop - 1, mask=stop > begin, other=-1)
        visible = (last + 1) // ratio
        if first_entry < visible:
            there = entries < visible
            table = table_ptr + (wide + request) * stride_table_request
            places = offsets_of(table, entries, there, stride_key_block, stride_key_row, BLOCK_ROWS)
            k = load_rows(keys_ptr, places, there, DIM, WIDE_DIM, FORMAT)
            for row in range(begin, stop):
                token = wide + row
                scores = _score_tile(
                    k, q_ptr + token * stride_q_token, weights_ptr + token * stride_weights_token,
                    stride_q_head, HEADS, WIDE_HEADS, DIM, WIDE_DIM,
                )  # fmt: skip
                seen = entries < (tl.load(positions_ptr + row) + 1) // ratio
                out = scores_ptr + (token - first_row) * stride_scores_row
                tl.store(out + entries, scores, mask=seen)


@triton.jit(do_not_specialize=(*VARYING, "listed"), do_not_specialize_on_alignment=SLICED)
def _score_listed_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    table_ptr,
    positions_ptr,
    starts_ptr,
    within_ptr,
    scores_ptr,
    first_row,
    requests,
    q_width,
    ratio,
    listed,
    stride_q_token,
    stride_q_head,
    stride_weights_token,
    stride_key_block,
    stride_key_row,
    stride_table_request,
    stride_within_token,
    stride_scores_row,
    HEADS: tl.constexpr,
    WIDE_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = first_row + tl.program_id(0)
    token = row.to(tl.int64)
    slots = tl.program_id(1) * TILE + tl.arange(0, TILE)
    visible = (tl.load(positions_ptr + row) + 1) // ratio
    within = within_ptr + token * stride_within_token
    blocks = tl.load(within + slots // BLOCK_ENTRIES, mask=slots < listed, other=-1)
    entries = blocks * BLOCK_ENTRIES + slots % BLOCK_ENTRIES
    there = (blocks >= 0) & (entries < visible)
    if tl.max(there.to(tl.int32), axis=0) > 0:
        request = request_of_row(row, starts_ptr, requests, q_width)
        table = table_ptr + request.to(tl.int64) * stride_table_request
        places = offsets_of(
            table, tl.maximum(entries, 0), there, stride_key_block, stride_key_row, BLOCK_ROWS
        )
        k = load_rows(keys_ptr, places, there, DIM, WIDE_DIM, FORMAT)
        scores = _score_tile(
            k, q_ptr + token * stride_q_token, weights_ptr + token * stride_weights_token,
            stride_q_head, HEADS, WIDE_HEADS, DIM, WIDE_DIM,
        )  # fmt: skip
        out = scores_ptr + (token - first_row) * stride_scores_row
        tl.store(out + slots, scores, mask=there)


def layout_of(
    q: Tensor, weights: Tensor, keys: Tensor, block_table: Tensor, key_form: KVFormat | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """What every kernel of scores is told: strides of queries, weights, keys and tables; and sizes by name."""
    heads, dim = q.shape[1:]
    wide = max(triton.next_power_of_2(dim), LEAST)
    strides = (
        q.stride(0), q.stride(1), weights.stride(0), keys.stride(0), keys.stride(2), block_table.stride(0)
    )  # fmt: skip
    sizes = {
        "HEADS": heads, "WIDE_HEADS": max(triton.next_power_of_2(heads), LEAST), "DIM": dim, "WIDE_DIM": wide,
        "BLOCK_ROWS": keys.shape[2], "TILE": 128 if q.element_size() * wide <= 256 else 32,
        "FORMAT": format_of(keys, key_form, dim),
    }  # fmt: skip
    return strides, sizes


def score_band(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    ratio: int,
    within: Tensor | None,
    block_entries: int,
    band: slice,
    scores: Tensor,
    key_form: KVFormat | None = None,
) -> None:
    """Score what the rows of a band see; arguments as of the op `select_entries`.

    scores: float32 [rows of the band, columns], written where a row sees an entry; a column is an entry, or with
    `within` a place in the row's blocks.
    """
    strides, sizes = layout_of(q, weights, keys, block_table, key_form)
    tile, requests = sizes["TILE"], query_starts.shape[0] - 1
    count = band.stop - band.start
    if within is None:
        rows = min(triton.next_power_of_2(q_width), STRETCH) if q_width else STRETCH
        entries = block_table.shape[1] * keys.shape[2]
        _score_all_kernel[(triton.cdiv(count, rows), triton.cdiv(entries, tile))](
            q, weights, keys, block_table, positions, query_starts, scores,
            band.start, band.stop, requests, q_width, ratio, *strides, scores.stride(0),
            **sizes, ROWS=rows, num_warps=4, num_stages=2, **order_on(q.device.type),
        )  # fmt: skip
    else:
        listed = within.shape[1] * block_entries
        _score_listed_kernel[(count, triton.cdiv(listed, tile))](
            q, weights, keys, block_table, positions, query_starts, within, scores,
            band.start, requests, q_width, ratio, listed, *strides, within.stride(0), scores.stride(0),
            **sizes, BLOCK_ENTRIES=block_entries, num_warps=4, num_stages=1, **order_on(q.device.type),
        )  # fmt: skip
