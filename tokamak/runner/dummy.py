"""A plan without a request: what warm-up, recording and an idle data-parallel rank run.

It goes through the same step as a real plan. Its rows sit in slot 0, whose block table names the null
block alone, so nothing a request owns is touched.
"""

from __future__ import annotations

import numpy as np

from tokamak.core.plan import StepPlan

NULL_SLOT = 0


def dummy_plan(*, prefill_tokens: int, decode_rows: int, seq: int = -1) -> StepPlan:
    """One prefill row of `prefill_tokens` (none if 0) that is final, and some decode rows."""
    prefill_rows = int(prefill_tokens > 0)
    rows = prefill_rows + decode_rows
    lens = np.ones(rows, dtype=np.int32)
    lens[:prefill_rows] = prefill_tokens
    final = np.zeros(rows, dtype=np.bool_)
    final[:prefill_rows] = True
    return StepPlan(
        seq=seq,
        request_ids=("",) * rows,
        slots=np.full(rows, NULL_SLOT, dtype=np.int32),
        query_lens=lens,
        computed_before=np.zeros(rows, dtype=np.int32),
        prefill_rows=prefill_rows,
        final_chunk=final,
        admissions=(),
        grants=(),
    )
