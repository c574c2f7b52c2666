"""Inputs of paged attention: prompt chunks beside decode rows, block edges, windows, padding rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tokamak.ops.case import Case, seeded, tolerance_of

BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between cases."""

    heads: int
    kv_heads: int
    head_dim: int
    prefill: tuple[tuple[int, int], ...]
    """Queries of a request in this step, and tokens cached before."""
    decode: tuple[int, ...]
    """Cached tokens of a request with its one query."""
    window: int = 0
    block_tokens: int = 16
    padding: int = 0


def _make(name: str, sizes: Sizes, dtype: torch.dtype) -> tuple[object, ...]:
    generator = seeded(name)
    query_lens = [queries for queries, _ in sizes.prefill] + [1] * len(sizes.decode)
    lengths = [queries + before for queries, before in sizes.prefill] + list(sizes.decode)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = sum(query_lens) + sizes.padding
    q = torch.randn((tokens, sizes.heads, sizes.head_dim), generator=generator).to(dtype)
    shape = (BLOCKS, 2, sizes.kv_heads, sizes.block_tokens, sizes.head_dim)
    caches = torch.randn(shape, generator=generator).to(dtype)
    caches[0] = float("nan")
    width = max(-(-length // sizes.block_tokens) for length in lengths) + 1
    table = torch.zeros((len(lengths), width), dtype=torch.int32)
    free = (torch.randperm(BLOCKS - 1, generator=generator).int() + 1).tolist()
    for row, length in enumerate(lengths):
        blocks = -(-length // sizes.block_tokens)
        table[row, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
        if length % sizes.block_tokens:
            caches[int(table[row, blocks - 1]), :, :, length % sizes.block_tokens :] = float("nan")
    return (
        q, caches[:, 0], caches[:, 1], table, torch.tensor(lengths, dtype=torch.int32), starts,
        len(sizes.prefill), sizes.head_dim**-0.5, sizes.window,
    )  # fmt: skip


SIZES = {
    "smollm2 decode alone": Sizes(9, 3, 64, (), (176,)),
    "smollm2 block edges": Sizes(9, 3, 64, (), (1, 15, 16, 17, 127, 128, 129)),
    "smollm2 prompt": Sizes(9, 3, 64, ((200, 0),), ()),
    "smollm2 mixed": Sizes(9, 3, 64, ((1, 0), (16, 16), (17, 120), (40, 0)), (5, 300), padding=3),
    "one head each": Sizes(4, 4, 32, ((9, 0),), (33, 2)),
    "one key head": Sizes(8, 1, 128, ((33, 3),), (40,)),
    "seven groups": Sizes(14, 2, 64, ((6, 0),), (20,)),
    "narrow heads": Sizes(4, 2, 16, ((5, 0), (12, 5)), (9,)),
    "wide heads": Sizes(2, 1, 256, ((21, 0),), (50,)),
    "odd heads": Sizes(2, 1, 20, ((5, 0),), (7,)),
    "window": Sizes(4, 2, 64, ((40, 0), (5, 170)), (3, 64, 250), window=48),
    "window of one": Sizes(2, 2, 32, ((20, 0),), (5,), window=1),
    "large blocks": Sizes(6, 2, 64, ((70, 10),), (65, 130), block_tokens=64),
}


def _only_padding(dtype: torch.dtype) -> tuple[object, ...]:
    q = torch.ones((2, 2, 32), dtype=dtype)
    caches = torch.zeros((4, 1, 16, 32), dtype=dtype)
    none = torch.zeros(0, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    return q, caches, caches, torch.zeros((0, 1), dtype=torch.int32), none, starts, 0, 1.0, 0


paged_attention_cases = [
    Case(
        title,
        partial(_make, name, sizes, dtype),
        tolerance_of(dtype),
    )
    for dtype in (torch.float32, torch.bfloat16)
    for name, sizes in SIZES.items()
    for title in [f"{name} {str(dtype).removeprefix('torch.')}"]
]

paged_attention_cases.append(
    Case("only padding rows", partial(_only_padding, torch.float32), tolerance_of(torch.float32))
)
