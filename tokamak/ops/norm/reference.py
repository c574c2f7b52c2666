"""RMS norm in plain PyTorch (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by weight.

    x: [rows, width], weight: [width]; returns [rows, width] in the dtype of x. Accumulates in float32.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


@op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream in place, then norm the sum.

    x, residual: [rows, width], weight: [width]; residual holds residual + x afterwards; returns the
    norm of it, [rows, width] in the dtype of x.
    """
    residual += x
    return rms_norm.reference(residual, weight, eps)


@op
def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """Add x to the residual stream in place, and return the stream.

    x, residual: [rows, width] in the same dtype.
    """
    residual += x
    return residual
