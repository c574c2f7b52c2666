"""Inputs of rotate_cache_attend: decode rows of paged attention's cases, before they are rotated."""

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
    random_sinks,
    seeded,
    tolerance_of,
)

BLOCKS, BLOCK_TOKENS, POSITIONS = 64, 16, 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between cases."""

    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    """Tokens of each request, those of the step included."""
    q_width: int = 1
    window: int = 0
    rotary_dim: int | None = None
    norms: bool = False
    sinks: bool = False
    padding: int = 0
    """Requests behind the real ones: zeros that are written nowhere and see a null block of zeros."""


def _make(
    name: str, sizes: Sizes, dtype: torch.dtype, cache_dtype: torch.dtype
) -> tuple[object, ...]:
    generator = seeded(name)
    head_dim, q_width = sizes.head_dim, sizes.q_width
    requests = len(sizes.lengths) + sizes.padding
    tokens, real = requests * q_width, len(sizes.lengths) * q_width
    width = (sizes.heads + 2 * sizes.kv_heads) * head_dim
    qkv = torch.randn((tokens, width), generator=generator).to(dtype)
    qkv[real:] = 0
    rotary_dim = head_dim if sizes.rotary_dim is None else sizes.rotary_dim
    angles = torch.rand((POSITIONS, rotary_dim // 2), generator=generator) * 6.3
    is_exact = cache_dtype == FP8
    cos_sin = quarter_turns(angles) if is_exact else torch.cat([angles.cos(), angles.sin()], dim=1)
    shape = (BLOCKS, 2, sizes.kv_heads, BLOCK_TOKENS, head_dim)
    caches = torch.randn(shape, generator=generator).to(cache_dtype)
    caches[0] = 0
    table = torch.zeros((requests, -(-max(sizes.lengths) // BLOCK_TOKENS) + 1), dtype=torch.int32)
    free = (torch.randperm(BLOCKS - 1, generator=generator).int() + 1).tolist()
    lengths = torch.full((requests,), q_width, dtype=torch.int32)
    positions = torch.zeros(tokens, dtype=torch.int32)
    slots = torch.full((tokens,), -1)
    for row, length in enumerate(sizes.lengths):
        lengths[row] = length
        table[row, : -(-length // BLOCK_TOKENS)] = torch.tensor(
            [free.pop() for _ in range(-(-length // BLOCK_TOKENS))]
        )
        at = torch.arange(length - q_width, -(-length // BLOCK_TOKENS) * BLOCK_TOKENS)
        blocks, offsets = table[row, at // BLOCK_TOKENS].long(), at % BLOCK_TOKENS
        caches[blocks, :, :, offsets] = float("nan")
        here = slice(row * q_width, (row + 1) * q_width)
        positions[here] = at[:q_width].int()
        slots[here] = (blocks * BLOCK_TOKENS + offsets)[:q_width]
    norms = [torch.randn(head_dim, generator=generator).to(dtype) for _ in range(2)]
    q_norm, k_norm = norms if sizes.norms else (None, None)
    starts = torch.arange(0, tokens + 1, q_width, dtype=torch.int32)
    out = torch.full((tokens, sizes.heads, head_dim), float("nan"), dtype=dtype)
    return (
        qkv, positions, cos_sin, caches[:, 0], caches[:, 1], slots, q_norm, k_norm, 1e-6,
        table, lengths, starts, q_width, head_dim**-0.5, sizes.window, out,
        random_sinks(sizes.heads, generator) if sizes.sinks else None,
    )  # fmt: skip


SIZES = {
    "smollm2 alone": Sizes(9, 3, 64, (176,)),
    "smollm2 block edges": Sizes(9, 3, 64, (1, 2, 15, 16, 17, 32, 33, 127, 128, 129)),
    "smollm2 drafts": Sizes(9, 3, 64, (4, 5, 300, 16, 18, 34), q_width=4),
    "qwen3 head norms": Sizes(16, 8, 128, (1, 70, 257), norms=True),
    "qwen3 drafts": Sizes(4, 2, 128, (3, 66), q_width=3, norms=True),
    "one key head": Sizes(8, 1, 128, (40,)),
    "seven groups": Sizes(14, 2, 64, (20, 64)),
    "half rotated": Sizes(4, 4, 64, (50, 1), rotary_dim=32, norms=True),
    "narrow heads": Sizes(4, 2, 16, (9,)),
    "odd heads": Sizes(2, 1, 24, (7, 40), rotary_dim=20),
    "wide heads": Sizes(4, 1, 256, (50,), norms=True),
    "window": Sizes(4, 2, 64, (3, 64, 65, 250), window=48),
    "window drafts": Sizes(4, 2, 64, (3, 64, 250), q_width=3, window=48),
    "window of one": Sizes(2, 2, 32, (5, 33), window=1),
    "window of one draft": Sizes(2, 2, 32, (5, 34), q_width=2, window=1),
    "sinks": Sizes(6, 2, 64, (1, 40, 250), norms=True, sinks=True),
    "sinks drafts": Sizes(6, 2, 64, (3, 250), q_width=3, sinks=True),
    "window and sinks": Sizes(4, 2, 64, (3, 64, 250), window=48, sinks=True),
    "window and sinks drafts": Sizes(4, 2, 64, (3, 250), q_width=3, window=48, sinks=True),
    "padding": Sizes(4, 2, 64, (30, 3), padding=2, norms=True),
    "padding drafts": Sizes(4, 2, 64, (30, 3), q_width=2, padding=1),
}

OTHER_CACHES = (
    "smollm2 drafts", "seven groups", "half rotated", "odd heads", "wide heads", "window", "window drafts",
    "padding drafts", "window and sinks drafts",
)  # fmt: skip
"""Sizes whose caches also come in formats that the rows have not."""

rotate_cache_attend_cases = [
    Case(
        title,
        partial(_make, name, sizes, dtype, cache_dtype),
        tolerance_of(coarser(dtype, cache_dtype)),
        changed=(3, 4, 15),
        cache_dtype=other_cache(dtype, cache_dtype),
    )
    for dtype, cache_dtype in CACHED_IN
    for name, sizes in SIZES.items()
    if dtype == cache_dtype or name in OTHER_CACHES
    for title in [f"{name} {cached_in(dtype, cache_dtype)}"]
]
