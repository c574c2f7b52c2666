"""Products of few rows with a matrix, and what a decoder layer does right before and after one.

In a decode step the weight is read once and everything else is small, so a product takes the norm in
front of it, the activation or the residual sum behind it along. The bodies are the definition; a backend
is meant for at most FEW_ROWS rows and may send more of them here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.ops.activation.reference import silu_mul
from tokamak.ops.norm.reference import rms_norm
from tokamak.ops.registry import op

FEW_ROWS = 32
"""Rows up to which one pass over the weight costs more than all arithmetic on a GPU."""


@op
def few_rows_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply rows with a matrix, accumulating in float32.

    x: [rows, columns], weight: [features, columns] in the dtype of x, or in float32 if `out_dtype` is that; returns
    [rows, features] in `out_dtype`, rounded once.
    """
    return product(x.to(weight.dtype), weight, out_dtype)


@op
def few_rows_after_norm(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Norm rows of the residual stream, then multiply with a matrix.

    residual: [rows, columns], norm_weight: [columns], weight: [features, columns], all in one dtype;
    returns [rows, features] in `out_dtype`.
    """
    return product(rms_norm.reference(residual, norm_weight, eps), weight, out_dtype)


@op
def few_rows_gated(
    residual: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor
) -> Tensor:
    """Norm rows of the residual stream, multiply with gate and up, and multiply silu(gate) with up.

    residual: [rows, columns], norm_weight: [columns], or None for rows that are normed already, weight:
    [2 * inner, columns], the rows of gate first, all in one dtype; returns [rows, inner] in the same dtype.
    """
    if norm_weight is not None:
        residual = rms_norm.reference(residual, norm_weight, eps)
    return silu_mul.reference(functional.linear(residual, weight))


@op
def few_rows_into(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Multiply rows with a matrix and add the result to the residual stream in place; returns the stream.

    x: [rows, columns], weight: [features, columns], residual: [rows, features], all in one dtype.
    """
    residual += functional.linear(x, weight)
    return residual


def product(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply rows with a matrix to `out_dtype`; a GPU writes float32 sums of 16-bit products as they are."""
    if out_dtype == x.dtype:
        return functional.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=out_dtype)
    return functional.linear(x.to(out_dtype), weight.to(out_dtype))
