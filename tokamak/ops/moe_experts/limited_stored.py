"""Gated experts with limits whose weights stay in 8 or 4 bits, in plain PyTorch; rows are rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.weight import widened
from tokamak.ops.activation.limited import silu_mul_limited
from tokamak.ops.moe_experts.cut_words import in_columns
from tokamak.ops.quant_linear.reference import ScaleBlocks, fake_quantized
from tokamak.ops.quantize.blocks import decode_fp4
from tokamak.ops.quantize.reference import fake_fp8
from tokamak.ops.registry import op


@op
def scaled_experts_limited(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    blocks: ScaleBlocks,
    limit: float,
) -> Tensor:
    """Do what `moe_experts_limited` does with 8-bit weights, and round rows to 8 bits before both products; W8A8.

    Rows, and what gate and up make of them by weight in the dtype of x, are rounded as `scaled_linear` does.

    x, ids, weights, limit: as of `moe_experts_limited`; matrices, their scales and blocks as of `scaled_experts`.
    """
    up, back = widened(gate_up, gate_up_scales, blocks[:2]), widened(down, down_scales, blocks[:2])
    return _added(x, ids, weights, up, back, limit, lambda rows: fake_quantized(rows, blocks))


@op
def packed_experts_limited(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    rounded: int,
    limit: float,
) -> Tensor:
    """Do what `moe_experts_limited` does with weights of 4 bits (MXFP4), and round rows to 8 bits before both products.

    Rows, and what gate and up make of them by weight in the dtype of x, are rounded to E4M3 with a power of two for
    `rounded` columns. Numbers of both sides are then exact in bfloat16.

    x, ids, weights, limit: as of `moe_experts_limited`. gate_up: uint8 [experts, 2 * inner, width / 2], two E2M1 codes
    to a byte, the even column low, with their bits where `in_places` puts them; down: uint8 [experts, width, inner / 2];
    scales: float8_e8m0fnu [experts, rows, columns / 32]. rounded: a power of two from 32 on that divides width and inner.
    """
    up = decode_fp4(in_columns(gate_up), gate_up_scales)
    back = decode_fp4(in_columns(down), down_scales)
    return _added(x, ids, weights, up, back, limit, lambda rows: fake_fp8.reference(rows, rounded))


def _added(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    back: Tensor,
    limit: float,
    as_rounded: Callable[[Tensor], Tensor],
) -> Tensor:
    """The sum over all experts, each of which sees every row; up, back: float32, as gate_up and down of the ops."""
    rows = as_rounded(x).float()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(up.shape[0]):
        chosen = ids == expert
        share = (weights * chosen).sum(dim=1, keepdim=True)
        gated = silu_mul_limited.reference(functional.linear(rows, up[expert]), limit)
        mixed = functional.linear(as_rounded((gated * share).to(x.dtype)).float(), back[expert])
        total += torch.where(chosen.any(dim=1, keepdim=True), mixed, 0.0)
    return total.to(x.dtype)
