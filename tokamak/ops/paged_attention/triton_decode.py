# pyright: reportArgumentType=false, reportCallIssue=false
"""How do rows of one width attend on a GPU? One program per request, key head and split of its cached tokens.

The query heads of a key head and the queries of a request are the rows of one tile, so a cached row is read once.
Tiles of keys go to the splits in turn, each split keeps a running softmax, and whoever is last of a request's
splits merges them (`merge="here"`), or a second kernel does. The grid depends on sizes alone; how many splits
have work, the device decides from the lengths.

START and READY are what a chip may do when a program begins, and before it reads what the kernel before it wrote:
queries, and the newest keys and values. Lengths, tables and older rows were written before that kernel began, so
with `ahead` a program asks for its first tile of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.errors import LateBuffer
from tokamak.ops.paged_attention.triton_softmax import (
    LOG2E,
    attend_tile,
    begin_softmax,
    leave_rows,
    merge_rows,
)

MERGE_NUMBERS = 8192
"""Partial sums a merging program holds at a time."""
COUNTERS = 1 << 14
"""Requests times key heads whose splits are counted at a time; a larger call merges afterwards."""
STREAMS = 64
PROGRAMS_PER_PROCESSOR = 4
"""Programs per multiprocessor that a step of few requests is split into, at most."""
MOST_SPLITS = 32
VARYING = ("window", "table_blocks")
"""Arguments whose numbers make no kernel of their own; of the next, whose alignment makes none."""
SLICED = ("table_ptr", "lengths_ptr")


@triton.jit
def _nothing():
    """Kernels follow each other by themselves: the stream starts one when the one before is done."""


IN_ORDER: Mapping[str, object] = {"START": _nothing, "READY": _nothing}
"""How kernels are launched unless a chip knows better."""


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLICED)
def _paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    scale,
    window,
    kv_heads,
    table_blocks,
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
    START: tl.constexpr,
    READY: tl.constexpr,
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
    length = tl.load(lengths_ptr + request)
    tiles = tl.cdiv(length, TILE)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - Q_WIDTH + 1 - window, 0) // TILE
    used = tl.minimum(tiles - first, SPLITS)
    if split >= used:
        # The kernel after this one may rely on what this one waited for.
        READY()
        return
    if WINDOWED:
        tile = first + split
        entries = (tile * TILE + in_tile) // BLOCK_TOKENS
        blocks = tl.load(table + entries, mask=entries < table_blocks, other=0)
    head64 = head.to(tl.int64)
    tokens = request.to(tl.int64) * Q_WIDTH
    positions = length - Q_WIDTH + rows // GROUPS
    oldest = positions - window + 1
    k_base = k_ptr + head64 * stride_k_head + cols[None, :]
    v_base = v_ptr + head64 * stride_v_head + cols[None, :]
    row_in_block = in_tile % BLOCK_TOKENS
    most, total = begin_softmax(sinks_ptr, head64 * GROUPS + rows % GROUPS, split == 0, ROWS)
    mixed = tl.zeros((ROWS, WIDE_DIM), tl.float32)
    q_at = q_ptr + (tokens + rows // GROUPS)[:, None] * stride_q_token
    q_at += (head64 * GROUPS + rows % GROUPS)[:, None] * stride_q_head + cols[None, :]
    real = (rows < Q_ROWS)[:, None] & inside[None, :]
    if AHEAD:
        at = tile * TILE + in_tile
        row_at = (at % BLOCK_TOKENS) if TILE % BLOCK_TOKENS else row_in_block
        place = blocks.to(tl.int64)[:, None]
        k_at = k_base + place * stride_k_block + row_at[:, None] * stride_k_row
        v_at = v_base + place * stride_v_block + row_at[:, None] * stride_v_row
        old = (at < length - Q_WIDTH)[:, None] & inside[None, :]
        k = tl.load(k_at, mask=old, other=0.0)
        v = tl.load(v_at, mask=old, other=0.0)
        at_next = at + SPLITS * TILE
        blocks = tl.load(table + at_next // BLOCK_TOKENS, mask=at_next < length, other=0)
        READY()
        q = tl.load(q_at, mask=real, other=0.0)
        if (tile + 1) * TILE > length - Q_WIDTH:
            new = ((at >= length - Q_WIDTH) & (at < length))[:, None] & inside[None, :]
            k = tl.load(k_at, mask=new, other=k)
            v = tl.load(v_at, mask=new, other=v)
        most, total, mixed = attend_tile(
            q, k, v, at, positions, oldest, most, total, mixed, scale * LOG2E, WINDOWED
        )
        tile += SPLITS
    else:
        READY()
        q = tl.load(q_at, mask=real, other=0.0)
    for at_tile in range(tile, tiles, SPLITS):
        at = at_tile * TILE + in_tile
        there = (at < length)[:, None] & inside[None, :]
        at_next = at + SPLITS * TILE
        row_at = (at % BLOCK_TOKENS) if TILE % BLOCK_TOKENS else row_in_block
        place = blocks.to(tl.int64)[:, None]
        k = tl.load(
            k_base + place * stride_k_block + row_at[:, None] * stride_k_row, mask=there, other=0.0
        )
        v = tl.load(
            v_base + place * stride_v_block + row_at[:, None] * stride_v_row, mask=there, other=0.0
        )
        blocks = tl.load(table + at_next // BLOCK_TOKENS, mask=at_next < length, other=0)
        most, total, mixed = attend_tile(
            q, k, v, at, positions, oldest, most, total, mixed, scale * LOG2E, WINDOWED
        )
    out = out_ptr + tokens * stride_out_token + head64 * GROUPS * stride_out_head
    leave_rows(
        out, partial_ptr, arrived_ptr, pair, split, used, rows, most, total, mixed,
        stride_out_token, stride_out_head,
        DIM, WIDE_DIM, GROUPS, Q_ROWS, SPLITS, WIDE_SPLITS, MERGE_ROWS, MERGE_HERE,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLICED)
def merge_splits_kernel(
    partial_ptr,
    lengths_ptr,
    out_ptr,
    window,
    kv_heads,
    stride_out_token,
    stride_out_head,
    DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    APART: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE_SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
) -> None:
    """Merge a pair's splits; the newest APART rows were in no tile."""
    START()
    pair = tl.program_id(0)
    request, head = pair // kv_heads, pair % kv_heads
    length = tl.load(lengths_ptr + request)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - Q_WIDTH + 1 - window, 0) // TILE
    used = tl.minimum(tl.cdiv(length - APART, TILE) - first, SPLITS)
    READY()
    if used > 1:
        out = out_ptr + request.to(tl.int64) * Q_WIDTH * stride_out_token
        out += head.to(tl.int64) * GROUPS * stride_out_head
        merge_rows(
            partial_ptr, out, pair, tl.num_programs(0), used, tl.program_id(1) * MERGE_ROWS,
            stride_out_token, stride_out_head,
            DIM, WIDE_DIM, GROUPS, GROUPS * Q_WIDTH, SPLITS, WIDE_SPLITS, MERGE_ROWS,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeForm:
    """How a decode call is cut and compiled."""

    splits: int
    """Programs per request and key head, at most."""
    tile: int
    """Keys per turn of the loop."""
    warps: int
    stages: int
    merge: Literal["here", "after"]
    """Whether the last program of a request's splits merges them, or a second kernel."""
    ahead: bool = False
    """Whether a program's first tile is asked for before anything else, and not in the loop."""


def splits_of(requests: int, kv_heads: int, processors: int) -> int:
    """Into how many splits the cached tokens of a request are cut: a power of two, 1 where requests fill the device.

    It does not depend on how wide a block table is, so a recorded call and an eager one add in the same order.
    """
    pairs = max(requests * kv_heads, 1)
    if 4 * pairs >= 3 * processors:
        return 1
    room = PROGRAMS_PER_PROCESSOR * processors // pairs
    return min(1 << max(room.bit_length() - 1, 0), MOST_SPLITS)


@lru_cache(maxsize=16)
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where an interpreter runs the kernels on a CPU."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_form(requests: int, kv_heads: int, row_bytes: int, device: torch.device) -> DecodeForm:
    """The form for a call of these sizes; `row_bytes`: of one key as products take it.

    Few programs of 2 warps each have little to wait for; programs that hardly fill the device need many keys on
    their way; many programs cover each other's waits. Of AMD's barrier nobody promises that stores of other
    threads are done, so a second kernel merges there.
    """
    processors = processors_of(device)
    splits = splits_of(requests, kv_heads, processors)
    merge = "here" if torch.version.hip is None else "after"
    if row_bytes > 256:
        return DecodeForm(splits, 64 if row_bytes <= 512 else 32, 4, 3, merge)
    if splits > 1:
        return DecodeForm(splits, 32, 2, 3, merge, ahead=True)
    if requests * kv_heads <= 3 * processors:
        return DecodeForm(1, 128, 8, 2, merge)
    return DecodeForm(1, 32, 4, 3, merge)


_ARRIVED: dict[torch.device, Tensor] = {}
"""How many splits of a request and key head are done, int32 [STREAMS, COUNTERS]. All zero between calls."""
_STREAMS: dict[tuple[torch.device, int], int] = {}
"""Which row of the counters a stream has: calls on two streams may run at once."""


def arrivals(device: torch.device) -> Tensor | None:
    """The counters of the current stream, int32 [COUNTERS]; None for streams beyond STREAMS.

    Raises:
        LateBuffer: the first call on the device is being recorded.
    """
    is_gpu = device.type == "cuda"
    if device not in _ARRIVED:
        if is_gpu and torch.cuda.is_current_stream_capturing():
            raise LateBuffer(
                f"the first decode step on {device} is being recorded, and its counters must outlive that",
                hint="run a decode step before recording one",
            )
        _ARRIVED[device] = torch.zeros((STREAMS, COUNTERS), dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if is_gpu else 0
    row = _STREAMS.setdefault((device, stream), len(_STREAMS))
    return _ARRIVED[device][row] if row < STREAMS else None


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    q_width: int,
    scale: float,
    window: int,
    out: Tensor,
    form: DecodeForm,
    launch: Mapping[str, object] = IN_ORDER,
    sinks: Tensor | None = None,
) -> None:
    """Attend from `q_width` rows of every request; arguments as of the op `paged_attention`.

    `launch`: START and READY of the kernels, and how a chip is to start them.
    """
    _, kv_heads, block_tokens, head_dim = k_cache.shape
    requests, groups = lengths.shape[0], q.shape[1] // kv_heads
    pairs, rows = requests * kv_heads, groups * q_width
    splits, wide_splits = form.splits, triton.next_power_of_2(form.splits)
    wide_dim = max(triton.next_power_of_2(head_dim), 16)
    arrived = arrivals(q.device) if form.merge == "here" and pairs <= COUNTERS else None
    here = arrived is not None
    partial = out
    if splits > 1:
        room = pairs * splits * rows * (head_dim + 2)
        partial = torch.empty(room, dtype=torch.float32, device=q.device)
    _paged_decode_kernel[(pairs, splits)](
        q, k_cache, v_cache, block_table, lengths, sinks, out, partial,
        lengths if arrived is None else arrived,
        scale, window, kv_heads, block_table.shape[1],
        q.stride(0), q.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        block_table.stride(0), out.stride(0), out.stride(1),
        DIM=head_dim, WIDE_DIM=wide_dim, GROUPS=groups, Q_WIDTH=q_width,
        ROWS=max(triton.next_power_of_2(rows), 16), BLOCK_TOKENS=block_tokens, TILE=form.tile,
        SPLITS=splits, WIDE_SPLITS=wide_splits, MERGE_ROWS=rows_to_merge(splits, rows, wide_dim),
        WINDOWED=window > 0, MERGE_HERE=here and splits > 1, AHEAD=form.ahead,
        num_warps=form.warps, num_stages=form.stages, **launch,
    )  # fmt: skip
    if splits > 1 and not here:
        merge_splits(partial, lengths, out, kv_heads, q_width, 0, window, form, launch)


def merge_splits(
    partial: Tensor,
    lengths: Tensor,
    out: Tensor,
    kv_heads: int,
    q_width: int,
    apart: int,
    window: int,
    form: DecodeForm,
    launch: Mapping[str, object],
) -> None:
    """Launch the kernel that merges splits afterwards. apart: newest rows of a request that were in no tile."""
    heads, head_dim = out.shape[1:]
    groups = heads // kv_heads
    rows, wide_dim = groups * q_width, max(triton.next_power_of_2(head_dim), 16)
    merge_rows_each = rows_to_merge(form.splits, rows, wide_dim)
    merge_splits_kernel[(lengths.shape[0] * kv_heads, triton.cdiv(rows, merge_rows_each))](
        partial, lengths, out, window, kv_heads, out.stride(0), out.stride(1),
        DIM=head_dim, WIDE_DIM=wide_dim, GROUPS=groups, Q_WIDTH=q_width, APART=apart, TILE=form.tile,
        SPLITS=form.splits, WIDE_SPLITS=triton.next_power_of_2(form.splits),
        MERGE_ROWS=merge_rows_each, WINDOWED=window > 0, num_warps=4, **launch,
    )  # fmt: skip


def rows_to_merge(splits: int, rows: int, wide_dim: int) -> int:
    """Query rows whose splits a program holds at a time."""
    held = triton.next_power_of_2(splits) * wide_dim
    return int(min(triton.next_power_of_2(rows), max(MERGE_NUMBERS // held, 1)))
