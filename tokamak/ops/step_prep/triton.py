# pyright: reportArgumentType=false, reportCallIssue=false
"""The fills in Triton: a program per request row, group and share of columns and tokens, and one for the rest.

The rest is padding token rows, and grants of requests that are not in the step. Derived tables take one launch
each, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.step_prep.derived import fill_indptrs, fill_unit_tiles
from tokamak.ops.step_prep.reference import fill_step
from tokamak.ops.triton_facts import fits
from tokamak.ops.triton_launch import Relaunch

TILE = 256
WARPS = 4
TOKENS_PER_SHARE = 1024
MAX_SHARES = 16
SUM_TILE = 1024


@triton.jit(
    do_not_specialize=[
        "granted", "scheduled_requests", "scheduled_tokens", "running_tokens", "columns",
        "stride_grants_row", "stride_write_slots_group", "stride_block_tables_group",
    ],
    do_not_specialize_on_alignment=[
        "slots_ptr", "computed_before_ptr", "query_starts_ptr", "grants_ptr",
    ],
)  # fmt: skip
def _fill_step_kernel(
    slots_ptr,
    computed_before_ptr,
    query_starts_ptr,
    grants_ptr,
    history_ptr,
    tables_ptr,
    token_ids_ptr,
    positions_ptr,
    write_slots_ptr,
    block_tables_ptr,
    granted,
    scheduled_requests,
    scheduled_tokens,
    running_tokens,
    columns,
    stride_grants_row,
    stride_write_slots_group,
    stride_block_tables_group,
    stride_history_slot,
    stride_tables_group,
    stride_tables_slot,
    stride_block_tables_request,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    group = tl.program_id(1)
    share, shares = tl.program_id(2), tl.num_programs(2)
    last = tl.num_programs(0) - 1
    real = request < scheduled_requests
    lanes = tl.arange(0, TILE)
    slot = tl.load(slots_ptr + request, mask=real, other=-1)
    tables_ptr += group.to(tl.int64) * stride_tables_group
    write_slots_ptr += group.to(tl.int64) * stride_write_slots_group

    if real | (request == last):
        # Every program of a slot writes the grants it will read; the last one writes all of them.
        for at in range(0, granted, TILE):
            inside = at + lanes < granted
            grant_ptr = grants_ptr + at + lanes
            mine = inside & (tl.load(grant_ptr, mask=inside, other=-1) == group)
            of = tl.load(grant_ptr + stride_grants_row, mask=mine, other=-1)
            mine = mine & ((of == slot) | (request == last))
            entry = tl.load(grant_ptr + 2 * stride_grants_row, mask=mine, other=0)
            block_id = tl.load(grant_ptr + 3 * stride_grants_row, mask=mine, other=0)
            tl.store(tables_ptr + of.to(tl.int64) * stride_tables_slot + entry, block_id, mask=mine)
        tl.debug_barrier()

    if request == last:
        for at in range(scheduled_tokens + share * TILE, running_tokens, shares * TILE):
            row = at + lanes
            padding = row < running_tokens
            tl.store(write_slots_ptr + row, tl.full((TILE,), -1, tl.int64), mask=padding)
            if group == 0:
                tl.store(token_ids_ptr + row, tl.zeros((TILE,), tl.int32), mask=padding)
                tl.store(positions_ptr + row, tl.zeros((TILE,), tl.int32), mask=padding)
    else:
        table_ptr = tables_ptr + slot.to(tl.int64) * stride_tables_slot
        block_tables_ptr += group.to(tl.int64) * stride_block_tables_group
        block_tables_ptr += request.to(tl.int64) * stride_block_tables_request
        for at in range(share * TILE, columns, shares * TILE):
            col = at + lanes
            block = tl.load(table_ptr + col, mask=real & (col < columns), other=0)
            tl.store(block_tables_ptr + col, block, mask=col < columns)
        if real:
            first = tl.load(query_starts_ptr + request)
            end = tl.load(query_starts_ptr + request + 1)
            shift = tl.load(computed_before_ptr + request) - first
            history_ptr += slot.to(tl.int64) * stride_history_slot
            for at in range(first + share * TILE, end, shares * TILE):
                row = at + lanes
                inside = row < end
                position = row + shift
                block = tl.load(table_ptr + position // BLOCK_TOKENS, mask=inside, other=0)
                write_slot = block.to(tl.int64) * BLOCK_TOKENS + position % BLOCK_TOKENS
                tl.store(write_slots_ptr + row, write_slot, mask=inside)
                if group == 0:
                    token_id = tl.load(history_ptr + position, mask=inside, other=0)
                    tl.store(token_ids_ptr + row, token_id, mask=inside)
                    tl.store(positions_ptr + row, position, mask=inside)


_fill_step = Relaunch(_fill_step_kernel)


@triton.jit(do_not_specialize=["requests", "block_tokens"])
def _fill_indptrs_kernel(lengths_ptr, indptrs_ptr, requests, block_tokens, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    before = tl.full((), 0, tl.int32)
    tl.store(indptrs_ptr, before)
    for at in range(0, requests, TILE):
        inside = at + lanes < requests
        length = tl.load(lengths_ptr + at + lanes, mask=inside, other=0)
        blocks = (length + (block_tokens - 1)) // block_tokens
        tl.store(indptrs_ptr + 1 + at + lanes, before + tl.cumsum(blocks, axis=0), mask=inside)
        before += tl.sum(blocks, axis=0)


@triton.jit(do_not_specialize=["room"], do_not_specialize_on_alignment=["query_starts_ptr"])
def _fill_unit_tiles_kernel(
    query_starts_ptr, tiles_ptr, room, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    request = tl.program_id(0)
    requests = tl.num_programs(0) - 1
    lanes = tl.arange(0, TILE)
    before = tl.full((), 0, tl.int32)
    for at in range(0, request, TILE):
        earlier = at + lanes < request
        start = tl.load(query_starts_ptr + at + lanes, mask=earlier, other=0)
        end = tl.load(query_starts_ptr + at + lanes + 1, mask=earlier, other=0)
        before += tl.sum((end - start + (WIDTH - 1)) // WIDTH, axis=0)
    if request == requests:
        for at in range(before, room, TILE):
            unused = at + lanes < room
            tile_ptr = tiles_ptr + 2 * (at + lanes)
            tl.store(tile_ptr, tl.full((TILE,), -1, tl.int32), mask=unused)
            tl.store(tile_ptr + 1, tl.full((TILE,), -1, tl.int32), mask=unused)
    else:
        first = tl.load(query_starts_ptr + request)
        count = (tl.load(query_starts_ptr + request + 1) - first + (WIDTH - 1)) // WIDTH
        for at in range(0, count, TILE):
            used = at + lanes < count
            tile_ptr = tiles_ptr + 2 * (before + at + lanes)
            tl.store(tile_ptr, tl.full((TILE,), 0, tl.int32) + request, mask=used)
            tl.store(tile_ptr + 1, first + (at + lanes) * WIDTH, mask=used)


@fill_step.backend("triton", fits=fits)
def triton_fill_step(
    slots: Tensor,
    computed_before: Tensor,
    query_starts: Tensor,
    grants: Tensor,
    history: Tensor,
    tables: Tensor,
    scheduled_requests: int,
    scheduled_tokens: int,
    block_tokens: int,
    columns: int,
    token_ids: Tensor,
    positions: Tensor,
    write_slots: Tensor,
    block_tables: Tensor,
) -> None:
    """Apply grants and fill rows in one launch."""
    running_tokens = token_ids.shape[0]
    shares = min(max(triton.cdiv(running_tokens, TOKENS_PER_SHARE), 1), MAX_SHARES)
    _fill_step(
        (slots.shape[0] + 1, tables.shape[0], shares),
        (
            slots, computed_before, query_starts, grants, history, tables,
            token_ids, positions, write_slots, block_tables,
        ),
        (
            grants.shape[1], scheduled_requests, scheduled_tokens, running_tokens, columns,
            grants.stride(0), write_slots.stride(0), block_tables.stride(0),
        ),
        (history.stride(0), tables.stride(0), tables.stride(1), block_tables.stride(1)),
        (block_tokens, TILE),
        num_warps=WARPS,
    )  # fmt: skip


@fill_indptrs.backend("triton", fits=fits)
def triton_fill_indptrs(lengths: Tensor, block_tokens: int, indptrs: Tensor) -> None:
    """Write running sums of the blocks in use in one launch of one program."""
    _fill_indptrs_kernel[(1,)](
        lengths, indptrs, lengths.shape[0], block_tokens, TILE=SUM_TILE, num_warps=WARPS
    )


@fill_unit_tiles.backend("triton", fits=fits)
def triton_fill_unit_tiles(query_starts: Tensor, width: int, tiles: Tensor) -> None:
    """Cut query rows into tiles in one launch: a program per request, and one for what is left over."""
    _fill_unit_tiles_kernel[(query_starts.shape[0],)](
        query_starts, tiles, tiles.shape[0], WIDTH=width, TILE=TILE, num_warps=WARPS
    )
