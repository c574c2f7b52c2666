# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""How do Triton kernels read rows of a cache, numbers or records? Records become numbers in registers, by their bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.quantize.triton_floats import float_of_e2m1, float_of_e4m3, float_of_ue8m0
from tokamak.ops.records.formats import FP8, MXFP4, NVFP4, KVFormat

KERNEL_FORMATS = (FP8, NVFP4, MXFP4)
"""Formats of records that kernels write and read."""


def name_of(form: KVFormat) -> str:
    """What kernels call a format, one of those they know."""
    names = ", ".join(each.name for each in KERNEL_FORMATS)
    assert form in KERNEL_FORMATS, f"records of {form.name}; kernels know {names}"
    return form.name


def format_of(cache: Tensor, form: KVFormat | None, dim: int) -> str:
    """What `load_rows` calls the format of a cache, [blocks, 1, block_rows, ...]; nothing where rows are numbers."""
    if form is None:
        assert cache.dtype.is_floating_point, "rows of bytes are records of a format"
        return ""
    size = form.bytes_per_row(dim)
    found = (cache.dtype, cache.shape[3], cache.stride(2), cache.stride(0) % size)
    assert found == (torch.uint8, size, size, 0), f"a cache of {found} for records of {size} bytes"
    return name_of(form)


@triton.jit
def load_rows(
    rows_ptr, offsets, there, DIM: tl.constexpr, WIDE_DIM: tl.constexpr, FORMAT: tl.constexpr
):
    """Rows [rows, WIDE_DIM] that begin at `offsets` of a cache; zeros where none is `there`, and behind DIM.

    FORMAT: see `format_of`. Numbers come in the cache's dtype; records, whose offsets are bytes, as float32.
    """
    if FORMAT == "":
        cols = tl.arange(0, WIDE_DIM)
        mask = there[:, None]
        if DIM != WIDE_DIM:
            mask = mask & (cols < DIM)[None, :]
        rows = tl.load(rows_ptr + offsets[:, None] + cols[None, :], mask=mask, other=0.0)
    else:
        rows = _load_records(rows_ptr, offsets, there, DIM, WIDE_DIM, FORMAT)
    return rows


@triton.jit
def _load_records(
    rows_ptr, offsets, there, DIM: tl.constexpr, WIDE_DIM: tl.constexpr, FORMAT: tl.constexpr
):
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    PER_BYTE: tl.constexpr = 1 if FORMAT == "fp8" else 2
    # Records lie one behind another from the beginning of an arena, so their size tells in which pieces they are read.
    SIZE: tl.constexpr = DIM // PER_BYTE + DIM // BLOCK
    begins = offsets[:, None]
    if SIZE % 16 == 0:
        begins = tl.multiple_of(begins, (16, 16))
    elif SIZE % 4 == 0:
        begins = tl.multiple_of(begins, (4, 4))
    else:
        # Triton takes places in listed blocks for multiples of more than they are, and so what is computed of them.
        begins = tl.multiple_of(begins, (1, 1))
    at, blocks = tl.arange(0, WIDE_DIM // PER_BYTE), tl.arange(0, WIDE_DIM // BLOCK)
    mask, scale_mask = there[:, None], there[:, None]
    if DIM != WIDE_DIM:
        mask = mask & (at < DIM // PER_BYTE)[None, :]
        scale_mask = scale_mask & (blocks < DIM // BLOCK)[None, :]
    begins = rows_ptr + begins
    codes = tl.load(begins + at[None, :], mask=mask, other=0)
    scales = tl.load(begins + DIM // PER_BYTE + blocks[None, :], mask=scale_mask, other=0)
    if FORMAT == "fp8":
        numbers = float_of_e4m3(codes)
    else:
        numbers = tl.interleave(float_of_e2m1(codes & 15), float_of_e2m1(codes >> 4))
    factors = float_of_e4m3(scales) if FORMAT == "nvfp4" else float_of_ue8m0(scales)
    blocked = tl.reshape(numbers, [offsets.shape[0], WIDE_DIM // BLOCK, BLOCK])
    return tl.reshape(blocked * factors[:, :, None], [offsets.shape[0], WIDE_DIM])
