# pyright: reportArgumentType=false, reportCallIssue=false
"""Rows to E4M3 in Triton: a program per row and stretch of groups, one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.quantize.rows import quantize_rows
from tokamak.ops.triton_facts import fits_e4m3, rows_of

PROGRAM_COLUMNS = 2048
COLUMNS_PER_WARP = 512


@triton.jit
def scale_of(largest, POWER_OF_TWO: tl.constexpr):
    """The scale of a group whose largest magnitude is given; see `quantize_rows`."""
    scale = tl.maximum(largest, 1e-4) * (1.0 / 448.0)
    if POWER_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def code_of(x, scale):
    """Numbers over their scale, as E4M3."""
    cut = tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0)
    return cut.to(tl.float8e4nv)


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    columns,
    groups,
    stride_x_row,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = cols < columns
    x = tl.load(x_ptr + row * stride_x_row + cols, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), axis=1), POWER_OF_TWO)
    code = code_of(x, tl.broadcast_to(scale[:, None], (GROUPS, GROUP)))
    tl.store(codes_ptr + row * columns + cols, code, mask=inside)
    tl.store(scales_ptr + row * groups + group, scale, mask=group < groups)


@quantize_rows.backend("triton", fits=fits_e4m3)
def triton_quantize_rows(x: Tensor, group: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Round each row to E4M3; groups are powers of two."""
    x = rows_of(x)
    rows, columns = x.shape
    groups = triton.cdiv(columns, group)
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if not rows:
        return codes, scales
    each = min(triton.next_power_of_2(groups), max(PROGRAM_COLUMNS // group, 1))
    _quantize_kernel[(rows, triton.cdiv(groups, each))](
        x, codes, scales, columns, groups, x.stride(0),
        GROUP=group, GROUPS=each, POWER_OF_TWO=power_of_two,
        num_warps=min(max(each * group // COLUMNS_PER_WARP, 1), 4),
    )  # fmt: skip
    return codes, scales
