"""Products of few rows on Hopper: the kernels of `triton.py`, each begun while the one before it ends.

A program asks for weights, which nothing writes, before it waits for what the kernels before it wrote. So
the start of a kernel and its first reads hide behind the end of its predecessor.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokamak.device.facts import DeviceFacts
from tokamak.ops.linear.few_rows import (
    few_rows_after_norm,
    few_rows_gated,
    few_rows_into,
    few_rows_linear,
)
from tokamak.ops.linear.triton import multiply, suits


@triton.jit
def _start():
    gdc_launch_dependents()


@triton.jit
def _ready():
    gdc_wait()


OVERLAPPED = {"START": _start, "READY": _ready, "launch_pdl": True}


def fits(facts: DeviceFacts) -> bool:
    """Hopper with Triton."""
    return facts.vendor == "nvidia" and facts.arch == "sm90" and facts.has("triton")


@few_rows_linear.backend("triton_sm90", fits=fits)
def sm90_few_rows_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply rows with a matrix, accumulating in float32."""
    if not suits(x, weight):
        return few_rows_linear.reference(x, weight, out_dtype)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    multiply(x, weight, out, launch=OVERLAPPED)
    return out


@few_rows_after_norm.backend("triton_sm90", fits=fits)
def sm90_few_rows_after_norm(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Norm rows of the residual stream, then multiply with a matrix."""
    if not suits(residual, weight):
        return few_rows_after_norm.reference(residual, norm_weight, eps, weight, out_dtype)
    shape = (residual.shape[0], weight.shape[0])
    out = torch.empty(shape, dtype=out_dtype, device=residual.device)
    multiply(residual, weight, out, norm_weight=norm_weight, eps=eps, launch=OVERLAPPED)
    return out


@few_rows_gated.backend("triton_sm90", fits=fits)
def sm90_few_rows_gated(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor
) -> Tensor:
    """Norm rows of the residual stream, multiply with gate and up, and multiply silu(gate) with up."""
    if not suits(residual, weight):
        return few_rows_gated.reference(residual, norm_weight, eps, weight)
    shape = (residual.shape[0], weight.shape[0] // 2)
    out = torch.empty(shape, dtype=residual.dtype, device=residual.device)
    multiply(residual, weight, out, norm_weight=norm_weight, eps=eps, gated=True, launch=OVERLAPPED)
    return out


@few_rows_into.backend("triton_sm90", fits=fits)
def sm90_few_rows_into(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Multiply rows with a matrix and add the result to the residual stream in place."""
    if not suits(x, weight) or residual.stride(1) != 1:
        return few_rows_into.reference(x, weight, residual)
    multiply(x, weight, residual, into=True, launch=OVERLAPPED)
    return residual
