# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""How do prompt chunks attend on a GPU? One program per key head and tile of a request's queries, keys page by page.

Rows of a tile are the tokens of one request, each with the query heads of the key head. The grid has room for
every way the tokens can divide into requests; a program finds its request in `query_starts` and may find none.
Keys that all rows see come first and need no mask; those around the diagonal follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.paged_attention.triton_softmax import LOG2E, NEVER, begin_softmax

VARYING = ("window", "requests")
"""Arguments whose numbers make no kernel of their own; of the next, whose alignment makes none."""
SLICED = ("table_ptr", "lengths_ptr", "starts_ptr")
SEARCH: tl.constexpr = tl.constexpr(128)
"""Requests looked at together while a program finds its own."""


@triton.jit
def _attend_keys(
    q,
    most,
    total,
    mixed,
    k_base,
    v_base,
    table,
    positions,
    begin,
    end,
    scale,
    window,
    stride_k_block,
    stride_k_row,
    stride_v_block,
    stride_v_row,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Go on with a running softmax over the keys [begin, end); unless MASKED, `end` is a whole tile and all are seen."""
    in_tile = tl.arange(0, TILE)
    inside = tl.arange(0, WIDE_DIM) < DIM
    for first in range(begin, end, TILE):
        at = first + in_tile
        if MASKED:
            blocks = tl.load(table + at // BLOCK_TOKENS, mask=at < end, other=0)
        else:
            blocks = tl.load(table + at // BLOCK_TOKENS)
        place = blocks.to(tl.int64)[:, None]
        row = (at % BLOCK_TOKENS)[:, None]
        k_at = k_base + place * stride_k_block + row * stride_k_row
        v_at = v_base + place * stride_v_block + row * stride_v_row
        if MASKED:
            there = (at < end)[:, None] & inside[None, :]
            k = tl.load(k_at, mask=there, other=0.0)
            v = tl.load(v_at, mask=there, other=0.0)
        elif DIM != WIDE_DIM:
            k = tl.load(k_at, mask=inside[None, :], other=0.0)
            v = tl.load(v_at, mask=inside[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if MASKED:
            seen = at[None, :] <= positions[:, None]
            if WINDOWED:
                seen &= at[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, NEVER)
        # The factor is positive, so the largest before it is the largest after it.
        larger = tl.maximum(most, tl.max(scores, axis=1) * scale)
        shares = tl.exp2(scores * scale - larger[:, None])
        fade = tl.exp2(most - larger)
        total = total * fade + tl.sum(shares, axis=1)
        mixed = tl.dot(
            shares.to(q.dtype), v.to(q.dtype), mixed * fade[:, None], input_precision="ieee"
        )
        most = larger
    return most, total, mixed


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLICED)
def _paged_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    sinks_ptr,
    out_ptr,
    scale,
    window,
    requests,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_head,
    stride_k_row,
    stride_v_block,
    stride_v_head,
    stride_v_row,
    stride_table_request,
    stride_out_token,
    stride_out_head,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUPS
    head = tl.program_id(0)
    # Late tiles have the most keys; they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request = tl.full((), -1, tl.int32)
    for base in range(0, requests, SEARCH):
        every = base + tl.arange(0, SEARCH)
        starts = tl.load(starts_ptr + every, mask=every < requests, other=0)
        before = (starts // TOKENS + every <= tile) & (every < requests)
        request += tl.sum(before.to(tl.int32), axis=0)
    start = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - start
    first = (tile - start // TOKENS - request) * TOKENS
    if first >= queries:
        return
    length = tl.load(lengths_ptr + request)
    computed = length - queries
    rows, cols = tl.arange(0, ROWS), tl.arange(0, WIDE_DIM)
    inside = cols < DIM
    tokens = first + rows // GROUPS
    positions = computed + tokens
    real = ((rows < TOKENS * GROUPS) & (tokens < queries))[:, None] & inside[None, :]
    head64 = head.to(tl.int64)
    of_token = (start + tokens).to(tl.int64)[:, None]
    of_head = (head64 * GROUPS + rows % GROUPS)[:, None]
    q = tl.load(
        q_ptr + of_token * stride_q_token + of_head * stride_q_head + cols[None, :],
        mask=real,
        other=0.0,
    )
    most, total = begin_softmax(sinks_ptr, head64 * GROUPS + rows % GROUPS, True, ROWS)
    mixed = tl.zeros((ROWS, WIDE_DIM), tl.float32)
    end = computed + tl.minimum(first + TOKENS, queries)
    begin = 0
    table = table_ptr + request.to(tl.int64) * stride_table_request
    k_base = k_ptr + head64 * stride_k_head + cols[None, :]
    v_base = v_ptr + head64 * stride_v_head + cols[None, :]
    if WINDOWED:
        begin = tl.maximum(computed + first + 1 - window, 0) // TILE * TILE
    elif not ONE_LOOP:
        seen_by_all = (computed + first + 1) // TILE * TILE
        most, total, mixed = _attend_keys(
            q, most, total, mixed, k_base, v_base, table, positions, 0, seen_by_all, scale * LOG2E, window,
            stride_k_block, stride_k_row, stride_v_block, stride_v_row,
            DIM, WIDE_DIM, BLOCK_TOKENS, TILE, False, False,
        )  # fmt: skip
        begin = seen_by_all
    most, total, mixed = _attend_keys(
        q, most, total, mixed, k_base, v_base, table, positions, begin, end, scale * LOG2E, window,
        stride_k_block, stride_k_row, stride_v_block, stride_v_row,
        DIM, WIDE_DIM, BLOCK_TOKENS, TILE, True, WINDOWED,
    )  # fmt: skip
    tl.store(
        out_ptr + of_token * stride_out_token + of_head * stride_out_head + cols[None, :],
        (mixed / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=real,
    )


@dataclass(frozen=True, slots=True)
class PrefillForm:
    """How a prefill call is cut and compiled."""

    rows: int
    """Query rows (tokens times heads that share a key head) of a program."""
    tile: int
    """Keys per turn of the loop."""
    warps: int
    stages: int
    one_loop: bool = False
    """Whether keys that all rows see are masked like the others, in one loop with them."""


LONG_TOKENS = 2048
"""Tokens per request from which rows of 128 pay: most tiles lie before the diagonal."""


def choose_form(groups: int, head_dim: int, itemsize: int, tokens_each: int) -> PrefillForm:
    """The form for these heads and tokens per request; fewer rows where a row takes more bytes."""
    least = triton.next_power_of_2(groups)
    if itemsize > 2:
        return PrefillForm(max(32, least), 32, 4, 2)
    if head_dim > 128:
        return PrefillForm(max(128, least), 32, 8, 2)
    if tokens_each >= LONG_TOKENS:
        return PrefillForm(max(128, least), 128, 8, 3)
    return PrefillForm(max(64, least), 64, 4, 2)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int,
    out: Tensor,
    form: PrefillForm,
    sinks: Tensor | None = None,
) -> None:
    """Attend from ragged rows; arguments as of the op `paged_attention`."""
    _, kv_heads, block_tokens, head_dim = k_cache.shape
    requests, groups = lengths.shape[0], q.shape[1] // kv_heads
    tiles = q.shape[0] // (form.rows // groups) + requests
    _paged_prefill_kernel[(kv_heads, tiles)](
        q, k_cache, v_cache, block_table, lengths, query_starts, sinks, out, scale, window, requests,
        q.stride(0), q.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        block_table.stride(0), out.stride(0), out.stride(1),
        DIM=head_dim, WIDE_DIM=max(triton.next_power_of_2(head_dim), 16), GROUPS=groups,
        ROWS=form.rows, BLOCK_TOKENS=block_tokens, TILE=form.tile,
        WINDOWED=window > 0, ONE_LOOP=form.one_loop,
        num_warps=form.warps, num_stages=form.stages,
    )  # fmt: skip
