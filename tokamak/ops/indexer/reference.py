"""The lightning indexer of DeepSeek V3.2 to V4.1 in plain PyTorch, with V4.1's blocks of candidates.

Scores are made for a band of rows at a time: no tensor holds all rows and all keys of a long context.
No number is read to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.paged_rows import bands, place_of, requests_of_rows, rows_of_cache
from tokamak.ops.records import KVFormat, numbers_of
from tokamak.ops.registry import op

NONE = -1
"""Stands behind the last entry of a list."""


@op
def select_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    ratio: int,
    within: Tensor | None,
    block_entries: int,
    chosen: Tensor,
    blocks: Tensor | None,
    key_form: KVFormat | None = None,
    plans: Tensor | None = None,
) -> None:
    """List the entries that score highest for each row, among those it may see: of equals the earlier.

    An entry's score is the sum over heads of weight * relu(q · key). A row at position t sees the first
    (t + 1) // ratio entries of its request. If these are no more than a list holds, all are listed, whatever they score.

    q: [tokens, heads, dim]; weights: [tokens, heads], which may be negative. keys: [blocks, 1, block_rows,
    dim], an entry a row. block_table: [requests, blocks] int32, no wider than needed. positions: [tokens] int32.
    query_starts: [requests + 1] int32; q_width: rows of every request, or 0 where they differ.
    within: int32 [tokens, candidates], numbers of blocks of `block_entries` entries, -1 behind the last: no entry
    outside is listed; None restricts nothing.
    chosen: int32 [tokens, most], written: entry numbers in order, -1 behind the last.
    blocks: int32 [tokens, candidates], written unless None: the blocks with the highest single scores in order, the
    newest one that the row sees any of always among them, -1 behind the last.
    key_form: where keys are records (uint8), their format; the last axis is then bytes.
    plans: int32 [bands, programs, 4] of `fill_walk_plan`, for kernels whose programs share the keys of a step evenly:
    of these rows, keeping what both lists hold, in bands of `score_bands`; None lets each deal as it likes.
    """
    del plans
    tokens = q.shape[0]
    requests = requests_of_rows(query_starts, q_width, tokens)
    entries = block_table.shape[1] * keys.shape[2]
    numbers = entries * (q.shape[2] + q.shape[1])
    for band in bands(tokens, numbers):
        visible = (positions[band].long() + 1) // ratio
        scores = _scores(q[band], weights[band], keys, block_table, requests[band], key_form)
        at = torch.arange(entries, device=q.device)
        seen = at < visible.unsqueeze(1)
        if within is not None:
            seen = seen & _is_within(within[band], block_entries, entries)
        scores = torch.where(seen, scores, float("-inf"))
        chosen[band] = _highest(_or_all(scores, seen, visible, chosen.shape[1]), chosen.shape[1])
        if blocks is not None:
            best = _best_of_blocks(scores, visible, block_entries)
            visible = (visible + (block_entries - 1)) // block_entries
            seen = at[: best.shape[1]] < visible.unsqueeze(1)
            blocks[band] = _highest(_or_all(best, seen, visible, blocks.shape[1]), blocks.shape[1])


def _scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    requests: Tensor,
    form: KVFormat | None,
) -> Tensor:
    """Scores of every row with every entry its request's table has room for: float32 [rows, entries]."""
    entries = torch.arange(block_table.shape[1] * keys.shape[2], device=q.device)
    places = place_of(
        block_table,
        requests.unsqueeze(1),
        entries.unsqueeze(0).expand(len(requests), -1),
        keys.shape[2],
    )
    found = rows_of_cache(keys).index_select(0, places.reshape(-1))
    found = numbers_of(found, form, q.shape[2]).view(*places.shape, q.shape[2])
    products = torch.bmm(q.float(), found.transpose(1, 2))
    return (weights.float().unsqueeze(-1) * products.relu()).sum(dim=1)


def _is_within(within: Tensor, block_entries: int, entries: int) -> Tensor:
    """Whether each entry lies in one of a row's blocks: bool [rows, entries]."""
    count = -(-entries // block_entries)
    # One block more than there are, for the -1 behind the last.
    places = torch.where(within >= 0, within, count).long()
    marked = torch.zeros((len(within), count + 1), dtype=torch.bool, device=within.device)
    marked.scatter_(1, places, True)
    return marked[:, :count].repeat_interleave(block_entries, dim=1)[:, :entries]


def _best_of_blocks(scores: Tensor, visible: Tensor, block_entries: int) -> Tensor:
    """The highest score of each block; infinite for the newest block a row sees any of."""
    rows, entries = scores.shape
    count = -(-entries // block_entries)
    padded = scores.new_full((rows, count * block_entries), float("-inf"))
    padded[:, :entries] = scores
    best = padded.view(rows, count, block_entries).amax(dim=-1)
    newest = (visible - 1).div(block_entries, rounding_mode="floor").unsqueeze(1)
    is_newest = torch.arange(count, device=scores.device) == newest
    return torch.where(is_newest, float("inf"), best)


def _or_all(scores: Tensor, seen: Tensor, visible: Tensor, most: int) -> Tensor:
    """The scores, but those of rows that take all they see are equal and finite. seen: bool [rows, numbers]."""
    return torch.where(seen & (visible <= most).unsqueeze(1), 0.0, scores)


def _highest(scores: Tensor, most: int) -> Tensor:
    """Numbers of the highest scores above -inf in order, -1 behind the last: int32 [rows, most]."""
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    kept = min(most, scores.shape[1])
    values, numbers = ranked.values[:, :kept], ranked.indices[:, :kept]
    # What is no number compares as false here, and is not listed.
    last = torch.iinfo(torch.int32).max
    numbers = torch.where(values > float("-inf"), numbers, last).sort(dim=-1).values
    found = torch.full((len(scores), most), NONE, dtype=torch.int32, device=scores.device)
    found[:, :kept] = torch.where(numbers == last, NONE, numbers).int()
    return found
