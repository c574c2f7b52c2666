"""Which token does a row draw: temperature, top-k, top-p, min-p, and one random number?

A row that cuts nothing draws by inverse CDF over the vocabulary in id order. A row that cuts (top-k, then
top-p of what is left, then min-p) draws over its kept tokens, most likely first, then lowest id. The
vocabulary is not sorted: the cut is looked for among a few of the highest scores, and only where those
do not settle it among more. Cuts and cumulative sums are float64, so where a cut was found changes nothing.
On a device nobody asks whether a few settle it, which would be a wait: they do where top-k says so, and
elsewhere the whole row is sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tokamak.device.staging import staged
from tokamak.ops.sample import BLOCK_TOKENS, token_weights
from tokamak.sampling import scan
from tokamak.sampling.device_table import Numbers
from tokamak.sampling.noise import Float64s
from tokamak.sampling.slot_table import Int64s

CANDIDATES = (64, 256, 4096)
"""How many of the highest scores are looked at, one after the other; the whole row comes last."""

SORTED_ROWS = 64
"""Rows sorted as a whole at a time on a device; bounds the memory of a step."""

FIRST_CANDIDATES = 256
"""Where to begin unless top-k says that fewer will do."""

Weigh = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The op `token_weights`, or a backend of it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What some rows ask for, all [rows]: arrays to decide with on the host, numbers to compute with."""

    top_k: Int64s  # vocab where off
    top_p: Float64s  # 1 where off
    min_p: Float64s  # 0 where off
    numbers: Numbers

    @classmethod
    def of(
        cls,
        *,
        temperature: Float64s,
        top_k: Int64s,
        top_p: Float64s,
        min_p: Float64s,
        uniforms: Float64s,
    ) -> Draw:
        """A draw whose numbers stay on the host."""
        columns = [
            torch.from_numpy(values)[:, None]
            for values in (temperature, top_p, min_p, top_k, uniforms)
        ]
        return cls(top_k, top_p, min_p, Numbers(*columns))

    def at(self, rows: Int64s, index: Tensor) -> Draw:
        """The same for some of the rows, which are also given as an index on the device."""
        return Draw(
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.numbers.at(index),
        )


def draw(
    scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh = token_weights.reference
) -> Tensor:
    """Draw a token per row.

    scores: [rows, vocab] float32, -inf where ruled out; peaks: [rows] their finite maxima. Returns
    [rows] int64. A row without a finite maximum gets some id, on a device only.
    """
    vocab = scores.shape[1]
    whole = (asked.top_k >= vocab) & (asked.top_p >= 1.0) & (asked.min_p <= 0.0)
    if scan.is_on_host(scores):
        ways = ((whole, _draw_whole), (~whole, _draw_cut))
    else:
        few = (asked.top_k < vocab) & (asked.top_k <= CANDIDATES[-1])
        ways = ((whole, _draw_whole), (few, _draw_few), (~whole & ~few, _draw_all))
    out = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    for chosen, choose in ways:
        rows = np.flatnonzero(chosen)
        if rows.size == whole.size:
            return choose(scores, peaks, asked, weigh)
        if rows.size:
            index = staged(rows, scores.device)
            part = scores.index_select(0, index)
            out[index] = choose(part, peaks[index], asked.at(rows, index), weigh)
    return out


def _weights(
    scores: Tensor, peaks: Tensor, temperature: Tensor, weigh: Weigh
) -> tuple[Tensor, Tensor]:
    """Weights by block, and the running sums of the blocks in float64, [rows, blocks]."""
    weights, sums = weigh(scores, peaks, (1.0 / temperature[:, 0]).float())
    return weights, sums.double().cumsum(dim=1)


def _draw_whole(scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh) -> Tensor:
    weights, ends = _weights(scores, peaks, asked.numbers.temperature, weigh)
    targets = ends[:, -1:] * asked.numbers.uniforms
    block = _first_above(ends, targets, ends[:, -1:])
    before = functional.pad(ends, (1, 0)).gather(1, block)
    every = torch.arange(scores.shape[0], device=scores.device)
    inside = weights[every, block[:, 0]].double().cumsum(dim=1)
    place = _first_above(inside, targets - before, inside[:, -1:])
    return (block * BLOCK_TOKENS + place)[:, 0]


