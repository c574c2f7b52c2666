"""Experts in Triton: by pair of row and expert where pairs are few, else grouped by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.moe_experts.matrix import ExpertMatrix
from tokamak.ops.moe_experts.reference import moe_experts, scaled_experts
from tokamak.ops.moe_experts.triton_few import experts_of_few
from tokamak.ops.moe_experts.triton_grouped import grouped_experts
from tokamak.ops.quant_linear.reference import ScaleBlocks
from tokamak.ops.triton_facts import fits, fits_e4m3, rows_of

FEW_PAIRS = 16
"""Up to so many pairs, few share an expert, and two launches cost less than reading one twice."""


@moe_experts.backend("triton", fits=fits)
def triton_moe_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Send each row through its experts and add what they say by weight."""
    return run_experts(x, ids, weights, ExpertMatrix(gate_up), ExpertMatrix(down))


@scaled_experts.backend("triton", fits=fits_e4m3)
def triton_scaled_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    blocks: ScaleBlocks,
) -> Tensor:
    """Send each row, rounded to 8 bits, through its experts and add what they say by weight."""
    up = ExpertMatrix(gate_up, gate_up_scales, blocks)
    return run_experts(x, ids, weights, up, ExpertMatrix(down, down_scales, blocks))


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    limit: float = 0.0,
) -> Tensor:
    """The weighted sum over experts in the form that suits its size; arguments as of the ops. limit: 0 for none."""
    if not ids.numel():
        return torch.empty_like(x)
    # Widening numbers of 4 bits costs what is saved by not waiting for the order of pairs.
    few = ids.numel() <= FEW_PAIRS and not gate_up.packed
    run = experts_of_few if few else grouped_experts
    ids, weights = ids.contiguous(), weights.contiguous()
    return run(rows_of(x), ids, weights, gate_up, down, limit=limit)
