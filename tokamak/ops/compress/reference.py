"""The compressor of DeepSeek V4 and V4.1 in plain PyTorch: a softmax over the tokens of a group, for every channel.

Rows of values and gates lie in a paged cache by position, so a group that an earlier step began, or that a prefix of
another request brought, is folded like any other. No number is read to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.paged_rows import bands, place_of, requests_of_rows, rows_of_cache
from tokamak.ops.registry import op


@op
def write_rows(cache: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, ratio: int) -> None:
    """Write rows of tokens to a cache, in its dtype: those that end a group of `ratio` positions.

    cache: [blocks, 1, block_rows, width], changed. rows: [tokens, width]. slots: [tokens] int64, where every
    token would lie, block * block_rows * ratio + place in the block; a group lies at that of its last, divided by the
    ratio. Negative ones write nothing. positions: [tokens] int32.
    """
    # For rows nobody wants the last row of the null block is written as it is: the host would read masks of any kind.
    block_rows = cache.shape[2]
    kept = (slots >= 0) & ((positions + 1) % ratio == 0)
    places = torch.where(kept, slots // ratio, block_rows - 1)
    held = rows_of_cache(cache)
    wanted = torch.where(kept.unsqueeze(-1), rows.to(cache.dtype), held[block_rows - 1])
    held.index_copy_(0, places, wanted)


@op
def fold_groups(
    state: Tensor,
    block_table: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    ratio: int,
    overlapped: bool,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Fold each group of `ratio` tokens that ends with a row of this step.

    state: [blocks, 1, block_rows, 2 * columns] float32, values then gates of each position; rows of this step are
    written. block_table: [requests, blocks] int32. positions: [tokens] int32. query_starts: [requests + 1] int32;
    q_width: rows of every request, or 0 where they differ.
    A group's weights are a softmax over its tokens, for every channel. With `overlapped`, columns are two halves:
    the second joins its own group, the first the group behind it; the first group of a request has none before.
    bias: float32 [ratio, columns], contiguous, added to gates by a token's place in its group, or None.
    out: [tokens, width], columns wide or half of that; rows that end no group are zero. Sums are float32.
    """
    tokens, width = out.shape
    requests = requests_of_rows(query_starts, q_width, tokens)
    held = rows_of_cache(state)
    columns = held.shape[1] // 2
    block_rows = state.shape[2]
    back = torch.arange((2 if overlapped else 1) * ratio - 1, -1, -1, device=out.device)
    for band in bands(tokens, len(back) * held.shape[1]):
        at = positions[band].long().unsqueeze(1) - back
        there = at >= 0
        places = place_of(block_table, requests[band].unsqueeze(1), at.clamp(min=0), block_rows)
        rows = held.index_select(0, places.reshape(-1)).view(*places.shape, 2 * columns)
        values, gates = rows[..., :columns], rows[..., columns:]
        if bias is not None:
            gates = gates + bias.repeat(len(back) // ratio, 1)
        if overlapped:
            values = torch.cat([values[:, :ratio, :width], values[:, ratio:, width:]], dim=1)
            gates = torch.cat([gates[:, :ratio, :width], gates[:, ratio:, width:]], dim=1)
        ends = ((positions[band] + 1) % ratio == 0).unsqueeze(-1)
        there = there.unsqueeze(-1)
        shares = torch.where(there, gates, float("-inf")).softmax(dim=1)
        folded = (shares * torch.where(there, values, 0.0)).sum(dim=1)
        out[band] = torch.where(ends, folded, 0.0).to(out.dtype)
