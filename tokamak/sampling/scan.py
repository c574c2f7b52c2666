"""How are whole vocabulary rows searched, without sorting them?

Every answer is exact and a row's answer depends on that row alone. Equal scores are ordered by token id.
On the CPU NumPy does the scans, and a sort sees only tokens above a floor. Elsewhere torch does, on the
device and without a wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokamak.ops.sample import argmax_rows

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

LikeliestRows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The op `argmax_rows`, or a backend of it."""

LOW_BITS = (1 << 32) - 1

GROUP_TOKENS = 64
"""Neighbours whose maximum stands for them: most groups hold no token that is wanted."""


def is_on_host(scores: Tensor) -> bool:
    """Whether NumPy scans these scores."""
    return scores.device.type == "cpu"


def argmax(scores: Tensor) -> Tensor:
    """The lowest id of the highest score per row; a NaN counts as highest. [rows, vocab] to [rows] int64."""
    if is_on_host(scores):
        return torch.from_numpy(scores.numpy().argmax(axis=1))
    return scores.argmax(dim=1)


def likeliest(scores: Tensor, find: LikeliestRows = argmax_rows.reference) -> tuple[Tensor, Tensor]:
    """The `argmax` of each row, and its score: [rows] int64, and [rows] float32.

    scores: [rows, vocab] float32 or bfloat16. find: does it where they are on a device.
    """
    if not is_on_host(scores):
        return find(scores)
    scores = scores.float()
    token_ids = argmax(scores)
    return token_ids, scores.gather(1, token_ids[:, None])[:, 0]


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores of each row and their ids, highest first, then lowest id.

    scores: [rows, vocab] without NaN; returns [rows, count] in its dtype, and [rows, count] int64.
    """
    rows, vocab = scores.shape
    if not is_on_host(scores):
        if count == vocab:
            return scores.sort(dim=1, descending=True, stable=True)
        ids = LOW_BITS - (_keys(scores).topk(count, dim=1).values & LOW_BITS)
        return scores.gather(1, ids), ids
    out_values, out_ids = np.empty((rows, count), np.float32), np.empty((rows, count), np.int64)
    groups = vocab // GROUP_TOKENS
    if 2 * count <= groups:
        grouped = scores[:, : groups * GROUP_TOKENS].unflatten(1, (groups, GROUP_TOKENS))
        found = _above_group_floors(scores.numpy(), grouped.amax(dim=2).numpy(), count)
    else:
        found = _above_floors(scores.numpy(), count)
    for row, (ids, values) in enumerate(found):
        order = np.argsort(-values, kind="stable")[:count]
        out_ids[row], out_values[row] = ids[order], values[order]
    return torch.from_numpy(out_values), torch.from_numpy(out_ids)


def _keys(scores: Tensor) -> Tensor:
    """An int64 per score, all different: ordered as scores are, and then lower ids first. [rows, vocab] float32."""
    # Adding zero makes the two zeros one.
    bits = (scores + 0.0).view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(LOW_BITS, LOW_BITS - scores.shape[1], -1, device=scores.device)
    return (order.long() << 32) + places


def count_at_least(scores: Tensor, values: Tensor) -> Tensor:
    """How many scores of each row reach the row's value. [rows, vocab], [rows] to [rows] int64."""
    if not is_on_host(scores):
        return (scores >= values[:, None]).sum(dim=1)
    pairs = zip(scores.numpy(), values.numpy(), strict=True)
    return torch.tensor([np.count_nonzero(row >= value) for row, value in pairs])


def _above_floors(scores: Float32s, count: int) -> Iterator[tuple[Int64s, Float32s]]:
    """Per row, ids in order and scores of all tokens as high as the row's `count` highest."""
    vocab = scores.shape[1]
    for row in scores:
        if count < vocab:
            ids = np.flatnonzero(row >= np.partition(row, vocab - count)[vocab - count])
            yield ids, row[ids]
        else:
            yield np.arange(vocab), row


def _above_group_floors(
    scores: Float32s, maxima: Float32s, count: int
) -> Iterator[tuple[Int64s, Float32s]]:
    """The same and a few more: tokens that reach the count-th highest maximum of a group.

    At least `count` tokens do, one in each of the `count` highest groups, and none in a lower group.
    """
    groups = maxima.shape[1]
    whole = groups * GROUP_TOKENS
    for row, tops in zip(scores, maxima, strict=True):
        floor = np.partition(tops, groups - count)[groups - count]
        high = np.flatnonzero(tops >= floor)
        part = row[:whole].reshape(groups, GROUP_TOKENS)[high].ravel()
        places = np.flatnonzero(part >= floor)
        ids, values = (
            high[places // GROUP_TOKENS] * GROUP_TOKENS + places % GROUP_TOKENS,
            part[places],
        )
        if whole < row.size:
            last = whole + np.flatnonzero(row[whole:] >= floor)
            ids, values = np.concatenate([ids, last]), np.concatenate([values, row[last]])
        yield ids, values
