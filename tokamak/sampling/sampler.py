"""Which token does each row of logits become?

In: a step's logits, and per slot what its request asked for. Out: one token id per row, log-probabilities
for those who asked, and which rows failed. A row's outcome depends on its own request alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokamak.core.plan import Int32s, TokenLogprobs
from tokamak.core.request import SamplingParams
from tokamak.errors import GrammarError
from tokamak.ops.sample import token_weights
from tokamak.sampling import scan
from tokamak.sampling.draw import Draw, Weigh, draw
from tokamak.sampling.grammar_state import GrammarFactory, GrammarState
from tokamak.sampling.logprobs import score
from tokamak.sampling.noise import request_key, seed_of, uniforms
from tokamak.sampling.slot_table import Int64s, Rows, SlotTable
from tokamak.sampling.stages import STAGES, History

HARMLESS_ID = 0
"""What a failed row gets; its request ends with an error and the id is not returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a step's logits became, row by row."""

    token_ids: Tensor  # [rows] int32, on the logits' device
    logprobs: tuple[TokenLogprobs | None, ...]
    """Per row, None where not asked for."""
    errors: Mapping[int, str]
    """Rows that failed, with the reason: their request ends."""
    finished: frozenset[int]
    """Rows whose text is complete by their grammar: with this token nothing more may follow."""


class Sampler:
    """Chooses tokens. One thread calls it, in the order of the steps.

    Args:
        vocab_tokens: columns of the logits.
        slots: requests that can be held at once.
        device: where logits and history are.
        grammar: makes grammar states; None if structured output is not available.
        entropy: bytes that unseeded requests draw their seeds from; None is fresh ones. Ranks that must
            agree on tokens are given the same.
        weigh: the bound op `token_weights`.
    """

    def __init__(
        self,
        *,
        vocab_tokens: int,
        slots: int,
        device: torch.device,
        grammar: GrammarFactory | None,
        entropy: bytes | None = None,
        weigh: Weigh = token_weights.reference,
    ) -> None:
        self._vocab_tokens = vocab_tokens
        self._grammars = grammar
        self._entropy = secrets.token_bytes(32) if entropy is None else entropy
        self._weigh = weigh
        # A compiled backend compiles on its first call; no request should wait for that.
        weigh(*(torch.ones(shape, device=device) for shape in ((1, vocab_tokens), (1,), (1,))))
        self._table = SlotTable(slots, vocab_tokens)
        self._history = History(torch.empty(slots, 0, dtype=torch.int32, device=device))

    def admit(
        self,
        slot: int,
        *,
        request_id: str,
        params: SamplingParams,
        sibling: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        prompt_tokens: int,
        output_ids: Sequence[int],
    ) -> None:
        """Take a request into a slot.

        output_ids are tokens generated before a preemption; the grammar goes on after them. A grammar
        that cannot be used is reported by `sample`, as an error of the request's rows.
        """
        seed = seed_of(request_id, self._entropy) if params.seed is None else params.seed
        grammar, error = None, ""
        try:
            grammar = self._grammar(params, stop_ids, output_ids)
        except GrammarError as refused:
            error = str(refused)
        self._table.set(
            slot,
            params,
            key=request_key(seed, sibling),
            prompt_tokens=prompt_tokens,
            stop_ids=stop_ids,
            grammar=grammar,
            error=error,
        )

    def release(self, slot: int) -> None:
        """Forget the request in a slot."""
        self._table.clear(slot)

    def sample(self, logits: Tensor, slots: Int32s, positions: Int32s, history: Tensor) -> Sampled:
        """Choose a token per row.

        logits: [rows, vocab] float32, may be changed in place. slots: [rows] int32, no slot twice.
        positions: [rows] int32, tokens so far, which is the index of the one to be sampled.
        history: [slots, max_len] int32 on the device; history[slot, :position] are the tokens so far.
        """
        assert logits.shape == (len(slots), self._vocab_tokens), f"logits are {logits.shape}"
        logits = logits.contiguous()
        rows = Rows(self._table, slots, positions)
        scored = np.flatnonzero(self._table.logprobs[slots] >= 0)
        raw = _copied(logits, scored)
        errors = {
            row: rows.extras(row).error
            for row in np.flatnonzero(self._table.has_error[slots]).tolist()
        }
        constrained = np.flatnonzero(self._table.has_grammar[slots]).tolist()
        _note_bad_scores(logits, constrained, errors)

        self._history.token_ids = history
        for stage in STAGES:
            stage(logits, rows, self._history)
        token_ids = self._choose(logits, rows, errors)
        finished = _advance_grammars(token_ids, rows, constrained, errors)

        for row in errors:
            token_ids[row] = HARMLESS_ID
        return Sampled(
            token_ids=token_ids.int(),
            logprobs=self._score(raw, token_ids, rows, scored, errors),
            errors=errors,
            finished=finished,
        )

    def prompt_logprobs(self, logits: Tensor, target_ids: Tensor, top: int) -> list[TokenLogprobs]:
        """Score prompt tokens: row i of logits [rows, vocab] scores target_ids[i], with `top` others."""
        tops = [top] * logits.shape[0]
        return score(logits, target_ids.to(logits.device), tops, self._weigh)

    def _grammar(
        self, params: SamplingParams, stop_ids: frozenset[int], output_ids: Sequence[int]
    ) -> GrammarState | None:
        if params.structured is None:
            return None
        if self._grammars is None:
            raise GrammarError("structured output is not available: the model has no tokenizer")
        return self._grammars.start(
            params.structured,
            stop_ids=stop_ids,
            client_stop_ids=frozenset(params.stop_token_ids),
            output_ids=output_ids,
        )

    def _choose(self, logits: Tensor, rows: Rows, errors: dict[int, str]) -> Tensor:
        """A token per row, [rows] int64; rows whose scores are unusable are added to errors."""
        greedy = self._table.greedy[rows.slots]
        if greedy.all():
            token_ids = scan.argmax(logits)
            peaks = logits.gather(1, token_ids[:, None])[:, 0]
            _note_bad_peaks(peaks, errors)
            return token_ids
        peaks = logits.amax(dim=1)
        _note_bad_peaks(peaks, errors)
        drawn = ~greedy
        drawn[list(errors)] = False
        token_ids = torch.full((len(greedy),), HARMLESS_ID, device=logits.device)
        for chosen, choose in ((greedy, _choose_likeliest), (drawn, self._choose_at_random)):
            at = np.flatnonzero(chosen)
            if at.size:
                index = torch.from_numpy(at).to(logits.device)
                part = logits if at.size == logits.shape[0] else logits.index_select(0, index)
                token_ids[index] = choose(part, peaks[index], rows, at)
        return token_ids

    def _choose_at_random(self, logits: Tensor, peaks: Tensor, rows: Rows, at: Int64s) -> Tensor:
        table, slots = self._table, rows.slots[at]
        asked = Draw(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            uniforms=uniforms(table.key[slots], rows.positions[at]),
        )
        return draw(logits, peaks, asked, self._weigh)

    def _score(
        self, raw: Tensor, token_ids: Tensor, rows: Rows, scored: Int64s, errors: dict[int, str]
    ) -> tuple[TokenLogprobs | None, ...]:
        entries: list[TokenLogprobs | None] = [None] * len(rows.slots)
        kept = [at for at, row in enumerate(scored.tolist()) if row not in errors]
        if len(kept) < scored.size:
            raw = raw[kept]
        if kept:
            asked = scored[kept]
            tops = self._table.logprobs[rows.slots[asked]].tolist()
            chosen = token_ids[torch.from_numpy(asked).to(token_ids.device)]
            for row, entry in zip(
                asked.tolist(), score(raw, chosen, tops, self._weigh), strict=True
            ):
                entries[row] = entry
        return tuple(entries)


