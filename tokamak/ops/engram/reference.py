"""Engram (Cheng et al. 2026, arXiv 2601.07372) as in DeepSeek V4.1, in plain PyTorch. No number is read to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.core.minifloat import UE8M0, factors_of
from tokamak.ops.paged_rows import requests_of_rows
from tokamak.ops.registry import op
from tokamak.ops.whole_rows import whole_rows

SMALLEST_DOT = 1e-6


@op
def engram_rows(
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    compressed_ids: Tensor,
    pad_id: int,
    multipliers: Tensor,
    primes: Tensor,
    out: Tensor,
) -> None:
    """Rows of the table for the n-grams that end at each token: orders 2 to N, several hashes each.

    history: [slots, positions] int32, all known tokens. slots: [requests] int32. positions: [tokens] int32.
    query_starts: [requests + 1] int32; q_width: rows of every request, or 0 where they differ.
    compressed_ids: [vocab] int64, of each token. pad_id: the compressed id before a text begins.
    multipliers: [N] int64, odd, so small that no product overflows. primes: [N - 1, heads] int64: the size of each
    hash's own part of the table; parts follow one another.
    out: [tokens, (N - 1) * heads] int64, written.
    """
    tokens, orders = len(positions), primes.shape[0]
    row = slots.long().index_select(0, requests_of_rows(query_starts, q_width, tokens))
    at = positions.long().unsqueeze(1) - torch.arange(orders + 1, device=positions.device)
    places = row.unsqueeze(1) * history.shape[1] + at.clamp(min=0)
    ids = history.view(-1).index_select(0, places.reshape(-1)).long()
    grams = compressed_ids.index_select(0, ids).view(tokens, orders + 1)
    products = torch.where(at >= 0, grams, pad_id) * multipliers
    starts = (primes.flatten().cumsum(0) - primes.flatten()).view(primes.shape)
    mixed = products[:, 0]
    for order in range(orders):
        mixed = mixed ^ products[:, order + 1]
        heads = mixed.unsqueeze(1) % primes[order] + starts[order]
        out[:, order * primes.shape[1] : (order + 1) * primes.shape[1]] = heads


@op
def engram_values(codes: Tensor, scales: Tensor | None, rows: Tensor, out: Tensor) -> None:
    """Rows of a table as numbers, each rounded once: those of plain numbers, or code * scale of 8-bit ones.

    codes: [table rows, columns], of float8_e4m3fn with scales, else float32, bfloat16 or float16.
    scales: float8_e8m0fnu or float32 [table rows, groups], each of columns / groups neighbours; None for plain numbers.
    Both may lie in pinned memory of the host, where a GPU reads them in place; kernels alone can do that.
    rows: int64 [n]. out: [n, columns] of any float dtype, written.
    """
    if scales is None:
        out.copy_(codes.index_select(0, rows))
        return
    # Bytes are taken before they are widened: the table has more of them than memory has room for numbers.
    found = codes.view(torch.uint8).index_select(0, rows).view(codes.dtype)
    kept = scales.view(torch.uint8) if scales.dtype == UE8M0 else scales
    factors = factors_of(kept.index_select(0, rows).view(scales.dtype))
    numbers = found.view(*factors.shape, codes.shape[1] // scales.shape[1])
    out.copy_((numbers.float() * factors.unsqueeze(-1)).flatten(1))


@op
def engram_gate(
    streams: Tensor, keys: Tensor, values: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Add what was looked up to every stream, each by its own gate.

    A gate is the sigmoid of the signed square root of the normed dot product of a stream with its key.
    streams: [rows, S, width]. keys: [rows, S * width], which may have gaps between rows. values: [rows, width]. weight: [S, width] float32, of the
    products. eps: of both norms. Returns a new tensor like streams, computed in float32.
    """
    wide = streams.float()
    key = keys.view(streams.shape).float()
    scale = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (wide * weight * key).sum(-1) * scale * streams.shape[2] ** -0.5
    root = torch.copysign(dot.abs().clamp(min=SMALLEST_DOT).sqrt(), dot)
    gate = torch.sigmoid(whole_rows(root))[: streams.shape[0]]
    return (wide + gate.unsqueeze(-1) * values.float().unsqueeze(1)).to(streams.dtype)
