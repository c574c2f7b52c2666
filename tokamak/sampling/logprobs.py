"""How likely did the model find a token, and what were the likeliest ones?

Log-probabilities are those of the model itself, before bias, penalties, masks and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tokamak.core.plan import TokenLogprobs
from tokamak.ops.sample import token_weights
from tokamak.sampling import scan
from tokamak.sampling.draw import Weigh

Read = Callable[[Tensor], np.ndarray]
"""Brings a tensor's numbers to the host."""

ROWS_AT_ONCE = 64
"""Rows scored together; bounds the extra memory of scoring a long prompt."""


def score(
    logits: Tensor,
    chosen_ids: Tensor,
    tops: Sequence[int],
    weigh: Weigh = token_weights.reference,
    read: Read = Tensor.numpy,
) -> list[TokenLogprobs]:
    """Score one token per row, and list the row's `tops[row]` most likely ones.

    logits: [rows, vocab] float32, chosen_ids: [rows] integers. Alternatives are ordered by
    log-probability, then by id; rank counts the tokens at least as likely as the chosen one.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, logits.shape[0], ROWS_AT_ONCE):
        cut = slice(start, start + ROWS_AT_ONCE)
        entries += _score(logits[cut], chosen_ids[cut].long(), tops[cut], weigh, read)
    return entries


def _score(
    logits: Tensor, chosen_ids: Tensor, tops: Sequence[int], weigh: Weigh, read: Read
) -> list[TokenLogprobs]:
    chosen = logits.gather(1, chosen_ids[:, None])
    ranks = read(scan.count_at_least(logits, chosen[:, 0])).tolist()
    widest = min(max(tops), logits.shape[1])
    ids = chosen_ids[:, None]
    if widest:
        ids = torch.cat([ids, scan.largest(logits, widest)[1]], dim=1)
    peaks = logits.amax(dim=1)
    _, sums = weigh(logits, peaks, torch.ones_like(peaks))
    totals = sums.double().sum(dim=1).log()
    logprobs = (logits.gather(1, ids).double() - peaks.double()[:, None] - totals[:, None]).float()
    host_ids = read(ids).astype(np.int32)
    host_logprobs = read(logprobs)
    return [
        TokenLogprobs(
            token_ids=host_ids[row, : 1 + top],
            logprobs=host_logprobs[row, : 1 + top],
            rank=ranks[row],
        )
        for row, top in enumerate(tops)
    ]
