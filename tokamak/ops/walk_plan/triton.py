# pyright: reportArgumentType=false, reportCallIssue=false
"""Walk plans in Triton: one program per band of rows, that holds all pieces at once.

It finds pieces and what they need, halves the range of widths until one is left, and writes tasks a tile at a time. Counts
are of 32 bits: a plan of P programs is right for contexts of up to 2 ** 31 / P chunks, half a billion keys at 528.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.triton_facts import fits
from tokamak.ops.walk_plan.reference import fill_walk_plan
from tokamak.ops.walk_plan.sizes import CHUNK, PIECE_ROWS, check_pieces, piece_room

LEAST = 16
"""Of every side of a tile."""
TILE = 4096
"""Pieces times requests, or times tasks, looked at together."""
WARPS = 4


@triton.jit(
    do_not_specialize=["requests", "tokens", "ratio", "keep", "band_rows", "programs"],
    do_not_specialize_on_alignment=["starts_ptr", "positions_ptr"],
)
def _fill_walk_plan_kernel(
    starts_ptr,
    positions_ptr,
    plans_ptr,
    requests,
    tokens,
    ratio,
    keep,
    band_rows,
    programs,
    PIECE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
    REQUESTS: tl.constexpr,
    TASKS: tl.constexpr,
):
    band = tl.program_id(0)
    begin_row = tl.minimum(band * band_rows, tokens)
    end_row = tl.minimum(begin_row + band_rows, tokens)
    piece = tl.arange(0, PIECES)
    first, rows = tl.zeros([PIECES], tl.int32), tl.zeros([PIECES], tl.int32)
    before = band * 0
    for at in range(0, requests, REQUESTS):
        request = at + tl.arange(0, REQUESTS)
        inside = request < requests
        begin = tl.maximum(tl.load(starts_ptr + request, mask=inside, other=0), begin_row)
        stop = tl.minimum(tl.load(starts_ptr + request + 1, mask=inside, other=0), end_row)
        each = tl.cdiv(tl.maximum(stop - begin, 0), PIECE_ROWS)
        ends = before + tl.cumsum(each, axis=0)
        place = piece[:, None] - (ends - each)[None, :]
        mine = (place >= 0) & (piece[:, None] < ends[None, :])
        row = begin[None, :] + place * PIECE_ROWS
        first += tl.sum(tl.where(mine, row, 0), axis=1)
        count = tl.minimum(stop[None, :] - row, PIECE_ROWS)
        rows += tl.sum(tl.where(mine, count, 0), axis=1)
        before += tl.sum(each, axis=0)

    need = tl.zeros([PIECES], tl.int32)
    for place in tl.static_range(PIECE_ROWS):
        position = tl.load(positions_ptr + first + place, mask=place < rows, other=-1)
        bound = (position + 1) // ratio
        need = tl.maximum(need, tl.where(bound > keep, tl.cdiv(bound, CHUNK), 0))

    total, pieces = tl.sum(need, axis=0), tl.sum((need > 0).to(tl.int32), axis=0)
    low = tl.maximum(tl.cdiv(total, programs), 1)
    high = tl.maximum(tl.cdiv(total, programs - pieces), low)
    while low < high:
        middle = (low + high) // 2
        if tl.sum(tl.cdiv(need, middle), axis=0) <= programs:
            high = middle
        else:
            low = middle + 1

    parts = tl.cdiv(need, high)
    ends = tl.cumsum(parts, axis=0)
    for at in range(0, programs, TASKS):
        task = at + tl.arange(0, TASKS)
        # Of at most one piece; what behind the last task is summed is zero.
        part = task[:, None] - (ends - parts)[None, :]
        mine = (part >= 0) & (task[:, None] < ends[None, :])
        part = tl.sum(tl.where(mine, part, 0), axis=1)
        needed = tl.sum(tl.where(mine, need[None, :], 0), axis=1)
        count = tl.maximum(tl.sum(tl.where(mine, parts[None, :], 0), axis=1), 1)
        task_ptr = plans_ptr + (band * programs + task) * 4
        inside = task < programs
        tl.store(task_ptr, tl.sum(tl.where(mine, first[None, :], 0), axis=1), mask=inside)
        tl.store(task_ptr + 1, tl.sum(tl.where(mine, rows[None, :], 0), axis=1), mask=inside)
        tl.store(task_ptr + 2, part * needed // count, mask=inside)
        tl.store(task_ptr + 3, (part + 1) * needed // count, mask=inside)


@fill_walk_plan.backend("triton", fits=fits)
def triton_fill_walk_plan(
    query_starts: Tensor,
    positions: Tensor,
    q_width: int,
    ratio: int,
    keep: int,
    band_rows: int,
    plans: Tensor,
) -> None:
    """Deal the index keys of a step's rows to programs, for all bands of rows in one launch."""
    requests, tokens = query_starts.shape[0] - 1, positions.shape[0]
    room = piece_room(requests, tokens, q_width)
    check_pieces(room, plans.shape[1])
    assert plans.is_contiguous(), f"plans lie in steps of {plans.stride()}"
    pieces = max(triton.next_power_of_2(room), LEAST)
    together = max(TILE // pieces, LEAST)
    _fill_walk_plan_kernel[(plans.shape[0],)](
        query_starts, positions, plans, requests, tokens, ratio, keep, band_rows, plans.shape[1],
        PIECE_ROWS=PIECE_ROWS, CHUNK=CHUNK, PIECES=pieces, REQUESTS=min(together, 64), TASKS=together,
        num_warps=WARPS,
    )  # fmt: skip
