# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The uses of mixed streams in Triton: read them as one row, normed or not, and write behind a layer; one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.norm.triton_norms import normed, warps_for
from tokamak.ops.residual_mix.reference import collapse_norm, collapse_streams, expand_streams
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import order_on

TILE = 1024
WARPS = 4


@triton.jit
def _collapse_kernel(
    streams_ptr,
    read_ptr,
    weight_ptr,
    out_ptr,
    width,
    stride_read_row,
    eps,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < width
    stream_ptrs = streams_ptr + row * COUNT * width + cols
    read_ptr += row * stride_read_row
    total = tl.zeros([TILE], tl.float32)
    for at in tl.static_range(COUNT):
        stream = tl.load(stream_ptrs + at * width, mask=inside, other=0.0).to(tl.float32)
        total += stream * tl.load(read_ptr + at)
    kind = out_ptr.dtype.element_ty
    out = total.to(kind)
    if NORM:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        out = normed(out.to(tl.float32), weight, width, eps, kind)
    tl.store(out_ptr + row * width + cols, out, mask=inside)


@triton.jit
def _expand_kernel(
    y_ptr,
    also_ptr,
    streams_ptr,
    write_ptr,
    mix_ptr,
    out_ptr,
    width,
    stride_y_row,
    stride_also_row,
    COUNT: tl.constexpr,
    COUNT_TILE: tl.constexpr,
    TILE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < width
    to = tl.arange(0, COUNT_TILE)
    there = to < COUNT
    y = tl.load(y_ptr + row * stride_y_row + cols, mask=inside, other=0.0).to(tl.float32)
    if also_ptr is not None:
        also = tl.load(also_ptr + row * stride_also_row + cols, mask=inside, other=0.0)
        y = (y + also.to(tl.float32)).to(y_ptr.dtype.element_ty).to(tl.float32)
    write = tl.load(write_ptr + row * COUNT + to, mask=there, other=0.0)
    total = write[:, None] * y[None, :]
    stream_ptrs = streams_ptr + row * COUNT * width + cols
    mix_ptrs = mix_ptr + row * COUNT * COUNT + to
    for at in tl.static_range(COUNT):
        stream = tl.load(stream_ptrs + at * width, mask=inside, other=0.0).to(tl.float32)
        mix = tl.load(mix_ptrs + at * COUNT, mask=there, other=0.0)
        total += mix[:, None] * stream[None, :]
    out_ptrs = out_ptr + row * COUNT * width + to[:, None] * width + cols[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@collapse_streams.backend("triton", fits=fits)
def triton_collapse_streams(streams: Tensor, read: Tensor) -> Tensor:
    """The weighted sum of the streams."""
    return _collapse(streams, read, None, 0.0, TILE)


@collapse_norm.backend("triton", fits=fits)
def triton_collapse_norm(streams: Tensor, read: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same and its norm: a program holds a whole row."""
    return _collapse(streams, read, weight, eps, triton.next_power_of_2(streams.shape[2]))


def _collapse(
    streams: Tensor, read: Tensor, weight: Tensor | None, eps: float, tile: int
) -> Tensor:
    streams, read = streams.contiguous(), rows_of(read)
    rows, count, width = streams.shape
    out = torch.empty((rows, width), dtype=streams.dtype, device=streams.device)
    if rows:
        _collapse_kernel[(rows, triton.cdiv(width, tile))](
            streams, read, streams if weight is None else weight, out, width, read.stride(0), eps,
            COUNT=count, TILE=tile, NORM=weight is not None, num_warps=warps_for(tile), **order_on(streams.device.type),
        )  # fmt: skip
    return out


@expand_streams.backend("triton", fits=fits)
def triton_expand_streams(
    y: Tensor, streams: Tensor, write: Tensor, mix: Tensor, also: Tensor | None = None
) -> Tensor:
    """The streams behind a layer."""
    y, streams, write, mix = rows_of(y), streams.contiguous(), write.contiguous(), mix.contiguous()
    also = None if also is None else rows_of(also)
    rows, count, width = streams.shape
    out = torch.empty_like(streams)
    if rows:
        tile = min(TILE, triton.next_power_of_2(width))
        _expand_kernel[(rows, triton.cdiv(width, tile))](
            y, also, streams, write, mix, out, width, y.stride(0), 0 if also is None else also.stride(0),
            COUNT=count, COUNT_TILE=triton.next_power_of_2(count), TILE=tile, num_warps=WARPS, **order_on(streams.device.type),
        )  # fmt: skip
    return out
