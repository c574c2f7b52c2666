# pyright: reportArgumentType=false, reportCallIssue=false
"""Rows on their way into a cache in Triton: one program a row, which reads it once and does nothing where it is not cached."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.norm.triton_norms import normed, warps_for
from tokamak.ops.quantize.blocks import BLOCKS_OF, Blocks
from tokamak.ops.quantize.triton import in_blocks, signed_as
from tokamak.ops.rope.triton_pairs import turned_end
from tokamak.ops.rotate_write.reference import Rounded, rotate_write
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import order_on
from tokamak.ops.triton_rows import BY_TOKEN, place_of_slot, slot_of_token

ALONE = Blocks(1, 0.0)
"""Of numbers that are not rounded."""


@triton.jit(do_not_specialize=("ratio",), do_not_specialize_on_alignment=BY_TOKEN)
def _rotate_write_kernel(
    cache_ptr,
    rows_ptr,
    weight_ptr,
    slots_ptr,
    positions_ptr,
    cos_sin_ptr,
    eps,
    least,
    ratio,
    stride_cache_block,
    stride_cache_row,
    stride_rows_row,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    slot = slot_of_token(slots_ptr, positions_ptr, row, ratio)
    if slot >= 0:
        kind = rows_ptr.dtype.element_ty
        cols = tl.arange(0, TILE)
        x = tl.load(rows_ptr + row * stride_rows_row + cols, mask=cols < WIDTH, other=0.0)
        x = x.to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
            x = normed(x, weight, WIDTH, eps, kind).to(tl.float32)
        position = tl.load(positions_ptr + row)
        angles = cos_sin_ptr + (position - position % ratio).to(tl.int64) * TURNING
        x = tl.reshape(x, [1, TILE])
        turned = turned_end(x, angles, TURNING, 1, WIDTH, TILE, False)
        # What stands still keeps its bits, beside an infinity too.
        x = tl.where((cols >= WIDTH - TURNING)[None, :], turned, x)
        x = tl.reshape(x, [TILE // BLOCK, BLOCK]).to(kind).to(tl.float32)
        if FORMAT != "":
            size, scale = in_blocks(x, least, FORMAT)
            x = signed_as(size * scale, x).to(kind).to(tl.float32)
        place = place_of_slot(slot, stride_cache_block, stride_cache_row, BLOCK_ROWS)
        cols = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(cache_ptr + place + cols, x.to(cache_ptr.dtype.element_ty), mask=cols < WIDTH)


@rotate_write.backend("triton", fits=fits)
def triton_rotate_write(
    cache: Tensor,
    rows: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    ratio: int,
    rounded: Rounded,
) -> None:
    """Norm, turn, round and write rows that end a group in one launch; those of negative slots nowhere."""
    rows = rows_of(rows)
    count, width = rows.shape
    assert cache.shape[1] == 1, f"a cache of {cache.shape[1]} heads"
    assert (cache.stride(3), slots.stride(0)) == (1, 1), "rows and slots lie in one piece"
    turning = cos_sin.shape[1]
    block, least = BLOCKS_OF.get(rounded, ALONE)
    assert (width - turning) % 2 == 0, f"{turning} numbers at the end of {width} are no pairs"
    assert width % block == 0, f"{width} numbers in blocks of {block}"
    if not count:
        return
    tile = triton.next_power_of_2(max(width, 32))
    _rotate_write_kernel[(count,)](
        cache, rows, norm_weight, slots, positions, cos_sin, eps, least, ratio,
        cache.stride(0), cache.stride(2), rows.stride(0),
        BLOCK_ROWS=cache.shape[2], WIDTH=width, TURNING=turning, TILE=tile, FORMAT=rounded, BLOCK=block,
        num_warps=warps_for(tile), **order_on(rows.device.type),
    )  # fmt: skip
