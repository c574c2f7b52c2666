"""Rotary embedding of neighbouring numbers at the end of a head, in plain PyTorch (arXiv 2104.09864; as DeepSeek)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op


@op
def rotate_pairs(
    x: Tensor, positions: Tensor, cos_sin: Tensor, backwards: bool, ratio: int = 1
) -> Tensor:
    """Turn the last rotary_dim numbers of each head, pair by neighbouring pair.

    x: [tokens, heads, head_dim]. positions: [tokens] int32. cos_sin: [positions, rotary_dim] float32, cosines of the
    rotary_dim / 2 pairs first, then sines. backwards: turn by the opposite angle. ratio: a row turns as the first
    of `ratio` positions would that its own is among. Returns a new tensor like x, computed in float32.
    """
    table = cos_sin.index_select(0, (positions - positions % ratio).long()).unsqueeze(1)
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if backwards:
        sin = -sin
    still, turning = x[..., : -2 * half], x[..., -2 * half :].float()
    first, second = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([still, turned.flatten(-2).to(x.dtype)], dim=-1)
