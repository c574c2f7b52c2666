# pyright: reportArgumentType=false, reportCallIssue=false
"""Decode rows in Triton, from projected rows to attention: the splits of paged decode, which rotate for themselves.

A program rotates the queries it needs. A request's last split also rotates the newest keys, writes them and the
newest values to the cache, and begins its softmax with them; cached rows of earlier steps are all that the
tiles of keys hold, so nothing is read that this kernel writes.

FETCH is how a chip asks its second cache for blocks of keys and values before a program waits for the kernel
before it. START and READY: as in paged decode.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.paged_attention.triton import MOST_DECODE_ROWS, TritonAttention
from tokamak.ops.paged_attention.triton_decode import (
    COUNTERS,
    IN_ORDER,
    DecodeForm,
    arrivals,
    choose_form,
    merge_splits,
    rows_to_merge,
)
from tokamak.ops.paged_attention.triton_softmax import (
    LOG2E,
    NEVER,
    attend_tile,
    begin_softmax,
    leave_rows,
)
from tokamak.ops.rope.triton import triton_rotate_and_cache
from tokamak.ops.rope.triton_stored import stored, takes
from tokamak.ops.rotate_cache_attend.reference import rotate_cache_attend
from tokamak.ops.triton_facts import fits, rows_of

BYTES_AHEAD = 24 << 20
"""Bytes that all programs together may ask for ahead: about half of a second cache."""
FETCHED_BYTES = 16
"""What is asked for ahead comes in whole pieces of it."""
VARYING = ("window", "table_blocks", "asked_blocks")
"""Arguments whose numbers make no kernel of their own; of the next, whose alignment makes none."""
SLICED = ("table_ptr", "lengths_ptr", "positions_ptr", "slots_ptr")
LANES_PER_WARP = 32
LEAST_ROWS = 1 if torch.version.hip is None else 16
"""Rows of a product that matrix units take; AMD's take no fewer."""


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


MOST_PAIRS = 600
"""Requests times key heads up to which one launch wins; with more, two lighter kernels fill the chip better:
128 requests of 8 key heads took 151 us in one launch and 132 us in two (an H200, 1,100 tokens of context)."""


class TritonDecode:
    """Decode rows on these kernels, started as a chip can: `launch` as of `paged_decode`.

    fetch: asks the second cache for some bytes at every place, 0 for none; takes pointers and int32 sizes.
    """

    def __init__(
        self,
        launch: Mapping[str, object] = IN_ORDER,
        fetch: object | None = None,
        form: DecodeForm | None = None,
    ) -> None:
        self._launch = launch
        self._fetch = fetch
        self._form = form
        self._attention = TritonAttention(launch)

    def rotate_cache_attend(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        write_slots: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        block_table: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        q_width: int,
        scale: float,
        window: int,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Rotate and cache decode rows, and attend from them."""
        if not qkv.shape[0]:
            return
        _, kv_heads, block_tokens, head_dim = k_cache.shape
        requests, groups = lengths.shape[0], out.shape[1] // kv_heads
        rows, pairs = groups * q_width, requests * kv_heads
        if rows > MOST_DECODE_ROWS or pairs > MOST_PAIRS:
            q = triton_rotate_and_cache(
                qkv, positions, cos_sin, k_cache, v_cache, write_slots, q_norm, k_norm, eps
            )
            self._attention.paged_attention(
                q, k_cache, v_cache, block_table, lengths, query_starts, q_width, scale, window, out,
                sinks,
            )  # fmt: skip
            return
        qkv = rows_of(qkv)
        strides = (
            k_cache.stride(3),
            v_cache.stride(3),
            out.stride(2),
            cos_sin.stride(1),
            block_table.stride(1),
        )
        assert strides == (1, 1, 1, 1, 1), f"heads and tables lie in steps of {strides}, not of 1"
        row_bytes = head_dim * max(k_cache.element_size(), qkv.element_size())
        form = self._form or choose_form(requests, kv_heads, row_bytes, qkv.device)
        splits, wide_dim = form.splits, max(triton.next_power_of_2(head_dim), 16)
        arrived = arrivals(qkv.device) if form.merge == "here" and pairs <= COUNTERS else None
        asked_blocks = self._asked_blocks(k_cache, v_cache, form, pairs)
        partial = out
        if splits > 1:
            room = pairs * splits * rows * (head_dim + 2)
            partial = torch.empty(room, dtype=torch.float32, device=qkv.device)
        _rotate_cache_attend_kernel[(pairs, splits)](
            qkv, positions, cos_sin, k_cache, v_cache, write_slots,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            block_table, lengths, sinks, out, partial, lengths if arrived is None else arrived,
            eps, scale, window, kv_heads, block_table.shape[1], asked_blocks,
            qkv.stride(0), cos_sin.stride(0),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
            block_table.stride(0), out.stride(0), out.stride(1),
            NORMS_Q=q_norm is not None, NORMS_K=k_norm is not None,
            DIM=head_dim, WIDE_DIM=wide_dim, HALF=cos_sin.shape[1] // 2, GROUPS=groups, Q_WIDTH=q_width,
            ROWS=max(triton.next_power_of_2(rows), LEAST_ROWS), BLOCK_TOKENS=block_tokens, TILE=form.tile,
            SPLITS=splits, WIDE_SPLITS=triton.next_power_of_2(splits),
            MERGE_ROWS=rows_to_merge(splits, rows, wide_dim), WINDOWED=window > 0,
            MERGE_HERE=arrived is not None and splits > 1, AHEAD=form.ahead,
            ASKS=asked_blocks > 0, LANES=LANES_PER_WARP * form.warps, FETCH=self._fetch or fetch_nothing,
            num_warps=form.warps, num_stages=form.stages, **self._launch,
        )  # fmt: skip
        if splits > 1 and arrived is None:
            merge_splits(
                partial, lengths, out, kv_heads, q_width, q_width, window, form, self._launch
            )

    def _asked_blocks(self, k_cache: Tensor, v_cache: Tensor, form: DecodeForm, pairs: int) -> int:
        """How many blocks a program asks for ahead; 0 where a chip cannot, or a head's rows do not lie together."""
        _, _, block_tokens, head_dim = k_cache.shape
        together = k_cache.stride(2) == v_cache.stride(2) == head_dim
        if self._fetch is None or not together or form.tile % block_tokens:
            return 0
        size = block_tokens * head_dim * k_cache.element_size()
        if size % FETCHED_BYTES:
            return 0
        room = BYTES_AHEAD // (pairs * form.splits * 2 * size)
        return min(room, LANES_PER_WARP * form.warps)


triton_rotate_cache_attend = rotate_cache_attend.backend("triton", fits=fits, takes=takes)(
    TritonDecode().rotate_cache_attend
)
