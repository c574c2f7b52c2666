"""Inputs of the embedding: one token to many, repeated ids, the last row of the table, odd widths."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, seeded

VOCAB = 301
SIZES = ((1, 576), (40, 64), (3, 33), (0, 16))


def _make(name: str, tokens: int, width: int, dtype: torch.dtype) -> tuple[object, ...]:
    generator = seeded(name)
    token_ids = torch.randint(0, VOCAB, (tokens,), generator=generator).int()
    token_ids[:1] = VOCAB - 1
    return token_ids, torch.randn((VOCAB, width), generator=generator).to(dtype)


embed_cases = [
    Case(name, partial(_make, name, tokens, width, dtype), tolerance=0.0)
    for dtype in (torch.float32, torch.bfloat16)
    for tokens, width in SIZES
    for name in [f"{tokens}x{width} {str(dtype).removeprefix('torch.')}"]
]
