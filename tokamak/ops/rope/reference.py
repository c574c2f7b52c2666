"""Rotary embedding (Su et al. 2021, arXiv 2104.09864; half-rotation layout) in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.norm.reference import rms_norm
from tokamak.ops.registry import op

FP8_LARGEST = 448.0
"""The largest number of E4M3 (Micikevicius et al. 2022, arXiv 2209.05433, table 1), which has no infinity."""


@op
def rotate_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    write_slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Norm (where weights are given) and rotate queries and keys; write keys and values to the cache.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], queries first, then keys, then values.
    positions: [tokens] int32. cos_sin: [positions, rotary_dim] float32, cosines of the rotary_dim / 2
    frequencies first, then sines; rotary_dim may be less than head_dim, the rest passes unrotated.
    k_cache, v_cache: [blocks, kv_heads, block_tokens, head_dim], in any dtype: rows are rounded to it, in
    float8_e4m3fn to the nearest of its numbers, which end at 448.
    write_slots: [tokens] int64, block * block_tokens + offset; -1 writes nothing.
    q_norm, k_norm: [head_dim] RMS norm weights applied per head before rotation, or None.
    Returns queries [tokens, heads, head_dim] in the dtype of qkv.
    """
    tokens = qkv.shape[0]
    kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.view(tokens, heads + 2 * kv_heads, head_dim).split(
        [heads, kv_heads, kv_heads], dim=1
    )
    if q_norm is not None:
        q = rms_norm.reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm.reference(k, k_norm, eps)
    table = cos_sin[positions.long()]
    q, k = _rotate(q, table), _rotate(k, table)
    _write(k, k_cache, write_slots)
    _write(v, v_cache, write_slots)
    return q


def _write(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store rows [tokens, kv_heads, head_dim] where their slots say.

    No shape depends on a slot, so that a recording holds for others: a row without one does again what another
    row does, or if there is none, writes back what is there.
    """
    if not len(rows):
        return
    kept = slots >= 0
    who = torch.where(kept, torch.arange(len(rows), device=rows.device), kept.int().argmax())
    rows, slots = rows[who], slots[who]
    places = slots.clamp(min=0)
    blocks, offsets = places // cache.shape[2], places % cache.shape[2]
    there = cache[blocks, :, offsets].float()
    new = torch.where((slots >= 0)[:, None, None], rows.float(), there)
    cache[blocks, :, offsets] = stored(new, cache.dtype)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a cache of a dtype keeps them: rounded to the nearest, ties to even.

    float8_e4m3fn has no scale: what lies beyond its largest number becomes that, with its sign; NaN stays NaN.
    """
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-FP8_LARGEST, FP8_LARGEST)
    return x.to(dtype)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the first rotary_dim of each head by its position; x [tokens, heads, head_dim]."""
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    return turned.to(x.dtype)
