"""Weights of the tokens of vocabulary rows, and the likeliest of them, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.ops.registry import op
from tokamak.ops.sample.uniform import uniforms_of

BLOCK_TOKENS = 1024
"""Tokens whose weights are summed together; it fixes the order of additions."""

TABLE_COLUMNS = 5
"""Of a table of what slots draw with: temperature, top-p and min-p as the bits of float64, then top-k and the key."""

SORTED_ROWS = 64
"""Rows sorted as a whole at a time; bounds the memory of a step."""


@op
def token_weights(
    scores: Tensor, peaks: Tensor, inverse_temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Weigh each token by exp((score - peak) / temperature), and sum blocks of BLOCK_TOKENS weights.

    scores: [rows, vocab] float32, not NaN, -inf where ruled out. peaks: [rows] float32, the rows' finite
    maxima. inverse_temperatures: [rows] float32. Returns weights [rows, blocks, BLOCK_TOKENS] float32,
    1 for the most likely token and 0 past the vocabulary, and their sums [rows, blocks] float32. A row's
    result depends on that row alone.
    """
    rows, vocab = scores.shape
    shifted = (scores - peaks[:, None]) * inverse_temperatures[:, None]
    # Softmax takes row by row, so the place of a row in the batch cannot change how it is rounded.
    weights = torch.softmax(shifted, dim=1)
    weights /= weights.amax(dim=1, keepdim=True)
    weights = functional.pad(weights, (0, -vocab % BLOCK_TOKENS))
    blocks = weights.view(rows, -(-vocab // BLOCK_TOKENS), BLOCK_TOKENS)
    return blocks, blocks.sum(dim=2)


@op
def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the lowest id of each row's highest logit; a NaN counts as highest.

    logits: [rows, vocab], vocab at least 1. Returns token_ids [rows] int64 and those logits as peaks [rows]
    float32, a NaN where the row has one.
    """
    peaks, token_ids = logits.max(dim=1)
    return token_ids, peaks.float()


@op
def draw_rows(
    scores: Tensor, table: Tensor, slots: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token per row: temperature, top-k, top-p of what is left, then min-p, and one random number.

    scores: [rows, vocab] float32, -inf where ruled out. table: [slots, TABLE_COLUMNS] int64: temperature (0 for the
    likeliest token, whatever else is asked), top-p (1 where off) and min-p (0 where off) as the bits of float64,
    top-k (vocab where off), and the key of the random numbers. slots: [rows] int32, rows of the table. positions:
    [rows] int32, the index of the token to be drawn. A row that cuts nothing draws by inverse CDF in id order, others
    over their kept tokens, most likely first, then lowest id.

    Returns token_ids [rows] int64 and the highest scores as peaks [rows] float32. A row without a finite peak gets
    some id. A row's result depends on that row alone.
    """
    rows = table.index_select(0, slots)
    uniforms = uniforms_of(rows[:, 4:5], positions[:, None])
    parts = [
        _draw_part(*part)
        for part in zip(
            scores.split(SORTED_ROWS),
            rows.split(SORTED_ROWS),
            uniforms.split(SORTED_ROWS),
            strict=True,
        )
    ]
    return torch.cat([token_ids for token_ids, _ in parts]), torch.cat(
        [peaks for _, peaks in parts]
    )


def _draw_part(scores: Tensor, rows: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    temperature, top_p, min_p = rows[:, :3].view(torch.float64).split(1, dim=1)
    top_k = rows[:, 3:4]
    likeliest, peaks = argmax_rows.reference(scores)
    is_greedy = temperature <= 0.0
    temperature = temperature.masked_fill(is_greedy, 1.0)
    weights, sums = token_weights.reference(scores, peaks, (1.0 / temperature[:, 0]).float())
    ends = sums.double().cumsum(dim=1)
    whole = draw_by_id(weights, ends, uniforms)

    vocab = scores.shape[1]
    values, ids = scores.sort(dim=1, descending=True, stable=True)
    weights = torch.exp((values.double() - peaks[:, None].double()) / temperature)
    sums = weights.cumsum(dim=1)
    left = torch.where(top_k < vocab, sums.gather(1, (top_k - 1).clamp(0, vocab - 1)), ends[:, -1:])
    by_p = torch.where(top_p < 1.0, (sums < top_p * left).sum(dim=1, keepdim=True) + 1, vocab)
    by_min_p = torch.where(min_p > 0.0, (weights >= min_p).sum(dim=1, keepdim=True), vocab)
    kept = torch.minimum(torch.minimum(top_k, by_p), by_min_p).clamp(1, vocab)
    total = sums.gather(1, kept - 1)
    among = ids.gather(1, first_above(sums, total * uniforms, total))

    is_whole = (top_k >= vocab) & (top_p >= 1.0) & (min_p <= 0.0)
    drawn = torch.where(is_whole, whole, among)[:, 0]
    return torch.where(is_greedy[:, 0], likeliest, drawn), peaks


def draw_by_id(weights: Tensor, ends: Tensor, uniforms: Tensor) -> Tensor:
    """Draw by inverse CDF over the vocabulary in id order.

    weights: [rows, blocks, BLOCK_TOKENS] float32. ends: [rows, blocks] float64, running sums of blocks. uniforms:
    [rows, 1] float64. Returns ids [rows, 1] int64.
    """
    targets = ends[:, -1:] * uniforms
    block = first_above(ends, targets, ends[:, -1:])
    before = functional.pad(ends, (1, 0)).gather(1, block)
    every = torch.arange(weights.shape[0], device=weights.device)
    inside = weights[every, block[:, 0]].double().cumsum(dim=1)
    place = first_above(inside, targets - before, inside[:, -1:])
    return block * BLOCK_TOKENS + place


def first_above(sums: Tensor, targets: Tensor, totals: Tensor) -> Tensor:
    """The first place of each row where a running sum exceeds the target. To [rows, 1] int64.

    Rounding may lift a target to the total; the place that reaches the total is meant then, so that no
    place without weight is.
    """
    above = (sums <= targets).sum(dim=1, keepdim=True)
    reaches = (sums < totals).sum(dim=1, keepdim=True)
    return torch.minimum(above, reaches)
