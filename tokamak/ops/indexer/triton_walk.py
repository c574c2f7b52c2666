# pyright: reportArgumentType=false, reportCallIssue=false
"""Scores of index keys in Triton by a walk plan: a fixed number of programs, each of which walks its slice of keys.

However long the longest context may be, so many programs are launched, and they end together (`ops/walk_plan`). A program
reads a tile of keys once for all rows of its piece.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.indexer.triton_scores import SLICED, VARYING, _score_tile, layout_of
from tokamak.ops.records import KVFormat
from tokamak.ops.records.triton_read import load_rows
from tokamak.ops.triton_order import order_on
from tokamak.ops.triton_rows import offsets_of, request_of_row
from tokamak.ops.walk_plan.sizes import CHUNK


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=(*SLICED, "plan_ptr"))
def _score_walk_kernel(
    plan_ptr,
    q_ptr,
    weights_ptr,
    keys_ptr,
    table_ptr,
    positions_ptr,
    starts_ptr,
    scores_ptr,
    first_row,
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
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    task_ptr = plan_ptr + tl.program_id(0) * 4
    begin, rows = tl.load(task_ptr), tl.load(task_ptr + 1)
    if rows > 0:
        # Added to a number of a row, it makes what follows 64 bits wide.
        wide = begin.to(tl.int64) * 0
        request = request_of_row(begin, starts_ptr, requests, q_width)
        table = table_ptr + (wide + request) * stride_table_request
        # The last of a request's rows sees what any of them does.
        visible = (tl.load(positions_ptr + begin + rows - 1) + 1) // ratio
        end_entry = tl.minimum(tl.load(task_ptr + 3) * CHUNK, visible)
        for first_entry in range(tl.load(task_ptr + 2) * CHUNK, end_entry, TILE):
            entries = first_entry + tl.arange(0, TILE)
            there = entries < end_entry
            places = offsets_of(table, entries, there, stride_key_block, stride_key_row, BLOCK_ROWS)
            k = load_rows(keys_ptr, places, there, DIM, WIDE_DIM, FORMAT)
            for row in range(begin, begin + rows):
                token = wide + row
                scores = _score_tile(
                    k, q_ptr + token * stride_q_token, weights_ptr + token * stride_weights_token,
                    stride_q_head, HEADS, WIDE_HEADS, DIM, WIDE_DIM,
                )  # fmt: skip
                seen = there & (entries < (tl.load(positions_ptr + row) + 1) // ratio)
                out = scores_ptr + (token - first_row) * stride_scores_row
                tl.store(out + entries, scores, mask=seen)


def score_walk(
    plan: Tensor,
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    ratio: int,
    band: slice,
    scores: Tensor,
    key_form: KVFormat | None = None,
) -> None:
    """Score what the rows of a band's plan see; other arguments as of the op `select_entries`.

    plan: int32 [programs, 4]. scores: float32 [rows of the band, entries], written where a row sees an entry and its
    piece has tasks.
    """
    strides, sizes = layout_of(q, weights, keys, block_table, key_form)
    _score_walk_kernel[(plan.shape[0],)](
        plan, q, weights, keys, block_table, positions, query_starts, scores,
        band.start, query_starts.shape[0] - 1, q_width, ratio, *strides, scores.stride(0),
        **sizes, CHUNK=CHUNK, num_warps=4, num_stages=2, **order_on(q.device.type),
    )  # fmt: skip
