"""How are whole vocabulary rows searched, without sorting them?

Every answer is exact and a row's answer depends on that row alone. Equal scores are ordered by token id.
On the CPU NumPy does the scans: its vectorised argmax and partition take a tenth of the time of torch's.
Elsewhere torch does them on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def is_on_host(scores: Tensor) -> bool:
    """Whether NumPy scans these scores."""
    return scores.device.type == "cpu"


def argmax(scores: Tensor) -> Tensor:
    """The lowest id of the highest score per row; a NaN counts as highest. [rows, vocab] to [rows] int64."""
    if is_on_host(scores):
        return torch.from_numpy(scores.numpy().argmax(axis=1))
    return scores.argmax(dim=1)


def largest(scores: Tensor, count: int) -> Tensor:
    """The `count` highest scores of each row, descending. [rows, vocab] to [rows, count]."""
    rows, vocab = scores.shape
    if not is_on_host(scores):
        return torch.topk(scores, count, dim=1, sorted=True).values
    out = np.empty((rows, count), np.float32)
    for row, values in enumerate(scores.numpy()):
        tail = np.partition(values, vocab - count)[vocab - count :] if count < vocab else values
        out[row] = np.sort(tail)[::-1]
    return torch.from_numpy(out)


def top_ids(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` highest scores, highest first, then lowest id. To [rows, count] int64."""
    rows, vocab = scores.shape
    if not is_on_host(scores):
        return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    out = np.empty((rows, count), np.int64)
    for row, values in enumerate(scores.numpy()):
        floor = np.partition(values, vocab - count)[vocab - count]
        ids = np.flatnonzero(values >= floor)
        out[row] = ids[np.argsort(-values[ids], kind="stable")[:count]]
    return torch.from_numpy(out)


def nth_equal(scores: Tensor, values: Tensor, nth: Tensor) -> Tensor:
    """The id of the nth (from 0) token of each row whose score equals the row's value.

    scores: [rows, vocab], values: [rows] in its dtype, nth: [rows] int64; to [rows] int64.
    """
    if is_on_host(scores):
        out = np.empty(scores.shape[0], np.int64)
        wanted = zip(scores.numpy(), values.numpy(), nth.tolist(), strict=True)
        for row, (row_scores, value, skip) in enumerate(wanted):
            out[row] = np.flatnonzero(row_scores == value)[skip]
        return torch.from_numpy(out)
    equal = scores == values[:, None]
    found = equal & (equal.cumsum(dim=1) == nth[:, None] + 1)
    return found.int().argmax(dim=1)


def count_at_least(scores: Tensor, values: Tensor) -> Tensor:
    """How many scores of each row reach the row's value. [rows, vocab], [rows] to [rows] int64."""
    if is_on_host(scores):
        reached = scores.numpy() >= values.numpy()[:, None]
        return torch.from_numpy(np.count_nonzero(reached, axis=1))
    return (scores >= values[:, None]).sum(dim=1)
