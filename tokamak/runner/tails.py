"""From which token on do late layers run for each request? Told at its admission, and asked in every step."""

from __future__ import annotations

import numpy as np

from tokamak.core.plan import Admission, Int32s, StepPlan
from tokamak.layers.attention.tail import TailRows, tail_counts


class Tails:
    """The tails of the requests in a rank's slots."""

    def __init__(self, slots: int, *, staged: bool) -> None:
        """Begin with slots whose requests run whole. staged: whether the model has late layers."""
        self._staged = staged
        self._first = np.zeros(slots, dtype=np.int32)

    def admit(self, admission: Admission) -> None:
        """Note where the tail of a new request begins."""
        self.set(admission.slot, admission.first_late)

    def set(self, slot: int, first_late: int) -> None:
        """Let the tail of a slot's request begin at a position."""
        self._first[slot] = first_late

    def count(self, plan: StepPlan) -> int:
        """How many rows of a plan late layers run for; 0 for a model that always runs whole."""
        if not self._staged:
            return 0
        if not plan.prefill_rows:
            return plan.scheduled_tokens
        return int(tail_counts(plan, self._of(plan)).sum())

    def rows(self, plan: StepPlan) -> TailRows:
        """The rows themselves."""
        return TailRows.of(plan, self._of(plan))

    def _of(self, plan: StepPlan) -> Int32s:
        return self._first[plan.slots]
