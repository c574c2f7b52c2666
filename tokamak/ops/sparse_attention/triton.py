# pyright: reportArgumentType=false, reportCallIssue=false
"""Attention over listed rows in Triton: one program per query, tile of its heads and split of its keys, one softmax.

The heads are the rows of a tile, so that a key is read once for all of them, and is its own value. Tiles of window
rows and of entries go to the splits in turn; few queries are split, and a second kernel merges their splits. Neither
reads a number to the host, and no grid depends on numbers of the device, so any call can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.paged_attention.triton_decode import MERGE_NUMBERS, MOST_SPLITS, processors_of
from tokamak.ops.paged_attention.triton_softmax import (
    LOG2E,
    NEVER,
    begin_softmax,
    leave_rows,
    merge_rows,
)
from tokamak.ops.records import KVFormat
from tokamak.ops.records.triton_read import format_of, load_rows
from tokamak.ops.rope.triton_pairs import turned_end
from tokamak.ops.sparse_attention.reference import sparse_attention
from tokamak.ops.triton_facts import fits
from tokamak.ops.triton_order import order_on
from tokamak.ops.triton_rows import offsets_of, request_of_row

MOST_HEADS = 64
"""Of a tile: its sums are half of what a multiprocessor keeps in registers."""
ROW_BYTES = 1024
"""Of a key that tiles of MOST_HEADS have room for."""
LEAST_ROWS = 16
"""Of a tile that matrix units multiply."""
VARYING = ("requests", "q_width", "window_tokens", "listed")
"""Arguments whose numbers make no kernel of their own; of the next, whose alignment makes none."""
SLICED = (
    "window_table_ptr", "entry_table_ptr", "positions_ptr", "starts_ptr", "window_starts_ptr",
)  # fmt: skip


@triton.jit
def _attend_rows(
    q,
    rows_ptr,
    offsets,
    seen,
    most,
    total,
    mixed,
    scale,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Go on with a running softmax over the rows at `offsets` of a cache, those that are `seen`."""
    # What lies where nobody wrote may be no number.
    keys = load_rows(rows_ptr, offsets, seen, DIM, WIDE_DIM, FORMAT).to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, NEVER)
    larger = tl.maximum(most, tl.max(scores, axis=1))
    # A split may see nothing in all of a tile, where differences of scores are zero.
    shares = tl.where(seen[None, :], tl.exp2(scores - larger[:, None]), 0.0)
    fade = tl.exp2(most - larger)
    total = total * fade + tl.sum(shares, axis=1)
    mixed = tl.dot(shares.to(q.dtype), keys, mixed * fade[:, None], input_precision="ieee")
    return larger, total, mixed


