"""Where do paged rows of a request lie? Row numbers in a cache, for the references of ops that gather them."""

from __future__ import annotations

import torch
from torch import Tensor


def requests_of_rows(query_starts: Tensor, q_width: int, tokens: int) -> Tensor:
    """The request of every token row, int64 [tokens].

    query_starts: [requests + 1] int32, the last is `tokens`. q_width: rows of every request, or 0 where they differ.
    """
    at = torch.arange(tokens, device=query_starts.device)
    if q_width:
        return at // q_width
    return torch.searchsorted(query_starts[1:].long(), at, right=True)


def place_of(block_table: Tensor, requests: Tensor, entries: Tensor, block_rows: int) -> Tensor:
    """Rows of a cache that hold entries of requests: int64 in the shape of `entries`.

    block_table: [requests, blocks] int32. requests: int64, broadcastable to entries. entries: int64, none negative.
    block_rows: rows a block holds.
    """
    flat = requests * block_table.shape[1] + entries // block_rows
    blocks = block_table.reshape(-1).index_select(0, flat.expand(entries.shape).reshape(-1))
    return blocks.view(entries.shape).long() * block_rows + entries % block_rows


def rows_of_cache(cache: Tensor) -> Tensor:
    """A cache of one head, [blocks, 1, rows, width], as [all rows, width] over the same memory."""
    assert cache.shape[1] == 1, f"a cache of {cache.shape[1]} heads"
    return cache.view(-1, cache.shape[3])


def bands(rows: int, numbers_per_row: int, limit: int = 1 << 24) -> list[slice]:
    """Rows cut into stretches whose temporaries have at most `limit` numbers, or one row each."""
    height = max(1, limit // max(numbers_per_row, 1))
    return [slice(at, min(at + height, rows)) for at in range(0, rows, height)]
