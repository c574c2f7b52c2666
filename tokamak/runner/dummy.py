"""A plan without a request: what warm-up, recording and an idle data-parallel rank run.

It goes through the same step as a real plan. Its rows sit in slot 0, whose block table names the null
block alone, however long their contexts are, so nothing a request owns is touched.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tokamak.core.plan import Grants, StepPlan, StepShape

NULL_SLOT = 0


def dummy_plan(
    *,
    prefill_tokens: int,
    decode_rows: int,
    q_width: int = 1,
    context_tokens: int = 0,
    seq: int = -1,
) -> StepPlan:
    """Prefill rows of `prefill_tokens` in all (none if 0), each final, then decode rows of `q_width` tokens.

    context_tokens: tokens a request has after the step. Rows start as late as that allows, and prefill tokens
    that do not fit in one request are spread over several. 0: every row starts a request, prefill is one row.
    """
    room = context_tokens or max(prefill_tokens, 1)
    full, rest = divmod(prefill_tokens, room)
    prefill = [room] * full + [rest] * (rest > 0)
    lens = np.array(prefill + [q_width] * decode_rows, dtype=np.int32)
    rows = len(lens)
    final = np.zeros(rows, dtype=np.bool_)
    final[: len(prefill)] = True
    return StepPlan(
        seq=seq,
        request_ids=("",) * rows,
        slots=np.full(rows, NULL_SLOT, dtype=np.int32),
        query_lens=lens,
        computed_before=np.maximum(np.int32(context_tokens) - lens, 0).astype(np.int32),
        prefill_rows=len(prefill),
        final_chunk=final,
        admissions=(),
        grants=Grants.none(),
    )


def full_plan(shape: StepShape, *, context_tokens: int, seq: int = -1) -> StepPlan:
    """The worst plan of a shape: no row is padding and contexts are `context_tokens` long (SH-17)."""
    if shape.q_width:
        return dummy_plan(
            prefill_tokens=0,
            decode_rows=shape.running_requests,
            q_width=shape.q_width,
            context_tokens=context_tokens,
            seq=seq,
        )
    return dummy_plan(
        prefill_tokens=shape.running_tokens, decode_rows=0, context_tokens=context_tokens, seq=seq
    )


def idle_plan(shape: StepShape, seq: int) -> StepPlan:
    """What a rank without work runs beside its peers: one row of the group's kind, in the group's size.

    The shape pads it to `running_tokens` like any other plan; its row writes to the null block alone. One
    prefill row of one token stays within every model's context, however large the bucket is; nothing is sampled after
    it, as late layers of its peers may run for none of their rows.
    """
    assert shape.dummy, f"a rank with {shape.scheduled_requests} requests of its own is not idle"
    assert shape.running_requests, "no rank has work, so there is no step to run"
    decode_rows = int(shape.q_width > 0)
    plan = dummy_plan(
        prefill_tokens=1 - decode_rows,
        decode_rows=decode_rows,
        q_width=max(shape.q_width, 1),
        seq=seq,
    )
    return replace(plan, final_chunk=np.zeros(1, dtype=np.bool_))
