"""Gated experts and their weighted sum in plain PyTorch; no number is read to the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.weight import widened
from tokamak.ops.quant_linear.reference import ScaleBlocks, fake_quantized
from tokamak.ops.registry import op

GATHERED_PAIRS = 32
"""Up to so many pairs of row and expert, weights are gathered by pair; above, every expert sees every row."""


@op
def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Send each row through its experts, down(silu(gate(x)) * up(x)), and add what they say by weight.

    x: [rows, width]. ids: int32 [rows, chosen], each in [0, experts); weights: float32 [rows, chosen].
    gate_up: [experts, 2 * inner, width], gate first; down: [experts, width, inner], both in the dtype of x.
    Returns [rows, width] in the dtype of x; sums over experts are float32. Rows do not mix: one that is not a
    number stays alone.
    """
    if ids.numel() <= GATHERED_PAIRS:
        return _by_pair(x, ids, weights, gate_up, down)
    return _by_expert(x, ids, weights, gate_up, down)


@op
def scaled_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    blocks: ScaleBlocks,
) -> Tensor:
    """Do what `moe_experts` does with 8-bit weights, and round rows to 8 bits before both products; W8A8.

    Rows, and what gate and up make of them in the dtype of x, are rounded as `scaled_linear` does.

    x, ids, weights: as of `moe_experts`. gate_up: float8_e4m3fn [experts, 2 * inner, width], down: [experts, width,
    inner]; scales: float32 [experts, rows / blocks.rows, columns / blocks.columns], rounded up.
    """
    rounded, up = fake_quantized(x, blocks), widened(gate_up, gate_up_scales, blocks[:2])
    back = widened(down, down_scales, blocks[:2])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        gate, above = functional.linear(rounded, up[expert]).chunk(2, dim=-1)
        hidden = (functional.silu(gate) * above).to(x.dtype)
        mixed = functional.linear(fake_quantized(hidden, blocks), back[expert])
        share = (weights * (ids == expert)).sum(dim=1, keepdim=True)
        chosen = (ids == expert).any(dim=1, keepdim=True)
        total += torch.where(chosen, share * mixed, 0.0)
    return total.to(x.dtype)


def _by_pair(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Read the chosen experts alone."""
    pairs = ids.flatten()
    rows = x.repeat_interleave(ids.shape[1], dim=0).unsqueeze(-1)
    gate, up = torch.bmm(gate_up.index_select(0, pairs), rows).chunk(2, dim=1)
    mixed = torch.bmm(down.index_select(0, pairs), functional.silu(gate) * up)
    parts = mixed.view(*ids.shape, x.shape[1]).float()
    return (parts * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _by_expert(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Read every expert once."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        gate, up = functional.linear(x, gate_up[expert]).chunk(2, dim=-1)
        mixed = functional.linear(functional.silu(gate) * up, down[expert])
        share = (weights * (ids == expert)).sum(dim=1, keepdim=True)
        # Not a product alone: what an expert makes of rows it was not chosen for may be no number.
        chosen = (ids == expert).any(dim=1, keepdim=True)
        total += torch.where(chosen, share * mixed.float(), 0.0)
    return total.to(x.dtype)
