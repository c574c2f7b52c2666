"""Inputs of rotate_and_cache: grouped heads, partial rotation, head norms, padding rows, block edges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tokamak.ops.case import (
    CACHED_IN,
    FP8,
    Case,
    cached_in,
    coarser,
    other_cache,
    quarter_turns,
    seeded,
    tolerance_of,
)

BLOCKS, BLOCK_TOKENS, POSITIONS = 6, 16, 300


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between cases."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    norms: bool
    tokens: int
    padding: int = 0
    """Tokens in front of the others that are written nowhere."""
    wild: bool = False
    """Whether numbers reach from far below what fp8 tells apart to far above its largest,
    and values to infinity and NaN."""


def _make(
    name: str, sizes: Sizes, dtype: torch.dtype, cache_dtype: torch.dtype
) -> tuple[object, ...]:
    generator = seeded(name)
    width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    qkv = torch.randn((sizes.tokens, width), generator=generator).to(dtype)
    positions = torch.randint(0, POSITIONS, (sizes.tokens,), generator=generator).int()
    angles = torch.rand((POSITIONS, sizes.rotary_dim // 2), generator=generator) * 6.3
    is_exact = cache_dtype == FP8
    cos_sin = quarter_turns(angles) if is_exact else torch.cat([angles.cos(), angles.sin()], dim=1)
    shape = (BLOCKS, 2, sizes.kv_heads, BLOCK_TOKENS, sizes.head_dim)
    caches = torch.zeros(shape, dtype=cache_dtype)
    slots = torch.randperm(BLOCKS * BLOCK_TOKENS, generator=generator)[: sizes.tokens]
    slots[2::3] = -1
    slots[: sizes.padding] = -1
    norms = [torch.randn(sizes.head_dim, generator=generator).to(dtype) for _ in range(2)]
    q_norm, k_norm = norms if sizes.norms else (None, None)
    if sizes.wild:
        qkv *= 10.0 ** torch.arange(-4, 4).repeat(width)[:width].to(dtype)
    if sizes.wild and cache_dtype == FP8:
        qkv[:, -3:] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    return qkv, positions, cos_sin, caches[:, 0], caches[:, 1], slots, q_norm, k_norm, 1e-6


SIZES = {
    "smollm2 decode": Sizes(9, 3, 64, 64, False, 1),
    "smollm2 batch": Sizes(9, 3, 64, 64, False, 33),
    "qwen3 head norms": Sizes(16, 8, 128, 128, True, 5),
    "half rotated": Sizes(4, 4, 64, 32, False, 4),
    "narrow heads": Sizes(4, 1, 16, 16, True, 17),
    "odd rotation": Sizes(2, 1, 24, 20, False, 6),
    "wide heads": Sizes(4, 1, 256, 256, True, 3),
    "wild": Sizes(4, 2, 64, 64, False, 40, wild=True),
    "padding first": Sizes(4, 2, 16, 16, False, 9, padding=2),
    "padding alone": Sizes(4, 2, 16, 16, True, 3, padding=3),
    "no tokens": Sizes(2, 1, 16, 16, False, 0),
}

rotate_and_cache_cases = [
    Case(
        title,
        partial(_make, name, sizes, dtype, cache_dtype),
        tolerance_of(coarser(dtype, cache_dtype)),
        changed=(3, 4),
        cache_dtype=other_cache(dtype, cache_dtype),
    )
    for dtype, cache_dtype in CACHED_IN
    for name, sizes in SIZES.items()
    for title in [f"{name} {cached_in(dtype, cache_dtype)}"]
]
