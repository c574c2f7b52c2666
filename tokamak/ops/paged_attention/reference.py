"""Causal attention over paged keys and values in plain PyTorch, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op


@op(recordable=False)
def paged_attention(
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
    """Attend from this step's queries to all cached rows of their own request, causally.

    q: [tokens, heads, head_dim]. k_cache, v_cache: [blocks, kv_heads, block_tokens, head_dim]; query
    head h reads key head h // (heads / kv_heads); their dtype may be another than q's. block_table: [requests, blocks] int32.
    lengths: [requests] int32, cached tokens of the request with this step's; the last query sits at
    position lengths - 1. query_starts: [requests + 1] int32, the last is tokens.
    q_width: queries of every request, or 0 where they differ. With a width no backend but this one reads
    a number to the host, so the call can be recorded.
    scale: multiplies the scores. window: 0, or how many newest positions a query sees.
    out: [tokens, heads, head_dim] in the dtype of q, written whole. Softmax in float32.
    sinks: [heads] float32 or None; a score beside those of a head's keys that takes its share of the softmax and
    has no value (Xiao et al. 2023, arXiv 2309.17453; learned in gpt-oss). `scale` does not multiply it.
    """
    del q_width
    kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    groups = q.shape[1] // kv_heads
    starts = query_starts.tolist()
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        blocks = block_table[request, : -(-length // k_cache.shape[2])].long()
        k = k_cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].float()
        v = v_cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].float()
        queries = q[begin:end].view(end - begin, kv_heads, groups, head_dim).float()
        scores = torch.einsum("qhgd,hkd->hgqk", queries, k) * scale
        at = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        keys = torch.arange(length, device=q.device)[None, :]
        hidden = keys > at
        if window:
            hidden |= keys <= at - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            beside = sinks.view(kv_heads, groups, 1, 1).expand(-1, -1, end - begin, 1)
            scores = torch.cat([scores, beside], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        mixed = torch.einsum("hgqk,hkd->qhgd", weights, v)
        out[begin:end] = mixed.reshape(end - begin, -1, head_dim).to(q.dtype)
