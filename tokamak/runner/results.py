"""What a step gave, on its way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tokamak.core.plan import RowResult, StepPlan, StepResult, TokenLogprobs
from tokamak.sampling.sampler import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingResult:
    """A launched step. `take` is where the host waits for the device."""

    plan: StepPlan
    sampled: Sampled
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]]
    """By request row: entries of the prompt positions this step scored."""

    def take(self) -> StepResult:
        """Wait for the step and read its tokens."""
        plan, sampled = self.plan, self.sampled
        token_ids = sampled.token_ids.tolist()
        place = np.full(plan.scheduled_requests, -1, dtype=np.int32)
        place[plan.sampled_rows] = np.arange(len(token_ids), dtype=np.int32)
        rows: list[RowResult] = []
        for row, (request_id, at) in enumerate(zip(plan.request_ids, place.tolist(), strict=True)):
            logprobs = sampled.logprobs[at] if at >= 0 else None
            rows.append(
                RowResult(
                    request_id=request_id,
                    token_ids=(token_ids[at],) if at >= 0 else (),
                    logprobs=() if logprobs is None else (logprobs,),
                    prompt_logprobs=tuple(self.prompt_logprobs.get(row, ())),
                    complete=at in sampled.finished,
                    error=sampled.errors.get(at, ""),
                )
            )
        return StepResult(seq=plan.seq, rows=tuple(rows))
