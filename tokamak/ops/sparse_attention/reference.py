"""Attention of DeepSeek V4 and V4.1 in plain PyTorch: one vector is key and value of all heads.

A query reads the newest rows of its request and listed compressed entries in one softmax, to which a learned number
per head, the sink, adds without a value (Xiao et al. 2024, arXiv 2309.17453). No number is read to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.paged_rows import bands, place_of, requests_of_rows, rows_of_cache
from tokamak.ops.records import KVFormat, numbers_of
from tokamak.ops.registry import op
from tokamak.ops.rope import rotate_pairs

LOWEST = -1e30
"""Stands for the highest score of a query that sees nothing."""


@op
def sparse_attention(
    q: Tensor,
    window_rows: Tensor,
    window_table: Tensor,
    entries: Tensor | None,
    entry_table: Tensor | None,
    chosen: Tensor | None,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    window_tokens: int,
    window_starts: Tensor | None,
    scale: float,
    sink: Tensor,
    out: Tensor,
    window_form: KVFormat | None = None,
    entry_form: KVFormat | None = None,
    cos_sin: Tensor | None = None,
) -> None:
    """Attend from this step's queries to the newest `window_tokens` rows of their request and to listed entries.

    q: [tokens, heads, dim]. window_rows: [blocks, 1, block_rows, dim], a row a position, this step's written.
    entries: [blocks, 1, block_rows, dim], or None where there are none, like the next two. window_table, entry_table:
    [requests, blocks] int32. chosen: int32 [tokens, most], entry numbers, negative ones none.
    positions: [tokens] int32. query_starts: [requests + 1] int32; q_width: rows of every request, or 0 where they
    differ. window_starts: [requests] int32, the first position of a request whose row may be read, or None for all.
    scale: multiplies scores. sink: [heads] float32, a score of its own in every softmax.
    out: [tokens, heads, dim], written whole; 0 where a query sees nothing. Softmax in float32.
    window_form, entry_form: where rows or entries are records (uint8), their format; the last axis is then bytes.
    cos_sin: a table of angles as of `rotate_pairs`, float32 [positions, rotary_dim], or None. With one, what heads
    come to turns backwards by the query's position, in float32: values were turned as keys were.
    """
    tokens, _, dim = q.shape
    requests = requests_of_rows(query_starts, q_width, tokens)
    starts = None if window_starts is None else window_starts.index_select(0, requests)
    back = torch.arange(window_tokens - 1, -1, -1, device=q.device)
    most = 0 if chosen is None else chosen.shape[1]
    for band in bands(tokens, (window_tokens + most) * dim):
        request = requests[band].unsqueeze(1)
        at = positions[band].long().unsqueeze(1) - back
        seen = at >= (0 if starts is None else starts[band].unsqueeze(1))
        keys = _gather(window_rows, window_table, request, at.clamp(min=0), dim, window_form)
        if chosen is not None:
            assert entries is not None, "entries are chosen, and there are none"
            assert entry_table is not None, "entries are chosen, and no table says where they lie"
            numbers = chosen[band].long()
            listed = _gather(entries, entry_table, request, numbers.clamp(min=0), dim, entry_form)
            keys = torch.cat([keys, listed], dim=1)
            seen = torch.cat([seen, numbers >= 0], dim=1)
        mixed = _attend(q[band], keys, seen, scale, sink)
        if cos_sin is not None:
            mixed = rotate_pairs.reference(mixed, positions[band], cos_sin, True)
        out[band] = mixed.to(out.dtype)


def _gather(
    cache: Tensor,
    table: Tensor,
    request: Tensor,
    numbers: Tensor,
    dim: int,
    form: KVFormat | None,
) -> Tensor:
    """Rows of a cache by their numbers in a request: float32 [rows, numbers, dim]."""
    places = place_of(table, request, numbers, cache.shape[2])
    found = rows_of_cache(cache).index_select(0, places.reshape(-1))
    return numbers_of(found, form, dim).view(*places.shape, dim)


def _attend(q: Tensor, keys: Tensor, seen: Tensor, scale: float, sink: Tensor) -> Tensor:
    """q: [rows, heads, dim]; keys: [rows, keys, dim]; seen: bool [rows, keys]; returns float32 like q."""
    # What lies where nobody wrote may be no number.
    keys = torch.where(seen.unsqueeze(-1), keys, 0.0)
    scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
    scores = torch.where(seen.unsqueeze(1), scores, float("-inf"))
    highest = scores.amax(dim=-1, keepdim=True).clamp(min=LOWEST)
    shares = torch.exp(scores - highest)
    total = shares.sum(dim=-1, keepdim=True) + torch.exp(sink.view(-1, 1) - highest)
    return torch.bmm(shares, keys) / total
