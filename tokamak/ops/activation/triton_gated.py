# pyright: reportArgumentType=false, reportCallIssue=false
"""Kernels of gated activations in Triton: one program per tile of a row, one pass, float32 inside."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.triton_facts import rows_of
from tokamak.ops.triton_order import IN_ORDER

TILE = 1024
WARPS = 4


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    stride_gate_up_row,
    TILE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < width
    gate_ptr = gate_up_ptr + row * stride_gate_up_row + cols
    READY()
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (silu * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + cols, out, mask=inside)


@triton.jit
def gated(gate, up, LIMIT: tl.constexpr):
    """silu(gate) * up; with a limit above 0 gate is at most that, up from minus that to that, and no number stays none."""
    if LIMIT > 0.0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_limited_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    stride_gate_up_row,
    LIMIT: tl.constexpr,
    TILE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < width
    gate_ptr = gate_up_ptr + row * stride_gate_up_row + cols
    READY()
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    out = gated(gate, up, LIMIT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + cols, out, mask=inside)


class TritonActivations:
    """Gated activations on these kernels; `launch`: START and READY of them, and how a chip is to start them."""

    def __init__(self, launch: Mapping[str, object] = IN_ORDER) -> None:
        self._launch = launch

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Multiply silu(gate) with up."""
        gate_up = rows_of(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        _silu_mul_kernel[(rows, triton.cdiv(width, TILE))](
            gate_up, out, width, gate_up.stride(0), TILE=TILE, num_warps=WARPS, **self._launch
        )
        return out

    def silu_mul_limited(self, gate_up: Tensor, limit: float) -> Tensor:
        """The same with limits."""
        gate_up = rows_of(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        _silu_mul_limited_kernel[(rows, triton.cdiv(width, TILE))](
            gate_up, out, width, gate_up.stride(0), LIMIT=limit, TILE=TILE, num_warps=WARPS,
            **self._launch,
        )  # fmt: skip
        return out
