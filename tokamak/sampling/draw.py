"""Which token does a row draw: temperature, top-k, top-p, min-p, and one random number?

A row that cuts nothing draws by inverse CDF over the vocabulary in id order. A row that cuts (top-k, then
top-p of what is left, then min-p) draws over its kept tokens, most likely first, then lowest id. The
vocabulary is not sorted: the cut is looked for among a few of the highest scores, and only where those
do not settle it among more. Cuts and cumulative sums are float64, so where a cut was found changes nothing.
This is the way taken on the host; on a device the op `draw_rows` draws the same tokens without a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokamak.ops.sample import draw_by_id, first_above, token_weights
from tokamak.sampling import scan
from tokamak.sampling.noise import Float64s
from tokamak.sampling.slot_table import Int64s

CANDIDATES = (64, 256, 4096)
"""How many of the highest scores are looked at, one after the other; the whole row comes last."""

FIRST_CANDIDATES = 256
"""Where to begin unless top-k says that fewer will do."""

Weigh = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The op `token_weights`, or a backend of it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What some rows ask for, all [rows]."""

    temperature: Float64s
    top_k: Int64s  # vocab where off
    top_p: Float64s  # 1 where off
    min_p: Float64s  # 0 where off
    uniforms: Float64s  # in [0, 1)

    def at(self, rows: Int64s) -> Draw:
        """The same for some of the rows."""
        return Draw(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.uniforms[rows],
        )


def draw(
    scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh = token_weights.reference
) -> Tensor:
    """Draw a token per row.

    scores: [rows, vocab] float32 in the host's memory, -inf where ruled out; peaks: [rows] their finite
    maxima. Returns [rows] int64.
    """
    vocab = scores.shape[1]
    whole = (asked.top_k >= vocab) & (asked.top_p >= 1.0) & (asked.min_p <= 0.0)
    out = torch.empty(scores.shape[0], dtype=torch.int64)
    for chosen, choose in ((whole, _draw_whole), (~whole, _draw_cut)):
        rows = np.flatnonzero(chosen)
        if rows.size == whole.size:
            return choose(scores, peaks, asked, weigh)
        if rows.size:
            index = torch.from_numpy(rows)
            part = scores.index_select(0, index)
            out[index] = choose(part, peaks[index], asked.at(rows), weigh)
    return out


def _weights(
    scores: Tensor, peaks: Tensor, temperature: Float64s, weigh: Weigh
) -> tuple[Tensor, Tensor]:
    """Weights by block, and the running sums of the blocks in float64, [rows, blocks]."""
    weights, sums = weigh(scores, peaks, (1.0 / torch.from_numpy(temperature)).float())
    return weights, sums.double().cumsum(dim=1)


def _draw_whole(scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh) -> Tensor:
    weights, ends = _weights(scores, peaks, asked.temperature, weigh)
    return draw_by_id(weights, ends, _column(asked.uniforms))[:, 0]


def _draw_cut(scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh) -> Tensor:
    rows, vocab = scores.shape
    out = torch.empty(rows, dtype=torch.int64)
    totals = _totals(scores, peaks, asked, weigh)
    pending = np.arange(rows)
    enough = min(int(asked.top_k.max()), FIRST_CANDIDATES)
    for count in (*(count for count in CANDIDATES if enough <= count < vocab), vocab):
        index = torch.from_numpy(pending)
        part = scores if pending.size == rows else scores.index_select(0, index)
        among = asked.at(pending)
        chosen, settled = _draw_among(part, peaks[index], totals[index], among, count)
        out[index[settled]] = chosen[settled]
        pending = pending[~settled.numpy()]
        if not pending.size:
            break
    return out


def _totals(scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh) -> Tensor:
    """The sum of all weights of rows with top-p and no top-k, elsewhere 0; [rows] float64."""
    totals = torch.zeros(scores.shape[0], dtype=torch.float64)
    rows = np.flatnonzero((asked.top_p < 1.0) & (asked.top_k >= scores.shape[1]))
    if rows.size:
        index = torch.from_numpy(rows)
        part = scores if rows.size == scores.shape[0] else scores.index_select(0, index)
        _, ends = _weights(part, peaks[index], asked.temperature[rows], weigh)
        totals[index] = ends[:, -1]
    return totals


def _draw_among(
    scores: Tensor, peaks: Tensor, totals: Tensor, asked: Draw, count: int
) -> tuple[Tensor, Tensor]:
    """Draw from each row's `count` highest scores; also says for which rows those settle it."""
    vocab = scores.shape[1]
    values, ids = scan.largest(scores, count)
    top_k, top_p, min_p = _column(asked.top_k), _column(asked.top_p), _column(asked.min_p)
    temperature = _column(asked.temperature)
    weights = torch.exp((values.double() - peaks[:, None].double()) / temperature)
    sums = weights.cumsum(dim=1)

    unknown = vocab + 1  # a cut somewhere past the candidates
    among = sums.gather(1, (top_k - 1).clamp(max=count - 1))
    mass = top_p * torch.where(top_k < vocab, among, totals[:, None])
    by_p = (sums < mass).sum(dim=1, keepdim=True) + 1
    by_p = torch.where((by_p > count) | ((top_k < vocab) & (top_k > count)), unknown, by_p)
    by_p = torch.where(top_p < 1.0, by_p, vocab)
    likely = (weights >= min_p).sum(dim=1, keepdim=True)
    by_min_p = torch.where(likely < count, likely, unknown)
    by_min_p = torch.where(min_p > 0.0, by_min_p, vocab)
    kept = torch.minimum(torch.minimum(top_k, by_p), by_min_p)
    settled = (kept <= count) & ((by_p <= count) | (top_p >= 1.0) | (top_k <= count))
    if count == vocab:
        settled, kept = torch.ones_like(settled), kept.clamp(max=vocab)
    kept = kept.clamp(max=count)

    total = sums.gather(1, kept - 1)
    place = first_above(sums, total * _column(asked.uniforms), total)
    return ids.gather(1, place)[:, 0], settled[:, 0]


def _column(values: Float64s | Int64s) -> Tensor:
    """A number per row beside matrices of rows, [rows, 1]."""
    return torch.from_numpy(values)[:, None]
