# pyright: reportArgumentType=false, reportCallIssue=false
"""How does a softmax run over tiles of cached keys, and how do the splits of a request become one?

Scores are kept in powers of 2: those of keys are scaled by it, and sinks are, when they are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NEVER: tl.constexpr = tl.constexpr(-1e30)
"""A score no key reaches; finite, so that differences of two are not NaN."""


@triton.jit
def begin_softmax(sinks_ptr, heads, is_first, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The largest score and the sum that a running softmax starts with; where `is_first`, the rows' sinks are in it.

    sinks_ptr: by query head, or None. heads: of each row.
    """
    most = tl.full((ROWS,), NEVER, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks_ptr is not None:
        sinks = tl.maximum(tl.load(sinks_ptr + heads) * LOG2E, NEVER)
        most = tl.where(is_first, sinks, most)
        total = tl.where(is_first, 1.0, total)
    return most, total


@triton.jit
def attend_tile(
    q,
    k,
    v,
    at,
    newest,
    oldest,
    most,
    total,
    mixed,
    scale,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go on with a running softmax over a tile of keys `at` some positions; rows see `newest`, and back to `oldest`."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    seen = at[None, :] <= newest[:, None]
    if WINDOWED:
        seen &= at[None, :] >= oldest[:, None]
    scores = tl.where(seen, scores, NEVER)
    larger = tl.maximum(most, tl.max(scores, axis=1))
    shares = tl.exp2(scores - larger[:, None])
    fade = tl.exp2(most - larger)
    total = total * fade + tl.sum(shares, axis=1)
    mixed = tl.dot(shares.to(q.dtype), v.to(q.dtype), mixed * fade[:, None], input_precision="ieee")
    return larger, total, mixed


@triton.jit
def merge_rows(
    partial_ptr,
    out_ptr,
    pair,
    pairs,
    used,
    row,
    stride_out_token,
    stride_out_head,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE_SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
) -> None:
    """Add up the splits of some query rows, each by its share of the softmax. `out_ptr`: of the pair's first row."""
    splits = tl.arange(0, WIDE_SPLITS)
    rows = row + tl.arange(0, MERGE_ROWS)
    cols = tl.arange(0, WIDE_DIM)
    at = (pair.to(tl.int64) * SPLITS + splits[:, None]) * Q_ROWS + rows[None, :]
    there = (splits < used)[:, None] & (rows < Q_ROWS)[None, :]
    stats_ptr = partial_ptr + pairs.to(tl.int64) * (SPLITS * Q_ROWS * DIM)
    most = tl.load(stats_ptr + at * 2, mask=there, other=NEVER, cache_modifier=".cg")
    total = tl.load(stats_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    sums = tl.load(
        partial_ptr + at[:, :, None] * DIM + cols[None, None, :],
        mask=there[:, :, None] & (cols < DIM)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    shares = tl.exp2(most - tl.max(most, axis=0)[None, :])
    mixed = tl.sum(sums * shares[:, :, None], axis=0)
    mixed = mixed / tl.sum(shares * total, axis=0)[:, None]
    tl.store(
        out_ptr
        + (rows // GROUPS)[:, None] * stride_out_token
        + (rows % GROUPS)[:, None] * stride_out_head
        + cols[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=(rows < Q_ROWS)[:, None] & (cols < DIM)[None, :],
    )


@triton.jit
def leave_rows(
    out_ptr,
    partial_ptr,
    arrived_ptr,
    pair,
    split,
    used,
    rows,
    most,
    total,
    mixed,
    stride_out_token,
    stride_out_head,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE_SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_HERE: tl.constexpr,
) -> None:
    """Write what a split's running softmax came to: to the pair's rows of `out_ptr` if no other split is used.

    Else it goes where the splits are merged from, with MERGE_HERE by the last of them to come here.
    """
    cols = tl.arange(0, WIDE_DIM)
    real = rows < Q_ROWS
    mask = real[:, None] & (cols < DIM)[None, :]
    if used == 1:
        tl.store(
            out_ptr
            + (rows // GROUPS)[:, None] * stride_out_token
            + (rows % GROUPS)[:, None] * stride_out_head
            + cols[None, :],
            (mixed / total[:, None]).to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        pairs = tl.num_programs(0)
        mine = (pair.to(tl.int64) * SPLITS + split) * Q_ROWS + rows
        stats_ptr = partial_ptr + pairs.to(tl.int64) * (SPLITS * Q_ROWS * DIM)
        tl.store(partial_ptr + mine[:, None] * DIM + cols[None, :], mixed, mask=mask)
        tl.store(stats_ptr + mine * 2, most, mask=real)
        tl.store(stats_ptr + mine * 2 + 1, total, mask=real)
        if MERGE_HERE:
            # All threads have stored; the one that counts releases what they stored, the last acquires it.
            tl.debug_barrier()
            before = tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel", scope="gpu")
            if before == used - 1:
                for row in range(0, Q_ROWS, MERGE_ROWS):
                    merge_rows(
                        partial_ptr, out_ptr, pair, pairs, used, row, stride_out_token, stride_out_head,
                        DIM, WIDE_DIM, GROUPS, Q_ROWS, SPLITS, WIDE_SPLITS, MERGE_ROWS,
                    )  # fmt: skip
                tl.store(arrived_ptr + pair, 0)
