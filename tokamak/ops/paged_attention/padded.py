"""Paged attention in PyTorch calls over all requests at once, for devices without a kernel of ours.

Rows of one width attend over the whole block table, which is masked: no number goes to the host, so the
call can be recorded. Rows of differing widths go request by request through PyTorch's fused attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def padded_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    q_width: int,
    scale: float,
    window: int,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attend from this step's queries to all cached rows of their own request, causally."""
    if q_width == 0:
        _one_by_one(
            q, k_cache, v_cache, block_table, lengths, query_starts, scale, window, out, sinks
        )
        return
    requests, head_dim = lengths.shape[0], q.shape[2]
    if not requests:
        return
    queries = q.view(requests, q_width, -1, head_dim).transpose(1, 2)
    keys, values = _rows(k_cache, block_table), _rows(v_cache, block_table)
    places = torch.arange(keys.shape[2], device=q.device)
    last = lengths[:, None].long() - q_width + torch.arange(q_width, device=q.device)
    seen = _seen(places, last[:, None, :, None], window)
    # Rows past a request's length were never written; zero times NaN is NaN, so they are cleared.
    written = (places < lengths[:, None])[:, None, :, None]
    keys, values = keys.where(written, 0), values.where(written, 0)
    mixed = _attend(queries, keys, values, seen, scale, sinks)
    out.copy_(mixed.transpose(1, 2).reshape(out.shape))


def _one_by_one(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int,
    out: Tensor,
    sinks: Tensor | None,
) -> None:
    starts = query_starts.tolist()
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        table = block_table[request : request + 1, : -(-length // k_cache.shape[2])]
        keys, values = _rows(k_cache, table)[:, :, :length], _rows(v_cache, table)[:, :, :length]
        at = torch.arange(length - (end - begin), length, device=q.device)
        seen = _seen(torch.arange(length, device=q.device), at[:, None], window)
        mixed = _attend(q[None, begin:end].transpose(1, 2), keys, values, seen, scale, sinks)
        out[begin:end] = mixed[0].transpose(0, 1)


def _rows(cache: Tensor, table: Tensor) -> Tensor:
    """Cached rows side by side, in float32: [requests, kv_heads, blocks * block_tokens, head_dim]."""
    rows = cache[table.long()].transpose(1, 2)
    return rows.reshape(rows.shape[0], rows.shape[1], -1, rows.shape[4]).float()


def _seen(places: Tensor, at: Tensor, window: int) -> Tensor:
    """Which places a query at position `at` sees."""
    seen = places <= at
    return seen & (places > at - window) if window else seen


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Softmax in float32; q: [requests, heads, queries, head_dim], `seen` broadcast over heads.

    A sink is one more key of zeros, whose score is what the mask adds, with a value of zeros.
    """
    if sinks is not None:
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        hidden = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, float("-inf"))
        scores = pad(hidden, (0, 1)).expand(q.shape[0], q.shape[1], -1, -1).clone()
        scores[..., -1] = sinks[:, None]
        seen = scores
    mixed = scaled_dot_product_attention(
        q.float(), k, v, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return mixed.to(q.dtype)
