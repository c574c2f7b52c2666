"""Weights of the tokens of vocabulary rows, and the likeliest of them, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.ops.registry import op

BLOCK_TOKENS = 1024
"""Tokens whose weights are summed together; it fixes the order of additions."""


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
