"""Experts with limits in Triton: the kernels of those without, told the limit, for numbers of 16, 8 and 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.moe_experts.limited import moe_experts_limited
from tokamak.ops.moe_experts.limited_stored import packed_experts_limited, scaled_experts_limited
from tokamak.ops.moe_experts.matrix import ExpertMatrix
from tokamak.ops.moe_experts.triton import run_experts
from tokamak.ops.quant_linear.reference import ScaleBlocks
from tokamak.ops.triton_facts import fits, fits_e4m3


@moe_experts_limited.backend("triton", fits=fits)
def triton_moe_experts_limited(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """Send each row through its experts and add what they say."""
    return run_experts(x, ids, weights, ExpertMatrix(gate_up), ExpertMatrix(down), limit)


@scaled_experts_limited.backend("triton", fits=fits_e4m3)
def triton_scaled_experts_limited(
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
    """Send each row, rounded to 8 bits, through its experts and add what they say."""
    up = ExpertMatrix(gate_up, gate_up_scales, blocks)
    return run_experts(x, ids, weights, up, ExpertMatrix(down, down_scales, blocks), limit)


@packed_experts_limited.backend("triton", fits=fits)
def triton_packed_experts_limited(
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
    """The same with matrices of 4 bits, which are widened in registers."""
    up = ExpertMatrix(gate_up, gate_up_scales.view(torch.uint8), None, rounded)
    back = ExpertMatrix(down, down_scales.view(torch.uint8), None, rounded)
    return run_experts(x, ids, weights, up, back, limit)