@triton.jit
def _listed_end(chosen_ptr, listed, SCAN: tl.constexpr):
    """How far a list of entries goes: the place behind the last that is one."""
    end = listed * 0
    for first in range(0, listed, SCAN):
        at = first + tl.arange(0, SCAN)
        numbers = tl.load(chosen_ptr + at, mask=at < listed, other=-1)
        end = tl.maximum(end, tl.max(tl.where(numbers >= 0, at + 1, 0), axis=0))
    return end


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLICED)
def _sparse_attention_kernel(
    q_ptr,
    window_ptr,
    window_table_ptr,
    entries_ptr,
    entry_table_ptr,
    chosen_ptr,
    positions_ptr,
    starts_ptr,
    window_starts_ptr,
    sinks_ptr,
    cos_sin_ptr,
    out_ptr,
    partial_ptr,
    scale,
    requests,
    q_width,
    window_tokens,
    listed,
    stride_q_token,
    stride_q_head,
    stride_window_block,
    stride_window_row,
    stride_window_table,
    stride_entry_block,
    stride_entry_row,
    stride_entry_table,
    stride_chosen_token,
    stride_out_token,
    stride_out_head,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    WINDOW_BLOCK_ROWS: tl.constexpr,
    ENTRY_BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SCAN: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE_SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    WINDOW_FORMAT: tl.constexpr,
    ENTRY_FORMAT: tl.constexpr,
    TURNING: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    pair, split = tl.program_id(0), tl.program_id(1)
    row, first_head = pair // HEAD_TILES, (pair % HEAD_TILES) * HEADS
    token = row.to(tl.int64)
    request = request_of_row(row, starts_ptr, requests, q_width).to(tl.int64)
    position = tl.load(positions_ptr + row)
    in_tile = tl.arange(0, TILE)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, WIDE_DIM)
    heads = first_head + tl.minimum(rows, HEADS - 1)
    q_at = q_ptr + token * stride_q_token + heads[:, None] * stride_q_head + cols[None, :]
    q = tl.load(q_at, mask=(rows < HEADS)[:, None] & (cols < DIM)[None, :], other=0.0)
    most, total = begin_softmax(sinks_ptr, heads, split == 0, ROWS)
    mixed = tl.zeros((ROWS, WIDE_DIM), tl.float32)
    power = scale * LOG2E

    table = window_table_ptr + request * stride_window_table
    tiles = tl.cdiv(window_tokens, TILE)
    oldest = position - window_tokens + 1
    start = 0
    if window_starts_ptr is not None:
        start = tl.load(window_starts_ptr + request)
    first = tl.maximum(start - oldest, 0) // TILE
    for tile in range(first + (split + SPLITS - first % SPLITS) % SPLITS, tiles, SPLITS):
        at = oldest + tile * TILE + in_tile
        seen = (at >= start) & (at <= position)
        offsets = offsets_of(
            table, tl.maximum(at, 0), seen, stride_window_block, stride_window_row, WINDOW_BLOCK_ROWS
        )  # fmt: skip
        most, total, mixed = _attend_rows(
            q, window_ptr, offsets, seen, most, total, mixed, power, DIM, WIDE_DIM, WINDOW_FORMAT
        )
    if chosen_ptr is not None:
        table = entry_table_ptr + request * stride_entry_table
        chosen = chosen_ptr + token * stride_chosen_token
        end = _listed_end(chosen, listed, SCAN)
        for tile in range((split + SPLITS - tiles % SPLITS) % SPLITS, tl.cdiv(end, TILE), SPLITS):
            at = tile * TILE + in_tile
            numbers = tl.load(chosen + at, mask=at < end, other=-1)
            seen = numbers >= 0
            offsets = offsets_of(
                table, tl.maximum(numbers, 0), seen, stride_entry_block, stride_entry_row, ENTRY_BLOCK_ROWS
            )  # fmt: skip
            most, total, mixed = _attend_rows(
                q,
                entries_ptr,
                offsets,
                seen,
                most,
                total,
                mixed,
                power,
                DIM,
                WIDE_DIM,
                ENTRY_FORMAT,
            )
    if cos_sin_ptr is not None:
        # Turning a split's sum turns its share of the result.
        angles = cos_sin_ptr + position.to(tl.int64) * TURNING
        mixed = turned_end(mixed, angles, TURNING, ROWS, DIM, WIDE_DIM, True)
    out = out_ptr + token * stride_out_token + first_head * stride_out_head
    leave_rows(
        out, partial_ptr, None, pair, split, SPLITS, rows, most, total, mixed,
        stride_out_token, stride_out_head,
        DIM, WIDE_DIM, HEADS, HEADS, SPLITS, WIDE_SPLITS, MERGE_ROWS, False,
    )  # fmt: skip


