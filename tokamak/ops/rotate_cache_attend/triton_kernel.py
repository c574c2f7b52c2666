# pyright: reportArgumentType=false, reportCallIssue=false
"""Decode rows in Triton, from projected rows to attention: the splits of paged decode, which rotate for themselves.

A program rotates the queries it needs. A request's last split also rotates the newest keys, writes them and the
newest values to the cache, and begins its softmax with them; cached rows of earlier steps are all that the
tiles of keys hold, so nothing is read that this kernel writes.

FETCH is how a chip asks its second cache for blocks of keys and values before a program waits for the kernel
before it. START and READY: as in paged decode.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokamak.ops.paged_attention.triton_softmax import (
    LOG2E,
    NEVER,
    attend_tile,
    begin_softmax,
    leave_rows,
)
from tokamak.ops.rope.triton_stored import stored

VARYING = ("window", "table_blocks", "asked_blocks")
"""Arguments whose numbers make no kernel of their own; of the next, whose alignment makes none."""
SLICED = ("table_ptr", "lengths_ptr", "positions_ptr", "slots_ptr", "arrived_ptr")


@triton.jit
def fetch_nothing(place_ptr, size) -> None:
    """Keys and values come when they are loaded."""


@triton.jit
def _turned(
    heads_ptr,
    here,
    norm_ptr,
    angles_ptr,
    eps,
    NORMS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Norm and rotate heads: [heads, WIDE_DIM].

    heads_ptr, angles_ptr, here: [heads, 1], where each head and its cosines begin, and which heads there are.
    """
    kind: tl.constexpr = heads_ptr.dtype.element_ty
    cols = tl.arange(0, WIDE_DIM)[None, :]
    is_first = cols < HALF
    angle = tl.where(is_first, cols, cols - HALF)
    partner = tl.where(is_first, cols + HALF, cols - HALF)
    inside, turns = here & (cols < DIM), here & (cols < 2 * HALF)
    x = tl.load(heads_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(heads_ptr + partner, mask=turns, other=0.0).to(tl.float32)
    cos = tl.load(angles_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(angles_ptr + HALF + angle, mask=turns, other=0.0)
    if NORMS:
        weight = tl.load(norm_ptr + cols, mask=cols < DIM, other=0.0).to(tl.float32)
        other_weight = tl.load(norm_ptr + partner, mask=cols < 2 * HALF, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x = ((x * factor).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
        other = ((other * factor).to(kind).to(tl.float32) * other_weight).to(kind).to(tl.float32)
    return (x * cos + other * tl.where(is_first, -sin, sin)).to(kind)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLICED)
def _rotate_cache_attend_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    table_ptr,
    lengths_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    eps,
    scale,
    window,
    kv_heads,
    table_blocks,
    asked_blocks,
    stride_qkv_token,
    stride_cos_sin_position,
    stride_k_block,
    stride_k_head,
    stride_k_row,
    stride_v_block,
    stride_v_head,
    stride_v_row,
    stride_table_request,
    stride_out_token,
    stride_out_head,
    NORMS_Q: tl.constexpr,
    NORMS_K: tl.constexpr,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE_SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
    MERGE_HERE: tl.constexpr,
    AHEAD: tl.constexpr,
    ASKS: tl.constexpr,
    LANES: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
    FETCH: tl.constexpr,
):
    START()
    Q_ROWS: tl.constexpr = GROUPS * Q_WIDTH
    pair, split = tl.program_id(0), tl.program_id(1)
    request, head = pair // kv_heads, pair % kv_heads
    in_tile = tl.arange(0, TILE)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, WIDE_DIM)
    inside = cols < DIM
    table = table_ptr + request.to(tl.int64) * stride_table_request
    tile = split
    # Asked for before the length is here, so that the two are waited for at once.
    entries = (tile * TILE + in_tile) // BLOCK_TOKENS
    blocks = tl.load(table + entries, mask=entries < table_blocks, other=0)
    if ASKS:
        # A lane asks for one block: those of the program's first tile, then of its next.
        BLOCKS: tl.constexpr = TILE // BLOCK_TOKENS
        lane = tl.arange(0, LANES)
        to_ask = (tile + lane // BLOCKS * SPLITS) * BLOCKS + lane % BLOCKS
        asked = tl.load(
            table + to_ask, mask=(lane < asked_blocks) & (to_ask < table_blocks), other=0
        )
    cached = tl.load(lengths_ptr + request) - Q_WIDTH
    tokens = request.to(tl.int64) * Q_WIDTH
    real = rows < Q_ROWS
    position = tl.load(positions_ptr + tokens + rows // GROUPS, mask=real, other=0)
    tiles = tl.cdiv(cached, TILE)
    first = 0
    if WINDOWED:
        first = tl.maximum(cached + 1 - window, 0) // TILE
    used = tl.minimum(tl.maximum(tiles - first, 1), SPLITS)
    if split >= used:
        # The kernel after this one may rely on what this one waited for.
        READY()
        return
    if WINDOWED:
        tile = first + split
        entries = (tile * TILE + in_tile) // BLOCK_TOKENS
        blocks = tl.load(table + entries, mask=entries < table_blocks, other=0)
    head64 = head.to(tl.int64)
    newest = tl.zeros((ROWS,), tl.int32) + (cached - 1)
    oldest = cached + rows // GROUPS - window + 1
    k_base = k_ptr + head64 * stride_k_head
    v_base = v_ptr + head64 * stride_v_head
    if ASKS:
        SIZE: tl.constexpr = BLOCK_TOKENS * DIM * (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
        if WINDOWED:
            to_ask = (tile + lane // BLOCKS * SPLITS) * BLOCKS + lane % BLOCKS
            asked = tl.load(
                table + to_ask, mask=(lane < asked_blocks) & (to_ask < table_blocks), other=0
            )
        size = tl.where((lane < asked_blocks) & (to_ask * BLOCK_TOKENS < cached), SIZE, 0)
        FETCH(k_base + asked.to(tl.int64) * stride_k_block, size)
        FETCH(v_base + asked.to(tl.int64) * stride_v_block, size)
    row_in_block = in_tile % BLOCK_TOKENS
    at = tile * TILE + in_tile
    if AHEAD:
        there = (at < cached)[:, None] & inside[None, :]
        row_at = (at % BLOCK_TOKENS) if TILE % BLOCK_TOKENS else row_in_block
        place = blocks.to(tl.int64)[:, None]
        k = tl.load(
            k_base + place * stride_k_block + row_at[:, None] * stride_k_row + cols[None, :],
            mask=there,
            other=0.0,
        )
        v = tl.load(
            v_base + place * stride_v_block + row_at[:, None] * stride_v_row + cols[None, :],
            mask=there,
            other=0.0,
        )
        at_next = at + SPLITS * TILE
        blocks = tl.load(table + at_next // BLOCK_TOKENS, mask=at_next < cached, other=0)
    READY()
    q = _turned(
        qkv_ptr
        + (tokens + rows // GROUPS)[:, None] * stride_qkv_token
        + (head64 * GROUPS + rows % GROUPS)[:, None] * DIM,
        real[:, None], q_norm_ptr, cos_sin_ptr + position.to(tl.int64)[:, None] * stride_cos_sin_position,
        eps, NORMS_Q, DIM, WIDE_DIM, HALF,
    )  # fmt: skip
    most, total = begin_softmax(sinks_ptr, head64 * GROUPS + rows % GROUPS, split == 0, ROWS)
    mixed = tl.zeros((ROWS, WIDE_DIM), tl.float32)
    if split == used - 1:
        one = tl.arange(0, 1)[:, None]
        for new in range(Q_WIDTH):
            token = tokens + new
            new_position = tl.load(positions_ptr + token).to(tl.int64)
            slot = tl.load(slots_ptr + token)
            k_at = qkv_ptr + token * stride_qkv_token + (kv_heads * GROUPS + head64) * DIM
            v_new = tl.load(
                k_at + kv_heads * DIM + one + cols[None, :], mask=inside[None, :], other=0.0
            )
            k_new = _turned(
                k_at + one, one == 0, k_norm_ptr, cos_sin_ptr + new_position * stride_cos_sin_position + one,
                eps, NORMS_K, DIM, WIDE_DIM, HALF,
            )  # fmt: skip
            # As they will be read: steps after this one see the rounded rows.
            k_new = stored(k_new, k_ptr.dtype.element_ty)
            v_new = stored(v_new, v_ptr.dtype.element_ty)
            if slot >= 0:
                block, row = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
                k_to = k_base + block * stride_k_block + row * stride_k_row
                v_to = v_base + block * stride_v_block + row * stride_v_row
                tl.store(k_to + one + cols[None, :], k_new, mask=inside[None, :])
                tl.store(v_to + one + cols[None, :], v_new, mask=inside[None, :])
            scores = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * (scale * LOG2E)
            seen = rows // GROUPS >= new
            if WINDOWED:
                seen &= rows // GROUPS < new + window
            scores = tl.where(seen, scores, NEVER)
            larger = tl.maximum(most, scores)
            share, fade = tl.exp2(scores - larger), tl.exp2(most - larger)
            total = total * fade + share
            mixed = mixed * fade[:, None] + share[:, None] * v_new.to(tl.float32)
            most = larger
    if AHEAD:
        most, total, mixed = attend_tile(
            q, k, v, at, newest, oldest, most, total, mixed, scale * LOG2E, WINDOWED
        )
        tile += SPLITS
    for at_tile in range(tile, tiles, SPLITS):
        at = at_tile * TILE + in_tile
        there = (at < cached)[:, None] & inside[None, :]
        at_next = at + SPLITS * TILE
        row_at = (at % BLOCK_TOKENS) if TILE % BLOCK_TOKENS else row_in_block
        place = blocks.to(tl.int64)[:, None]
        k = tl.load(
            k_base + place * stride_k_block + row_at[:, None] * stride_k_row + cols[None, :],
            mask=there,
            other=0.0,
        )
        v = tl.load(
            v_base + place * stride_v_block + row_at[:, None] * stride_v_row + cols[None, :],
            mask=there,
            other=0.0,
        )
        blocks = tl.load(table + at_next // BLOCK_TOKENS, mask=at_next < cached, other=0)
        most, total, mixed = attend_tile(
            q, k, v, at, newest, oldest, most, total, mixed, scale * LOG2E, WINDOWED
        )
    out = out_ptr + tokens * stride_out_token + head64 * GROUPS * stride_out_head
    leave_rows(
        out, partial_ptr, arrived_ptr, pair, split, used, rows, most, total, mixed,
        stride_out_token, stride_out_head,
        DIM, WIDE_DIM, GROUPS, Q_ROWS, SPLITS, WIDE_SPLITS, MERGE_ROWS, MERGE_HERE,
    )  # fmt: skip