def _choose_likeliest(logits: Tensor, peaks: Tensor, rows: Rows, at: Int64s) -> Tensor:
    return scan.argmax(logits)


def _copied(logits: Tensor, rows: Int64s) -> Tensor:
    """Some rows, safe from the stages."""
    if rows.size == logits.shape[0]:
        return logits.clone()
    return logits.index_select(0, torch.from_numpy(rows).to(logits.device))


def _note_bad_scores(logits: Tensor, rows: list[int], errors: dict[int, str]) -> None:
    """Check rows whose bad scores a mask could hide."""
    if rows:
        _note_bad_peaks(logits[rows].amax(dim=1), errors, rows)


def _note_bad_peaks(peaks: Tensor, errors: dict[int, str], rows: list[int] | None = None) -> None:
    """Add an error for every row whose highest score is not a number; a NaN is always the highest."""
    values = peaks.cpu().numpy()
    for at in np.flatnonzero(~np.isfinite(values)).tolist():
        reason = (
            "no token is allowed: every one is ruled out"
            if values[at] == -np.inf
            else f"the model's scores hold {values[at]}"
        )
        errors.setdefault(at if rows is None else rows[at], reason)


def _advance_grammars(
    token_ids: Tensor, rows: Rows, constrained: list[int], errors: dict[int, str]
) -> frozenset[int]:
    """Tell the grammars their tokens. Reading these waits for the device, in such steps alone."""
    finished: set[int] = set()
    chosen = token_ids.tolist() if constrained else []
    for row in constrained:
        grammar = rows.grammar(row)
        if row not in errors:
            grammar.accept(chosen[row])
        if grammar.error:
            errors[row] = f"the grammar cannot go on: {grammar.error}"
        elif row not in errors and grammar.complete:
            finished.add(row)
    return frozenset(finished)