@triton.jit
def _merge_attended_kernel(
    partial_ptr,
    out_ptr,
    stride_out_token,
    stride_out_head,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE_SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    pair = tl.program_id(0)
    token, first_head = (pair // HEAD_TILES).to(tl.int64), (pair % HEAD_TILES) * HEADS
    merge_rows(
        partial_ptr, out_ptr + token * stride_out_token + first_head * stride_out_head, pair,
        tl.num_programs(0), SPLITS, tl.program_id(1) * MERGE_ROWS, stride_out_token, stride_out_head,
        DIM, WIDE_DIM, HEADS, HEADS, SPLITS, WIDE_SPLITS, MERGE_ROWS,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SparseForm:
    """How a call is cut and compiled."""

    heads: int
    """Heads of a tile, a divisor of all."""
    tile: int
    """Keys per turn of the loop."""
    splits: int
    """Programs per query and tile of heads."""
    warps: int
    stages: int


def choose_form(
    tokens: int,
    heads: int,
    keys: int,
    row_bytes: int,
    device: torch.device,
    *,
    packed: bool = False,
) -> SparseForm:
    """The form for a call of these sizes; `keys`: a query's at most; `row_bytes`: of one as products take it.

    A program of 64 heads fills a multiprocessor, so queries are split until each has one. Sizes do not depend on how
    long requests are: a recorded call and an eager one add in the same order.
    AMD's compute units have 64 KiB for tiles that several threads read, Nvidia's more than three times that. Rows
    of float32 are multiplied without matrix units on Nvidia's, so few at a time. Records (`packed`) take registers
    while they become numbers, so there are fewer heads and rows beside them.
    """
    is_amd = torch.version.hip is not None
    most = MOST_HEADS // 2 if is_amd or packed else MOST_HEADS
    room = 65536 >> is_amd + packed
    if row_bytes > ROW_BYTES:
        most, room = LEAST_ROWS, 32768
    in_tile = next(each for each in range(min(heads, most), 0, -1) if heads % each == 0)
    tile = min(max(room // max(row_bytes, 1), 16), 64)
    pairs = max(tokens * (heads // in_tile), 1)
    spare = min(processors_of(device) // pairs, -(-keys // tile), MOST_SPLITS)
    splits = 1 << max(spare.bit_length() - 1, 0)
    few_heads = 16 if packed and not is_amd else 32
    return SparseForm(in_tile, tile, splits, 8 if in_tile > few_heads else 4, 1 if is_amd else 2)


def attend_sparsely(
    q: Tensor,
    window_rows: Tensor,
    window_table: Tensor,
    entries: Tensor | None,
    entry_table: Tensor | None,
    chosen: Tensor | None,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    window_tokens: int,
    window_starts: Tensor | None,
    scale: float,
    sink: Tensor,
    out: Tensor,
    form: SparseForm,
    window_form: KVFormat | None = None,
    entry_form: KVFormat | None = None,
    cos_sin: Tensor | None = None,
) -> None:
    """Attend in a form; arguments as of the op `sparse_attention`, at least one query."""
    tokens, all_heads, dim = q.shape
    if chosen is None or not chosen.shape[1]:
        # Never read: the kernel has no loop over entries.
        chosen, entries, entry_table, listed = None, window_rows, window_table, 0
        entry_form = window_form
    else:
        assert entries is not None, "entries are chosen, and there are none"
        assert entry_table is not None, "entries are chosen, and no table says where they lie"
        listed = chosen.shape[1]
        assert chosen.stride(1) == 1, "lists lie in one piece"
    caches = (q.stride(2), window_rows.stride(3), entries.stride(3), out.stride(2))
    assert caches == (1, 1, 1, 1), f"heads and rows lie in steps of {caches}, not of 1"
    assert window_rows.shape[1] == entries.shape[1] == 1, "caches of one head"
    assert cos_sin is None or (cos_sin.is_contiguous() and dim % 2 == 0), (
        "angles in one piece, heads of pairs"
    )
    wide, head_tiles = max(triton.next_power_of_2(dim), LEAST_ROWS), all_heads // form.heads
    pairs, splits = tokens * head_tiles, form.splits
    merge = min(max(MERGE_NUMBERS // (splits * wide), 1), triton.next_power_of_2(form.heads))
    partial = torch.empty(
        pairs * splits * form.heads * (dim + 2) if splits > 1 else 0,
        dtype=torch.float32,
        device=q.device,
    )
    shared = {
        "DIM": dim, "WIDE_DIM": wide, "HEADS": form.heads, "HEAD_TILES": head_tiles, "SPLITS": splits,
        "WIDE_SPLITS": splits, "MERGE_ROWS": merge,
    }  # fmt: skip
    _sparse_attention_kernel[(pairs, splits)](
        q, window_rows, window_table, entries, entry_table, chosen, positions, query_starts, window_starts, sink,
        cos_sin, out, partial, scale, query_starts.shape[0] - 1, q_width, window_tokens, listed,
        q.stride(0), q.stride(1), window_rows.stride(0), window_rows.stride(2), window_table.stride(0),
        entries.stride(0), entries.stride(2), entry_table.stride(0), 0 if chosen is None else chosen.stride(0),
        out.stride(0), out.stride(1),
        ROWS=max(triton.next_power_of_2(form.heads), LEAST_ROWS),
        WINDOW_BLOCK_ROWS=window_rows.shape[2], ENTRY_BLOCK_ROWS=entries.shape[2], TILE=form.tile,
        SCAN=min(triton.next_power_of_2(max(listed, 1)), 1024), WINDOW_FORMAT=format_of(window_rows, window_form, dim),
        ENTRY_FORMAT=format_of(entries, entry_form, dim), TURNING=0 if cos_sin is None else cos_sin.shape[1], **shared,
        num_warps=form.warps, num_stages=form.stages, **order_on(q.device.type),
    )  # fmt: skip
    if splits > 1:
        _merge_attended_kernel[(pairs, triton.cdiv(form.heads, merge))](
            partial, out, out.stride(0), out.stride(1), **shared, num_warps=4, **order_on(q.device.type),
        )  # fmt: skip


@sparse_attention.backend("triton", fits=fits)
def triton_sparse_attention(
    q: Tensor,
    window_rows: Tensor,
    window_table: Tensor,
    entries: Tensor | None,
    entry_table: Tensor | None,
    chosen: Tensor | None,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    window_tokens: int,
    window_starts: Tensor | None,
    scale: float,
    sink: Tensor,
    out: Tensor,
    window_form: KVFormat | None = None,
    entry_form: KVFormat | None = None,
    cos_sin: Tensor | None = None,
) -> None:
    """Attend from this step's queries to the newest rows of their request and to listed entries."""
    tokens, heads, dim = q.shape
    if not tokens:
        return
    keys = window_tokens + (0 if chosen is None else chosen.shape[1])
    row_bytes = dim * max(q.element_size(), window_rows.element_size())
    packed = window_form is not None or entry_form is not None
    form = choose_form(tokens, heads, keys, row_bytes, q.device, packed=packed)
    attend_sparsely(
        q, window_rows, window_table, entries, entry_table, chosen, positions, query_starts, q_width,
        window_tokens, window_starts, scale, sink, out, form, window_form, entry_form, cos_sin,
    )  # fmt: skip
