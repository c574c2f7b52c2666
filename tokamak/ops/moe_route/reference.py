"""Routing to the likeliest experts in plain PyTorch (Fedus et al. 2021, arXiv 2101.03961; top-k as in Qwen3)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op


@op
def moe_route(scores: Tensor, chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the `chosen` likeliest experts of each row, likeliest first; of equals the lower number.

    scores: [rows, experts], any float dtype, at least `chosen` experts. Returns expert ids, int32 [rows, chosen],
    and weights, float32 [rows, chosen]: shares of a softmax over all experts in float32, or with `renormalise`
    over the chosen ones. A row that is not a number gets ids in range, and weights that are not numbers.
    """
    ids = scores.float().sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    weights = scores.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.int(), weights