def _draw_cut(scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh) -> Tensor:
    rows, vocab = scores.shape
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    totals = _totals(scores, peaks, asked, weigh)
    pending = np.arange(rows)
    enough = min(int(asked.top_k.max()), FIRST_CANDIDATES)
    for count in (*(count for count in CANDIDATES if enough <= count < vocab), vocab):
        index = torch.from_numpy(pending)
        part = scores if pending.size == rows else scores.index_select(0, index)
        among = asked.at(pending, index)
        chosen, settled = _draw_among(part, peaks[index], totals[index], among, count)
        out[index[settled]] = chosen[settled]
        pending = pending[~settled.numpy()]
        if not pending.size:
            break
    return out


def _draw_few(scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh) -> Tensor:
    """Draw where no row keeps more tokens than the largest top-k, so that so many candidates settle all."""
    del weigh
    no_totals = torch.zeros_like(peaks, dtype=torch.float64)
    return _draw_among(scores, peaks, no_totals, asked, int(asked.top_k.max()))[0]


def _draw_all(scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh) -> Tensor:
    """Draw with whole rows as candidates."""
    rows, vocab = scores.shape
    totals = _totals(scores, peaks, asked, weigh)
    if rows <= SORTED_ROWS:
        return _draw_among(scores, peaks, totals, asked, vocab)[0]
    parts: list[Tensor] = []
    for part in np.split(np.arange(rows), range(SORTED_ROWS, rows, SORTED_ROWS)):
        cut = slice(int(part[0]), int(part[-1]) + 1)
        of_part = asked.at(part, torch.arange(cut.start, cut.stop, device=scores.device))
        parts.append(_draw_among(scores[cut], peaks[cut], totals[cut], of_part, vocab)[0])
    return torch.cat(parts)


def _totals(scores: Tensor, peaks: Tensor, asked: Draw, weigh: Weigh) -> Tensor:
    """The sum of all weights of rows with top-p and no top-k, elsewhere 0; [rows] float64."""
    totals = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    rows = np.flatnonzero((asked.top_p < 1.0) & (asked.top_k >= scores.shape[1]))
    if rows.size:
        index = staged(rows, scores.device)
        part = scores if rows.size == scores.shape[0] else scores.index_select(0, index)
        _, ends = _weights(part, peaks[index], asked.numbers.temperature[index], weigh)
        totals[index] = ends[:, -1]
    return totals


def _draw_among(
    scores: Tensor, peaks: Tensor, totals: Tensor, asked: Draw, count: int
) -> tuple[Tensor, Tensor]:
    """Draw from each row's `count` highest scores; also says for which rows those settle it."""
    vocab = scores.shape[1]
    values, ids = scan.largest(scores, count)
    numbers = asked.numbers
    top_k, top_p, min_p = numbers.top_k, numbers.top_p, numbers.min_p
    weights = torch.exp((values.double() - peaks[:, None].double()) / numbers.temperature)
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
    # At least one, so that a row of NaNs reads nothing outside.
    kept = kept.clamp(min=1, max=count)

    total = sums.gather(1, kept - 1)
    place = _first_above(sums, total * numbers.uniforms, total)
    return ids.gather(1, place)[:, 0], settled[:, 0]


def _first_above(sums: Tensor, targets: Tensor, totals: Tensor) -> Tensor:
    """The first place of each row where a running sum exceeds the target. To [rows, 1] int64.

    Rounding may lift a target to the total; the place that reaches the total is meant then, so that no
    place without weight is.
    """
    above = (sums <= targets).sum(dim=1, keepdim=True)
    reaches = (sums < totals).sum(dim=1, keepdim=True)
    return torch.minimum(above, reaches)
