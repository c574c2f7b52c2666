"""How do a request's parameters change its logits before a token is chosen?

Each stage takes all rows of the step and changes those that ask for it in place; the others cost
nothing. A new stage is a function here and an entry in `STAGES`, which is the order they run in.
What follows (temperature, top-k, top-p, min-p, the draw) is in `draw.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokamak.device.staging import staged
from tokamak.sampling.slot_table import Int64s, Rows


@dataclass(slots=True)
class History:
    """The tokens of every slot so far, and room to count them."""

    token_ids: Tensor  # [slots, max_len]  int32
    counts: Tensor | None = None  # [slots, vocab]    float32, all zero between stages

    def counters(self, like: Tensor) -> Tensor:
        """A zero for every token of each row of `like`, made when first needed; leave them zero."""
        rows, vocab = like.shape
        if self.counts is None:
            self.counts = like.new_zeros(self.token_ids.shape[0], vocab)
        return self.counts[:rows]


Stage = Callable[[Tensor, Rows, History], None]


def add_bias(logits: Tensor, rows: Rows, history: History) -> None:
    """Add `logit_bias`."""
    biased = np.flatnonzero(rows.table.has_bias[rows.slots]).tolist()
    if not biased:
        return
    places = np.concatenate([row * logits.shape[1] + rows.extras(row).bias_ids for row in biased])
    values = np.concatenate([rows.extras(row).bias_values for row in biased])
    flat = logits.view(-1)
    flat.index_add_(0, _to(flat, places), staged(values, flat.device))


def ban_early_end(logits: Tensor, rows: Rows, history: History) -> None:
    """Rule out stop ids and end of sequence before `min_tokens`, in rows without a grammar."""
    banned = rows.banned()
    banned = banned[~rows.table.has_grammar[rows.slots[banned]]]
    if not banned.size:
        return
    places = np.concatenate(
        [row * logits.shape[1] + rows.extras(row).ban_ids for row in banned.tolist()]
    )
    flat = logits.view(-1)
    flat.index_fill_(0, _to(flat, places), float("-inf"))


def mask_grammar(logits: Tensor, rows: Rows, history: History) -> None:
    """Rule out what the grammar does not allow; `min_tokens` holds where it leaves a choice."""
    constrained = np.flatnonzero(rows.table.has_grammar[rows.slots])
    if not constrained.size:
        return
    allowed = np.empty((constrained.size, logits.shape[1]), np.bool_)
    banned = set(rows.banned().tolist())
    for at, row in enumerate(constrained.tolist()):
        rows.grammar(row).fill(allowed[at])
        if row in banned:
            later = allowed[at].copy()
            later[rows.extras(row).ban_ids] = False
            if later.any():
                allowed[at] = later
    hidden = staged(np.logical_not(allowed, out=allowed), logits.device)
    for at, row in enumerate(constrained.tolist()):
        logits[row].masked_fill_(hidden[at], float("-inf"))


def penalise_repetition(logits: Tensor, rows: Rows, history: History) -> None:
    """Divide positive and multiply negative logits of tokens of the prompt and the output."""
    factors = rows.table.repetition[rows.slots]
    chosen = np.flatnonzero((factors != 1.0) & (rows.positions > 0))
    if not chosen.size:
        return
    ids = _seen(history, rows, chosen, np.zeros_like(rows.positions))
    part = logits if chosen.size == logits.shape[0] else logits[_to(logits, chosen)]
    factor = staged(factors[chosen], logits.device)[:, None]
    values = part.gather(1, ids)
    part.scatter_(1, ids, torch.where(values > 0, values / factor, values * factor))
    if part is not logits:
        logits[_to(logits, chosen)] = part


def penalise_presence(logits: Tensor, rows: Rows, history: History) -> None:
    """Subtract `frequency_penalty` per occurrence in the output, and `presence_penalty` once."""
    table, slots = rows.table, rows.slots
    asked = (table.presence[slots] != 0.0) | (table.frequency[slots] != 0.0)
    starts = table.prompt_tokens[slots]
    chosen = np.flatnonzero(asked & (rows.positions > starts))
    if not chosen.size:
        return
    ids = _seen(history, rows, chosen, starts)
    lengths = (rows.positions - starts)[chosen]
    real = np.arange(ids.shape[1])[None, :] < lengths[:, None]
    counts = history.counters(logits)[: chosen.size]
    counts.scatter_add_(1, ids, staged(real, logits.device).float())
    occurrences = counts.gather(1, ids)
    counts.scatter_(1, ids, 0.0)
    presence = staged(table.presence[slots[chosen]], logits.device)[:, None]
    frequency = staged(table.frequency[slots[chosen]], logits.device)[:, None]
    part = logits if chosen.size == logits.shape[0] else logits[_to(logits, chosen)]
    values = part.gather(1, ids)
    part.scatter_(1, ids, values - frequency * occurrences - presence)
    if part is not logits:
        logits[_to(logits, chosen)] = part


STAGES: tuple[Stage, ...] = (
    add_bias,
    ban_early_end,
    mask_grammar,
    penalise_repetition,
    penalise_presence,
)


def _seen(history: History, rows: Rows, chosen: Int64s, starts: np.ndarray) -> Tensor:
    """Token ids of positions [start, position) of some rows, [chosen, longest] int64.

    A shorter row is filled up with its first id: writing an id's value twice changes nothing.
    """
    begins, lengths = starts[chosen], (rows.positions - starts)[chosen]
    offsets = np.arange(int(lengths.max()), dtype=np.int64)[None, :]
    places = begins[:, None] + np.where(offsets < lengths[:, None], offsets, 0)
    known = history.token_ids[:, : int(rows.positions[chosen].max())]
    return known[_to(known, rows.slots[chosen])].gather(1, _to(known, places)).long()


def _to(like: Tensor, values: np.ndarray) -> Tensor:
    """Integers on a tensor's device, as int64 indices."""
    return staged(values.astype(np.int64, copy=False), like.device)
