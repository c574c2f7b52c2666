# pyright: reportArgumentType=false, reportCallIssue=false
"""The n-gram memory in Triton: a program per token that hashes, per row of the table that is read, per gated stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.core.minifloat import UE8M0
from tokamak.ops.engram.reference import SMALLEST_DOT, engram_gate, engram_rows, engram_values
from tokamak.ops.norm.triton_norms import warps_for
from tokamak.ops.quantize.triton_floats import float_of_e4m3, float_of_ue8m0
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import order_on

REQUESTS = 128
"""Requests a program looks at a time for the one its token belongs to."""
TILE_ROWS = 4
"""Rows of the table that one program reads at a time."""
DEVICE_PROGRAMS = 1 << 16
"""How many programs read a table at most; each then reads several times."""
HOST_PROGRAMS = 256
"""How many programs read a table in the host's memory: enough to keep its bus busy, and few beside what computes."""

_SMALLEST_DOT = tl.constexpr(SMALLEST_DOT)


@triton.jit(
    do_not_specialize=["requests", "q_width", "pad_id"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "query_starts_ptr", "out_ptr"],
)
def _rows_kernel(
    history_ptr,
    slots_ptr,
    positions_ptr,
    query_starts_ptr,
    ids_ptr,
    multipliers_ptr,
    primes_ptr,
    out_ptr,
    requests,
    q_width,
    pad_id,
    stride_history_slot,
    ORDERS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS_TILE: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    token = tl.program_id(0)
    request = token * 0
    if q_width > 0:
        request = token // q_width
    else:
        start = token * 0
        while start < requests:
            at = start + tl.arange(0, REQUESTS)
            end = tl.load(query_starts_ptr + 1 + at, mask=at < requests, other=0x7FFFFFFF)
            request += tl.sum((end <= token).to(tl.int32), axis=0)
            start += REQUESTS
    slot = tl.load(slots_ptr + request).to(tl.int64)
    position = tl.load(positions_ptr + token)
    history_ptr += slot * stride_history_slot
    cols = tl.arange(0, COLUMNS_TILE)
    inside = cols < ORDERS * HEADS
    order = cols // HEADS
    mixed = tl.zeros([COLUMNS_TILE], tl.int64)
    for back in tl.static_range(ORDERS + 1):
        known = position >= back
        id = tl.load(history_ptr + position - back, mask=known, other=0)
        gram = tl.load(ids_ptr + id)
        product = tl.where(known, gram, pad_id) * tl.load(multipliers_ptr + back)
        mixed = tl.where(order + 1 >= back, mixed ^ product, mixed)
    prime = tl.load(primes_ptr + cols, mask=inside, other=1)
    first = tl.cumsum(prime, axis=0) - prime
    out_ptrs = out_ptr + token.to(tl.int64) * ORDERS * HEADS + cols
    tl.store(out_ptrs, mixed % prime + first, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _values_kernel(
    codes_ptr,
    scales_ptr,
    rows_ptr,
    out_ptr,
    count,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):
    groups = tl.arange(0, GROUPS_TILE)
    neighbours = tl.arange(0, GROUP_TILE)
    cols = groups[:, None] * GROUP + neighbours[None, :]
    there = (groups < GROUPS)[:, None] & (neighbours < GROUP)[None, :]
    tile = tl.program_id(0)
    while tile * ROWS < count:
        place = tile * ROWS + tl.arange(0, ROWS)
        known = place < count
        row = tl.load(rows_ptr + place, mask=known, other=0)
        inside = known[:, None, None] & there[None, :, :]
        code_ptrs = codes_ptr + row[:, None, None] * COLUMNS + cols[None, :, :]
        code = tl.load(code_ptrs, mask=inside, other=0)
        if SCALES == "none":
            out = code.to(tl.float32)
        else:
            scale_ptrs = scales_ptr + row[:, None] * GROUPS + groups[None, :]
            scale = tl.load(scale_ptrs, mask=known[:, None] & (groups < GROUPS)[None, :], other=0)
            if SCALES == "powers":
                scale = float_of_ue8m0(scale)
            out = float_of_e4m3(code) * scale[:, :, None]
        out_ptrs = out_ptr + place.to(tl.int64)[:, None, None] * COLUMNS + cols[None, :, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)


@triton.jit
def _gate_kernel(
    streams_ptr,
    keys_ptr,
    values_ptr,
    weight_ptr,
    out_ptr,
    stride_keys_row,
    stride_values_row,
    eps,
    unit,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    cols = tl.arange(0, TILE)
    inside = cols < WIDTH
    at = (row * COUNT + stream) * WIDTH + cols
    wide = tl.load(streams_ptr + at, mask=inside, other=0.0).to(tl.float32)
    key_ptrs = keys_ptr + row * stride_keys_row + stream * WIDTH + cols
    key = tl.load(key_ptrs, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + stream * WIDTH + cols, mask=inside, other=0.0)
    value = tl.load(values_ptr + row * stride_values_row + cols, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    scale *= tl.rsqrt(tl.sum(key * key, axis=0) / WIDTH + eps)
    dot = tl.sum(wide * weight * key, axis=0) * scale * unit
    root = tl.sqrt(tl.where(tl.abs(dot) < _SMALLEST_DOT, _SMALLEST_DOT, tl.abs(dot)))
    # The sign of zero is lost where a dot product is one, as its bits are asked, not its size.
    root = tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root)
    gate = 1.0 / (1.0 + tl.exp(-root))
    out = wide + gate * value.to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@engram_rows.backend("triton", fits=fits)
def triton_engram_rows(
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    compressed_ids: Tensor,
    pad_id: int,
    multipliers: Tensor,
    primes: Tensor,
    out: Tensor,
) -> None:
    """Rows of the table for the n-grams that end at each token."""
    assert out.is_contiguous(), f"rows of a table go to whole rows, not to strides {out.stride()}"
    tokens, (orders, heads) = len(positions), primes.shape
    if tokens:
        _rows_kernel[(tokens,)](
            history, slots, positions, query_starts, compressed_ids, multipliers, primes, out,
            query_starts.shape[0] - 1, q_width, pad_id, history.stride(0),
            ORDERS=orders, HEADS=heads, COLUMNS_TILE=triton.next_power_of_2(orders * heads),
            REQUESTS=REQUESTS, num_warps=1,
        )  # fmt: skip


@engram_values.backend("triton", fits=fits)
def triton_engram_values(codes: Tensor, scales: Tensor | None, rows: Tensor, out: Tensor) -> None:
    """Rows of a table as numbers; of one in the host's pinned memory by few programs, as a bus feeds no more."""
    assert out.is_contiguous(), f"rows of a table go to whole rows, not to strides {out.stride()}"
    count, columns = out.shape
    groups = 1 if scales is None else scales.shape[1]
    group = columns // groups
    if not count:
        return
    most = DEVICE_PROGRAMS if codes.device == rows.device else HOST_PROGRAMS
    programs = min(triton.cdiv(count, TILE_ROWS), most)
    numbers = codes if scales is None else codes.view(torch.uint8)
    kind = "none" if scales is None else "numbers"
    if scales is not None and scales.dtype == UE8M0:
        scales, kind = scales.view(torch.uint8), "powers"
    _values_kernel[(programs,)](
        numbers, scales, rows, out, count, COLUMNS=columns, GROUPS=groups,
        GROUPS_TILE=triton.next_power_of_2(groups), GROUP=group,
        GROUP_TILE=triton.next_power_of_2(group), SCALES=kind, ROWS=TILE_ROWS, num_warps=2,
    )  # fmt: skip


@engram_gate.backend("triton", fits=fits)
def triton_engram_gate(
    streams: Tensor, keys: Tensor, values: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Add what was looked up to every stream, each by its own gate."""
    streams, keys, values = streams.contiguous(), rows_of(keys), rows_of(values)
    rows, count, width = streams.shape
    out = torch.empty_like(streams)
    if rows:
        tile = triton.next_power_of_2(width)
        _gate_kernel[(rows, count)](
            streams, keys, values, weight.contiguous(), out, keys.stride(0), values.stride(0), eps,
            width**-0.5, COUNT=count, WIDTH=width, TILE=tile, num_warps=warps_for(tile), **order_on(streams.device.type),
        )  # fmt: skip
    return out
