# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Rows to records of a cache in Triton: one program for some blocks of a row, rounded and stored in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.quantize.blocks import BLOCKS_OF
from tokamak.ops.quantize.triton import TILE_NUMBERS, WARPS, in_blocks
from tokamak.ops.quantize.triton_floats import e2m1_of_size, e4m3_of_size
from tokamak.ops.records.formats import KVFormat
from tokamak.ops.records.reference import write_records
from tokamak.ops.records.triton_read import name_of
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import order_on
from tokamak.ops.triton_rows import BY_TOKEN, place_of_slot, slot_of_token


@triton.jit(do_not_specialize=("ratio",), do_not_specialize_on_alignment=BY_TOKEN)
def _write_records_kernel(
    cache_ptr,
    rows_ptr,
    slots_ptr,
    positions_ptr,
    ratio,
    blocks,
    least,
    stride_cache_block,
    stride_cache_row,
    stride_rows_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    slot = slot_of_token(slots_ptr, positions_ptr, row, ratio)
    if slot >= 0:
        block = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
        cols = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = block < blocks
        x = tl.load(rows_ptr + row * stride_rows_row + cols, mask=inside, other=0.0).to(tl.float32)
        size, scale = in_blocks(x, least, FORMAT)
        negative = (x.to(tl.int32, bitcast=True) < 0).to(tl.uint8)
        place = place_of_slot(slot, stride_cache_block, stride_cache_row, BLOCK_ROWS)
        record = cache_ptr + place
        width = blocks * BLOCK
        if FORMAT == "fp8":
            tl.store(record + cols, e4m3_of_size(size) | (negative << 7), mask=inside)
        else:
            code = e2m1_of_size(size) | (negative << 3)
            low, high = tl.split(tl.reshape(code, [TILE, BLOCK // 2, 2]))
            pairs = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            tl.store(record + pairs, low | (high << 4), mask=inside)
            width = width // 2
        if FORMAT == "nvfp4":
            scale_code = e4m3_of_size(scale)
        else:
            scale_code = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(record + width + block, scale_code, mask=inside)


@write_records.backend("triton", fits=fits)
def triton_write_records(
    cache: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, ratio: int, form: KVFormat
) -> None:
    """Write rows that end a group to a cache as records of a format; those of negative slots nowhere."""
    rows = rows_of(rows)
    (count, width), coding, name = rows.shape, form.coding, name_of(form)
    assert coding is not None, f"{name} has no codes"
    shape = (1, form.bytes_per_row(width))
    assert (cache.shape[1], cache.shape[3]) == shape, f"a cache of {tuple(cache.shape)}"
    assert (cache.stride(3), slots.stride(0)) == (1, 1), "records and slots lie in one piece"
    if not count:
        return
    blocks = width // coding.block
    tile = min(triton.next_power_of_2(blocks), max(TILE_NUMBERS // coding.block, 1))
    _write_records_kernel[(count, triton.cdiv(blocks, tile))](
        cache, rows, slots, positions, ratio, blocks, BLOCKS_OF[name].least, cache.stride(0), cache.stride(2), rows.stride(0),
        BLOCK_ROWS=cache.shape[2], BLOCK=coding.block, TILE=tile, FORMAT=name, num_warps=WARPS, **order_on(rows.device.type),
    )  # fmt: skip
