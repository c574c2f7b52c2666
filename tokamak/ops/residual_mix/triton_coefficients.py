# pyright: reportArgumentType=false, reportCallIssue=false
"""Coefficients of mixed streams in Triton: products of tiles of rows with pieces of the weight, then one program per row.

Pieces of the weight are the same for any number of rows, and what they gave is added up in one order: a row's
coefficients do not depend on the rows beside it. Products are those of float32: a weight is the sum of three numbers of
16 bits, each of which matrix units multiply exactly with numbers of a stream of 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.residual_mix.reference import head_coefficients, mix_coefficients
from tokamak.ops.triton_facts import fits
from tokamak.ops.triton_order import order_on

PIECE_COLUMNS = 256
"""Columns a program multiplies: 80 programs share out the four streams of 5120 numbers of one row."""
INPUTS = 64
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile, by whether there are more than the first."""


@triton.jit
def _multiply(x, fn, total):
    """Add x [rows, inputs] times fn [outs, inputs], which is float32, to a total."""
    fn = tl.trans(fn)
    if x.dtype == tl.bfloat16:
        high = fn.to(tl.bfloat16)
        rest = fn - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        # The smallest come first.
        total = tl.dot(x, low, total)
        total = tl.dot(x, middle, total)
        total = tl.dot(x, high, total)
    else:
        total = tl.dot(x.to(tl.float32), fn, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _project_kernel(
    x_ptr,
    fn_ptr,
    parts_ptr,
    rows,
    COLUMNS: tl.constexpr,
    OUTS: tl.constexpr,
    OUTS_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    INPUTS: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Beyond the last row and output the last is taken once more, and not stored.
    known = tl.minimum(row, rows - 1).to(tl.int64)
    outs = tl.arange(0, OUTS_TILE)
    begin = tl.program_id(1) * PIECE
    inputs = tl.arange(0, INPUTS)
    x_ptrs = x_ptr + known[:, None] * COLUMNS + (begin + inputs)[None, :]
    fn_ptrs = fn_ptr + tl.minimum(outs, OUTS - 1)[:, None] * COLUMNS + (begin + inputs)[None, :]
    total = tl.zeros([ROWS, OUTS_TILE], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, PIECE, INPUTS):
        inside = (begin + start + inputs < COLUMNS)[None, :]
        x = tl.load(x_ptrs + start, mask=inside, other=0.0)
        fn = tl.load(fn_ptrs + start, mask=inside, other=0.0)
        total = _multiply(x, fn, total)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
    part_ptrs = parts_ptr + (tl.program_id(1) * rows + row).to(tl.int64) * OUTS_TILE
    stored = (row < rows)[:, None] & (outs < OUTS)[None, :]
    tl.store(part_ptrs[:, None] + outs[None, :], total, mask=stored)
    tl.store(part_ptrs + OUTS, squares, mask=row < rows)


@triton.jit
def _added(
    parts_ptr, rows, row, outs, OUTS_TILE: tl.constexpr, PIECES: tl.constexpr, WIDE: tl.constexpr
):
    """What all pieces gave for some outputs of a row [outs]; WIDE: a power of two, no fewer than the pieces."""
    pieces = tl.arange(0, WIDE)
    part_ptrs = parts_ptr + (pieces[:, None] * rows + row) * OUTS_TILE + outs[None, :]
    return tl.sum(tl.load(part_ptrs, mask=(pieces < PIECES)[:, None], other=0.0), axis=0)


@triton.jit
def _scale_of(
    parts_ptr, rows, row, eps, COLUMNS: tl.constexpr, OUTS: tl.constexpr, OUTS_TILE: tl.constexpr,
    PIECES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """By what products of a row are multiplied so that the row has unit root mean square."""
    squares = _added(parts_ptr, rows, row, OUTS + tl.arange(0, 1), OUTS_TILE, PIECES, WIDE)
    return tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["rows"])
def _mix_kernel(
    parts_ptr,
    base_ptr,
    scale_ptr,
    read_ptr,
    write_ptr,
    mix_ptr,
    rows,
    norm_eps,
    mix_eps,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    OUTS_TILE: tl.constexpr,
    PIECES: tl.constexpr,
    WIDE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    OUTS: tl.constexpr = (2 + COUNT) * COUNT
    row = tl.program_id(0).to(tl.int64)
    unit = _scale_of(parts_ptr, rows, row, norm_eps, COLUMNS, OUTS, OUTS_TILE, PIECES, WIDE)
    one = tl.arange(0, COUNT)
    read = _added(parts_ptr, rows, row, one, OUTS_TILE, PIECES, WIDE) * unit
    read = _sigmoid(read * tl.load(scale_ptr) + tl.load(base_ptr + one)) + mix_eps
    tl.store(read_ptr + row * COUNT + one, read)
    at = COUNT + one
    write = _added(parts_ptr, rows, row, at, OUTS_TILE, PIECES, WIDE) * unit
    write = 2.0 * _sigmoid(write * tl.load(scale_ptr + 1) + tl.load(base_ptr + at))
    tl.store(write_ptr + row * COUNT + one, write)
    both = one[:, None] * COUNT + one[None, :]
    flat = 2 * COUNT + tl.arange(0, COUNT * COUNT)
    mix = _added(parts_ptr, rows, row, flat, OUTS_TILE, PIECES, WIDE) * unit
    mix = tl.reshape(mix, [COUNT, COUNT])
    at = 2 * COUNT + both
    mix = mix * tl.load(scale_ptr + 2) + tl.load(base_ptr + at)
    mix = tl.exp(mix - tl.max(mix, axis=1)[:, None])
    mix = mix / tl.sum(mix, axis=1)[:, None] + mix_eps
    mix = mix / (tl.sum(mix, axis=0) + mix_eps)[None, :]
    for _ in range(ITERATIONS - 1):
        mix = mix / (tl.sum(mix, axis=1) + mix_eps)[:, None]
        mix = mix / (tl.sum(mix, axis=0) + mix_eps)[None, :]
    tl.store(mix_ptr + row * COUNT * COUNT + both, mix)


@triton.jit(do_not_specialize=["rows"])
def _head_kernel(
    parts_ptr,
    base_ptr,
    scale_ptr,
    read_ptr,
    rows,
    norm_eps,
    mix_eps,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    OUTS_TILE: tl.constexpr,
    PIECES: tl.constexpr,
    WIDE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    unit = _scale_of(parts_ptr, rows, row, norm_eps, COLUMNS, COUNT, OUTS_TILE, PIECES, WIDE)
    one = tl.arange(0, COUNT)
    read = _added(parts_ptr, rows, row, one, OUTS_TILE, PIECES, WIDE) * unit
    read = _sigmoid(read * tl.load(scale_ptr) + tl.load(base_ptr + one)) + mix_eps
    tl.store(read_ptr + row * COUNT + one, read)


def _project(streams: Tensor, fn: Tensor) -> Tensor:
    """Products with the weight and the sum of squares behind them, by piece: [pieces, rows, outputs' tile]."""
    rows, columns = streams.shape[0], streams[0].numel()
    outs = fn.shape[0]
    pieces = triton.cdiv(columns, PIECE_COLUMNS)
    outs_tile = max(triton.next_power_of_2(outs + 1), 16)
    parts = torch.empty((pieces, rows, outs_tile), dtype=torch.float32, device=streams.device)
    tile = FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS
    _project_kernel[(triton.cdiv(rows, tile), pieces)](
        streams, fn, parts, rows,
        COLUMNS=columns, OUTS=outs, OUTS_TILE=outs_tile, ROWS=tile, PIECE=PIECE_COLUMNS,
        INPUTS=INPUTS, num_warps=4, num_stages=3, **order_on(streams.device.type),
    )  # fmt: skip
    return parts


@mix_coefficients.backend("triton", fits=fits)
def triton_mix_coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """How a layer reads the streams, writes to them, and mixes them; kernels take counts that are powers of two."""
    streams = streams.contiguous()
    rows, count, width = streams.shape
    if count & (count - 1):
        return mix_coefficients.reference(streams, fn, base, scale, norm_eps, mix_eps, iterations)
    numbers = {"dtype": torch.float32, "device": streams.device}
    read, write = (torch.empty((rows, count), **numbers) for _ in range(2))
    mix = torch.empty((rows, count, count), **numbers)
    if rows:
        parts = _project(streams, fn)
        _mix_kernel[(rows,)](
            parts, base, scale, read, write, mix, rows, norm_eps, mix_eps,
            COLUMNS=count * width, COUNT=count, OUTS_TILE=parts.shape[2], PIECES=parts.shape[0], WIDE=triton.next_power_of_2(parts.shape[0]),
            ITERATIONS=iterations, num_warps=1, **order_on(streams.device.type),
        )  # fmt: skip
    return read, write, mix


@head_coefficients.backend("triton", fits=fits)
def triton_head_coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, mix_eps: float
) -> Tensor:
    """How a vocabulary head reads the streams; kernels take counts that are powers of two."""
    streams = streams.contiguous()
    rows, count, width = streams.shape
    if count & (count - 1):
        return head_coefficients.reference(streams, fn, base, scale, norm_eps, mix_eps)
    read = torch.empty((rows, count), dtype=torch.float32, device=streams.device)
    if rows:
        parts = _project(streams, fn)
        _head_kernel[(rows,)](
            parts, base, scale, read, rows, norm_eps, mix_eps,
            COLUMNS=count * width, COUNT=count, OUTS_TILE=parts.shape[2], PIECES=parts.shape[0], WIDE=triton.next_power_of_2(parts.shape[0]),
            num_warps=1, **order_on(streams.device.type),
        )  # fmt: skip
    return read
