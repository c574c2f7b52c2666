# pyright: reportArgumentType=false, reportCallIssue=false
"""Block-diagonal products in Triton: few rows by one launch for all groups, many by the library's batched product.

A program takes a tile of one group's features and all rows, with weights as the first operand: it fills the 64 rows
that matrix units want, however few there are of the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.grouped_linear.reference import grouped_linear
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import asking_on

FEW_ROWS = 64
LEAST_ROWS = 16
FEATURES, COLUMNS = 64, 128
"""Of a tile."""
MOST_AHEAD = 512
"""Bytes of a feature that a program asks for before rows are there."""


@triton.jit(do_not_specialize=["rows"])
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    stride_x_row,
    stride_x_group,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
    ASK: tl.constexpr,
):
    START()
    group = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row, cols = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    # Beyond the last row and feature the last is taken once more, and not stored.
    known_row, known = tl.minimum(row, rows - 1), tl.minimum(feature, COUNT - 1)
    x_ptrs = x_ptr + group * stride_x_group + known_row[None, :].to(tl.int64) * stride_x_row
    x_ptrs += cols[:, None]
    row_ptrs = weight_ptr + (group * COUNT + known) * WIDTH
    if AHEAD:
        ASK(row_ptrs, AHEAD)
    READY()
    weight_ptrs = row_ptrs[:, None] + cols[None, :]
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for begin in range(0, WIDTH, COLUMNS):
        if WIDTH % COLUMNS == 0:
            weight, x = tl.load(weight_ptrs), tl.load(x_ptrs)
        else:
            inside = begin + cols < WIDTH
            weight = tl.load(weight_ptrs, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=inside[:, None], other=0.0)
        total = tl.dot(weight, x, total, input_precision="ieee")
        weight_ptrs += COLUMNS
        x_ptrs += COLUMNS
    groups = tl.num_programs(1).to(tl.int64)
    out_ptrs = out_ptr + (row[None, :] * groups + group) * COUNT + feature[:, None]
    stored = (feature < COUNT)[:, None] & (row < rows)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=stored)


def _ahead(weight: Tensor) -> int:
    """Bytes of a feature that a program asks for before rows are there; none where rows begin between pieces of 16 bytes."""
    row_bytes = weight.shape[2] * weight.element_size()
    return 0 if row_bytes % 16 else min(row_bytes, MOST_AHEAD)


@grouped_linear.backend("triton", fits=fits)
def triton_grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each group of a row's numbers with its matrix."""
    (tokens, groups, width), count = x.shape, weight.shape[1]
    if not 0 < tokens <= FEW_ROWS:
        return grouped_linear.reference(x, weight)
    x = rows_of(x)
    out = torch.empty((tokens, groups * count), dtype=x.dtype, device=x.device)
    columns = min(COLUMNS * 2 // x.element_size(), max(triton.next_power_of_2(width), 16))
    _grouped_kernel[(triton.cdiv(count, FEATURES), groups)](
        x, weight, out, tokens, x.stride(0), x.stride(1),
        WIDTH=width, COUNT=count, ROWS=max(triton.next_power_of_2(tokens), LEAST_ROWS),
        FEATURES=FEATURES, COLUMNS=columns, AHEAD=_ahead(weight), num_warps=4, num_stages=5, **asking_on(x.device.type),
    )  # fmt: skip
    return out
