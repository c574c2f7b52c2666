"""Experts in Triton: by pair of row and expert where pairs are few, else grouped by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.moe_experts.reference import moe_experts
from tokamak.ops.moe_experts.triton_few import experts_of_few
from tokamak.ops.moe_experts.triton_grouped import grouped_experts
from tokamak.ops.triton_facts import fits, rows_of

FEW_PAIRS = 16
"""Up to so many pairs, few share an expert, and two launches cost less than reading one twice."""


@moe_experts.backend("triton", fits=fits)
def triton_moe_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Send each row through its experts and add what they say by weight."""
    if not ids.numel():
        return torch.empty_like(x)
    x, ids, weights = rows_of(x), ids.contiguous(), weights.contiguous()
    run = experts_of_few if ids.numel() <= FEW_PAIRS else grouped_experts
    return run(x, ids, weights, gate_up, down)
