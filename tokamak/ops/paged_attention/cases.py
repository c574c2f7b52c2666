"""Inputs of paged attention: prompt chunks, decode rows, rows of one width, block edges, windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tokamak.ops.case import (
    CACHED_IN,
    Case,
    cached_in,
    other_cache,
    random_sinks,
    seeded,
    tolerance_of,
)

BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between cases."""

    heads: int
    kv_heads: int
    head_dim: int
    prefill: tuple[tuple[int, int], ...] = ()
    """Queries of a request in this step, and tokens cached before."""
    decode: tuple[int, ...] = ()
    """Cached tokens of a request with `q_width` queries, these included; instead of `prefill`."""
    q_width: int = 1
    window: int = 0
    block_tokens: int = 16
    sinks: bool = False


def _make(
    name: str, sizes: Sizes, dtype: torch.dtype, cache_dtype: torch.dtype
) -> tuple[object, ...]:
    generator = seeded(name)
    assert not (sizes.prefill and sizes.decode), f"{name}: one kind of row a call"
    query_lens = [queries for queries, _ in sizes.prefill] + [sizes.q_width] * len(sizes.decode)
    lengths = [queries + before for queries, before in sizes.prefill] + list(sizes.decode)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = sum(query_lens)
    q = torch.randn((tokens, sizes.heads, sizes.head_dim), generator=generator).to(dtype)
    shape = (BLOCKS, 2, sizes.kv_heads, sizes.block_tokens, sizes.head_dim)
    caches = torch.randn(shape, generator=generator).to(cache_dtype)
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
        sizes.q_width if sizes.decode else 0, sizes.head_dim**-0.5, sizes.window, torch.full_like(q, float("nan")),
        random_sinks(sizes.heads, generator) if sizes.sinks else None,
    )  # fmt: skip


SIZES = {
    "smollm2 decode alone": Sizes(9, 3, 64, decode=(176,)),
    "smollm2 block edges": Sizes(9, 3, 64, decode=(1, 15, 16, 17, 127, 128, 129)),
    "smollm2 prompt": Sizes(9, 3, 64, prefill=((200, 0),)),
    "smollm2 chunks": Sizes(9, 3, 64, prefill=((1, 0), (16, 16), (17, 120), (40, 0))),
    "smollm2 drafts": Sizes(9, 3, 64, decode=(5, 300, 16, 18), q_width=4),
    "one head each prompt": Sizes(4, 4, 32, prefill=((9, 0),)),
    "one head each": Sizes(4, 4, 32, decode=(33, 2)),
    "one key head prompt": Sizes(8, 1, 128, prefill=((33, 3),)),
    "one key head": Sizes(8, 1, 128, decode=(40,)),
    "seven groups prompt": Sizes(14, 2, 64, prefill=((6, 0),)),
    "seven groups": Sizes(14, 2, 64, decode=(20,)),
    "narrow heads prompt": Sizes(4, 2, 16, prefill=((5, 0), (12, 5))),
    "narrow heads": Sizes(4, 2, 16, decode=(9,)),
    "wide heads prompt": Sizes(2, 1, 256, prefill=((21, 0),)),
    "wide heads": Sizes(2, 1, 256, decode=(50,)),
    "odd heads prompt": Sizes(2, 1, 20, prefill=((5, 0),)),
    "odd heads": Sizes(2, 1, 20, decode=(7,)),
    "window prompt": Sizes(4, 2, 64, prefill=((40, 0), (5, 170)), window=48),
    "window": Sizes(4, 2, 64, decode=(3, 64, 250), window=48),
    "window drafts": Sizes(4, 2, 64, decode=(3, 64, 250), q_width=3, window=48),
    "window of one prompt": Sizes(2, 2, 32, prefill=((20, 0),), window=1),
    "window of one": Sizes(2, 2, 32, decode=(5,), window=1),
    "large blocks prompt": Sizes(6, 2, 64, prefill=((70, 10),), block_tokens=64),
    "large blocks": Sizes(6, 2, 64, decode=(65, 130), block_tokens=64),
    "sinks prompt": Sizes(6, 2, 64, prefill=((33, 3), (1, 0), (90, 200)), sinks=True),
    "sinks": Sizes(6, 2, 64, decode=(1, 40, 250), sinks=True),
    "sinks drafts": Sizes(6, 2, 64, decode=(3, 250), q_width=3, sinks=True),
    "window and sinks prompt": Sizes(4, 2, 64, prefill=((40, 0), (5, 170)), window=48, sinks=True),
    "window and sinks": Sizes(4, 2, 64, decode=(3, 64, 250), window=48, sinks=True),
    "window and sinks drafts": Sizes(4, 2, 64, decode=(3, 250), q_width=3, window=48, sinks=True),
}


def _no_rows(dtype: torch.dtype) -> tuple[object, ...]:
    q = torch.ones((0, 2, 32), dtype=dtype)
    caches = torch.zeros((4, 1, 16, 32), dtype=dtype)
    none = torch.zeros(0, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    table = torch.zeros((0, 1), dtype=torch.int32)
    return q, caches, caches, table, none, starts, 1, 1.0, 0, q.clone(), None


OTHER_CACHES = (
    "smollm2 block edges", "smollm2 chunks", "smollm2 drafts", "odd heads prompt", "odd heads", "wide heads prompt",
    "wide heads", "window prompt", "window drafts", "large blocks",
    "window and sinks prompt", "window and sinks drafts",
)  # fmt: skip
"""Sizes whose caches also come in formats that the rows have not."""

paged_attention_cases = [
    Case(
        title,
        partial(_make, name, sizes, dtype, cache_dtype),
        tolerance_of(dtype),
        changed=(9,),
        cache_dtype=other_cache(dtype, cache_dtype),
    )
    for dtype, cache_dtype in CACHED_IN
    for name, sizes in SIZES.items()
    if dtype == cache_dtype or name in OTHER_CACHES
    for title in [f"{name} {cached_in(dtype, cache_dtype)}"]
]

paged_attention_cases.append(
    Case("no rows", partial(_no_rows, torch.float32), tolerance_of(torch.float32), changed=(9,))
)
