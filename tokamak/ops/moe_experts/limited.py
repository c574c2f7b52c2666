"""Gated experts with limits, weighted before the last product, in plain PyTorch (DeepSeek V4 and V4.1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.ops.activation.limited import silu_mul_limited
from tokamak.ops.moe_experts.reference import GATHERED_PAIRS
from tokamak.ops.registry import op


@op
def moe_experts_limited(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """Send each row through its experts and add what they say, down(weight * silu(gate(x)) * up(x)).

    gate is at most `limit`, up from -limit to limit. The weight comes before the last product, whose rows may be
    rounded. x: [rows, width]. ids: int32 [rows, chosen], each in [0, experts); weights: float32 [rows, chosen].
    gate_up: [experts, 2 * inner, width], gate first; down: [experts, width, inner], both in the dtype of x.
    Returns [rows, width] in the dtype of x; sums over experts are float32. Rows do not mix: one that is not a
    number stays alone.
    """
    if ids.numel() <= GATHERED_PAIRS:
        return _by_pair(x, ids, weights, gate_up, down, limit)
    return _by_expert(x, ids, weights, gate_up, down, limit)


def _by_pair(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """Read the chosen experts alone."""
    pairs = ids.flatten()
    rows = x.repeat_interleave(ids.shape[1], dim=0).unsqueeze(-1)
    both = torch.bmm(gate_up.index_select(0, pairs), rows).squeeze(-1)
    inner = _weighted(both, weights.flatten().unsqueeze(-1), limit)
    parts = torch.bmm(down.index_select(0, pairs), inner.unsqueeze(-1))
    return parts.view(*ids.shape, x.shape[1]).float().sum(dim=1).to(x.dtype)


def _by_expert(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """Read every expert once."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        chosen = ids == expert
        share = (weights * chosen).sum(dim=1, keepdim=True)
        inner = _weighted(functional.linear(x, gate_up[expert]), share, limit)
        mixed = functional.linear(inner, down[expert]).float()
        # Not a product alone: what an expert makes of rows it was not chosen for may be no number.
        total += torch.where(chosen.any(dim=1, keepdim=True), mixed, 0.0)
    return total.to(x.dtype)


def _weighted(both: Tensor, weights: Tensor, limit: float) -> Tensor:
    """Gate times up by weight, rounded once to the dtype of `both`."""
    return (silu_mul_limited.reference(both.float(), limit) * weights).to(both.dtype)
