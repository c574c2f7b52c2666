"""How likely the prompt's own tokens were: the log-probabilities behind `echo` and `prompt_logprobs`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.core.plan import Admission, StepPlan, TokenLogprobs
from tokamak.layers.model import Model
from tokamak.sampling.sampler import Sampler

SLICE_ROWS = 64
"""Prompt rows whose logits exist at a time; a whole chunk of a large vocabulary would be gigabytes."""


@dataclass(slots=True)
class _Wish:
    """A slot whose prompt is scored: alternatives a position, the prompt's end, entries delivered."""

    top: int
    prompt_tokens: int
    scored_tokens: int


class PromptScorer:
    """Scores prompt positions of the slots that asked for it; others cost nothing."""

    def __init__(self, model: Model, sampler: Sampler, history: Tensor) -> None:
        self._model = model
        self._sampler = sampler
        self._history = history
        self._wishes: dict[int, _Wish] = {}

    def admit(self, admission: Admission) -> None:
        """Note whether a new request wants its prompt scored."""
        self._wishes.pop(admission.slot, None)
        top = admission.params.prompt_logprobs
        if top is not None:
            self._wishes[admission.slot] = _Wish(
                top, admission.prompt_tokens, admission.scored_tokens
            )

    def score(self, plan: StepPlan, hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """By request row of a prefill: entries for the prompt tokens its chunk predicts."""
        scored: dict[int, list[TokenLogprobs]] = {}
        if not self._wishes:
            return scored
        starts = plan.query_lens.cumsum() - plan.query_lens
        for row in range(plan.prefill_rows):
            wish = self._wishes.get(int(plan.slots[row]))
            if wish is not None:
                before, start = int(plan.computed_before[row]), int(starts[row])
                # Entry e is about prompt token e + 1, predicted at position e.
                first = max(before, wish.scored_tokens)
                last = min(before + int(plan.query_lens[row]), wish.prompt_tokens - 1)
                rows = hidden[start + first - before : start + max(last, first) - before]
                scored[row] = self._score_rows(rows, int(plan.slots[row]), first, wish.top)
        return scored

    def _score_rows(self, hidden: Tensor, slot: int, first: int, top: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for part in torch.split(hidden, SLICE_ROWS):
            if not len(part):
                continue
            at = first + len(entries)
            targets = self._history[slot, at + 1 : at + 1 + len(part)]
            entries += self._sampler.prompt_logprobs(self._model.logits(part), targets, top)
        return entries
