# pyright: reportArgumentType=false, reportCallIssue=false
"""Which request has a row of a step, and where do its paged rows lie? For kernels whose programs own rows."""

from __future__ import annotations

import triton
import triton.language as tl

SEARCH: tl.constexpr = tl.constexpr(128)
"""Requests looked at together while a program finds its own."""
BY_TOKEN = ("slots_ptr", "positions_ptr")
"""Arguments of `slot_of_token`, whose alignment makes no kernel of their own."""


@triton.jit
def request_of_row(row, starts_ptr, requests, q_width):
    """The request of a token row, int32; see `requests_of_rows`. starts_ptr: int32 [requests + 1]."""
    request = row // tl.maximum(q_width, 1)
    if q_width == 0:
        request = row * 0
        for first in range(0, requests, SEARCH):
            at = first + tl.arange(0, SEARCH)
            ends = tl.load(starts_ptr + 1 + at, mask=at < requests, other=0x7FFFFFFF)
            request += tl.sum((ends <= row).to(tl.int32), axis=0)
    return request


@triton.jit
def offsets_of(table_row_ptr, numbers, there, stride_block, stride_row, BLOCK_ROWS: tl.constexpr):
    """Where rows of a paged cache begin, in numbers from its own beginning: int64 in the shape of `numbers`.

    table_row_ptr: the request's blocks, int32. numbers: int32, of rows in the request; `there`: which of them exist.
    """
    blocks = tl.load(table_row_ptr + numbers // BLOCK_ROWS, mask=there, other=0)
    # A cache of a long context has more numbers than 32 bits count.
    inside = (numbers % BLOCK_ROWS).to(tl.int64)
    return blocks.to(tl.int64) * stride_block + inside * stride_row


@triton.jit
def place_of_slot(slot, stride_block, stride_row, BLOCK_ROWS: tl.constexpr):
    """Where the row at a slot of a paged cache begins, in numbers from the cache's own beginning."""
    return (slot // BLOCK_ROWS) * stride_block + (slot % BLOCK_ROWS) * stride_row


@triton.jit
def slot_of_token(slots_ptr, positions_ptr, token, ratio):
    """Where the group that a token ends lies, int64; -1 where it ends none, or is cached nowhere. See `write_rows`."""
    slot = tl.load(slots_ptr + token)
    ends = (tl.load(positions_ptr + token) + 1) % ratio == 0
    return tl.where(ends & (slot >= 0), slot // ratio, -1)
