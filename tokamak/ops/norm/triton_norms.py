# pyright: reportArgumentType=false, reportCallIssue=false
"""Kernels of the residual stream in Triton: one program per row and one pass for norms, tiles of a row for a sum; float32 inside."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.triton_facts import rows_of
from tokamak.ops.triton_order import IN_ORDER

NUMBERS_PER_WARP = 512
"""Two loads of 16 bytes for every lane, of bfloat16: few enough registers, and enough bytes on their way."""
MAX_WARPS = 16
SUM_TILE = 1024
SUM_WARPS = 4


def warps_for(width: int) -> int:
    """Warps of a program that holds a row of `width` numbers, a power of two."""
    return min(max(width // NUMBERS_PER_WARP, 1), MAX_WARPS)


@triton.jit
def normed(x, weight, width, eps, KIND: tl.constexpr):
    """A row x of float32, zero behind its width, normed and then weighed, each rounded to KIND; weight: float32."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    return ((x * scale).to(KIND).to(tl.float32) * weight).to(KIND)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    width,
    stride_x_row,
    stride_residual_row,
    eps,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    inside = cols < width
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    READY()
    x = tl.load(x_ptr + row * stride_x_row + cols, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        stream_ptr = residual_ptr + row * stride_residual_row + cols
        stream = tl.load(stream_ptr, mask=inside, other=0.0).to(tl.float32)
        total = (stream + x).to(residual_ptr.dtype.element_ty)
        tl.store(stream_ptr, total, mask=inside)
        x = total.to(tl.float32)
    out = normed(x, weight, width, eps, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + cols, out, mask=inside)


@triton.jit
def _add_residual_kernel(
    x_ptr, residual_ptr, width, stride_x_row, stride_residual_row, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < width
    stream_ptr = residual_ptr + row * stride_residual_row + cols
    x = tl.load(x_ptr + row * stride_x_row + cols, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(stream_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(stream_ptr, (stream + x).to(residual_ptr.dtype.element_ty), mask=inside)


class TritonNorms:
    """The norms on these kernels; `launch`: START and READY of them, and how a chip is to start them."""

    def __init__(self, launch: Mapping[str, object] = IN_ORDER) -> None:
        self._launch = launch

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root mean square, then by weight."""
        x = rows_of(x)
        return self._norm(x, x, weight, eps, adds=False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual stream in place, then norm the sum; rows of the stream lie in one piece."""
        return self._norm(rows_of(x), residual, weight, eps, adds=True)

    def _norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, adds: bool
    ) -> Tensor:
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=residual.dtype, device=x.device)
        tile = triton.next_power_of_2(width)
        _rms_norm_kernel[(rows,)](
            x, residual, weight, out, width, x.stride(0), residual.stride(0), eps,
            ADDS=adds, WIDTH=tile, num_warps=warps_for(tile), **self._launch,
        )  # fmt: skip
        return out


def add_rows(x: Tensor, residual: Tensor) -> Tensor:
    """Add x to the residual stream in place, and return the stream; its rows lie in one piece."""
    x = rows_of(x)
    rows, width = x.shape
    _add_residual_kernel[(rows, triton.cdiv(width, SUM_TILE))](
        x, residual, width, x.stride(0), residual.stride(0), TILE=SUM_TILE, num_warps=SUM_WARPS
    )
    return residual
