# pyright: reportArgumentType=false, reportCallIssue=false
"""Turns of neighbouring numbers in Triton: one program for some heads of a row, which also copies what stands still."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.rope.pairs import rotate_pairs
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import order_on

PROGRAM_NUMBERS = 4096
"""Of some heads; a step of few rows then has programs for many processors."""


@triton.jit
def turned_pairs(x, cos, sin, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Rows [ROWS, 2 * PAIRS] of float32, turned pair by neighbouring pair; cos, sin: [1, PAIRS]."""
    first, second = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
    both = tl.join(first * cos - second * sin, first * sin + second * cos)
    return tl.reshape(both, [ROWS, 2 * PAIRS])


@triton.jit
def turned_end(
    x,
    angles_ptr,
    TURNING: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """Rows [ROWS, WIDE_DIM] of float32 with the last TURNING of their DIM numbers turned by the angles of one position."""
    pairs = tl.arange(0, WIDE_DIM // 2) - (DIM - TURNING) // 2
    turns = (pairs >= 0) & (pairs < TURNING // 2)
    cos = tl.load(angles_ptr + pairs, mask=turns, other=1.0)[None, :]
    sin = tl.load(angles_ptr + TURNING // 2 + pairs, mask=turns, other=0.0)[None, :]
    if BACKWARDS:
        sin = -sin
    return turned_pairs(x, cos, sin, ROWS, WIDE_DIM // 2)


@triton.jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["positions_ptr"])
def _rotate_pairs_kernel(
    x_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_ptr,
    heads,
    stride_x_token,
    stride_x_head,
    STILL: tl.constexpr,
    WIDE_STILL: tl.constexpr,
    TURNING: tl.constexpr,
    WIDE_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    BACKWARDS: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = (head < heads)[:, None]
    x_ptrs = x_ptr + token * stride_x_token + head[:, None] * stride_x_head
    out_ptrs = out_ptr + (token * heads + head[:, None]) * (STILL + TURNING)
    position = tl.load(positions_ptr + token)
    angles = cos_sin_ptr + (position - position % RATIO).to(tl.int64) * TURNING
    pairs = tl.arange(0, WIDE_PAIRS)
    there = pairs < TURNING // 2
    cos = tl.load(angles + pairs, mask=there, other=0.0)[None, :]
    sin = tl.load(angles + TURNING // 2 + pairs, mask=there, other=0.0)[None, :]
    if BACKWARDS:
        sin = -sin
    cols = tl.arange(0, 2 * WIDE_PAIRS)
    mask = real & (cols < TURNING)[None, :]
    x = tl.load(x_ptrs + STILL + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = turned_pairs(x, cos, sin, HEADS, WIDE_PAIRS)
    tl.store(out_ptrs + STILL + cols[None, :], turned.to(out_ptr.dtype.element_ty), mask=mask)
    if STILL:
        cols = tl.arange(0, WIDE_STILL)
        mask = real & (cols < STILL)[None, :]
        tl.store(out_ptrs + cols[None, :], tl.load(x_ptrs + cols[None, :], mask=mask), mask=mask)


@rotate_pairs.backend("triton", fits=fits)
def triton_rotate_pairs(
    x: Tensor, positions: Tensor, cos_sin: Tensor, backwards: bool, ratio: int = 1
) -> Tensor:
    """Turn the last numbers of each head in one launch."""
    x = rows_of(x)
    tokens, heads, dim = x.shape
    out = x.new_empty((tokens, heads, dim))
    if not tokens:
        return out
    turning = cos_sin.shape[1]
    each = min(
        triton.next_power_of_2(heads), max(PROGRAM_NUMBERS // triton.next_power_of_2(dim), 1)
    )
    _rotate_pairs_kernel[(tokens, triton.cdiv(heads, each))](
        x, positions, cos_sin, out, heads, x.stride(0), x.stride(1),
        STILL=dim - turning, WIDE_STILL=triton.next_power_of_2(max(dim - turning, 1)), TURNING=turning,
        WIDE_PAIRS=triton.next_power_of_2(turning // 2), HEADS=each, RATIO=ratio, BACKWARDS=backwards,
        num_warps=4 if each * dim > 1024 else 1, **order_on(x.device.type),
    )  # fmt: skip
    return out
