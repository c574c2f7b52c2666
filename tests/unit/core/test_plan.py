"""Does a plan tell its sizes, lengths and sampled rows truly, also when it is changed?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tokamak.core.plan import Grants, StepPlan


def a_mixed_plan() -> StepPlan:
    """A chunk that is not final, one that is, and two decode rows."""
    return StepPlan(
        seq=4,
        request_ids=("chunk", "final", "old", "older"),
        slots=np.array([1, 2, 3, 4], dtype=np.int32),
        query_lens=np.array([5, 4, 1, 1], dtype=np.int32),
        computed_before=np.array([0, 3, 7, 9], dtype=np.int32),
        prefill_rows=2,
        final_chunk=np.array([False, True, False, False]),
        admissions=(),
        grants=Grants.none(),
    )


def test_a_plan_knows_its_sizes_and_how_long_its_requests_will_be():
    plan = a_mixed_plan()

    assert (plan.scheduled_requests, plan.scheduled_tokens) == (4, 11)
    assert plan.lengths.tolist() == [5, 7, 8, 10]
    assert plan.lengths.dtype == np.int32
    assert plan.longest_tokens == 10


def test_final_chunks_and_decode_rows_are_sampled():
    plan = a_mixed_plan()

    assert plan.sampled_rows.tolist() == [1, 2, 3]
    assert plan.sampled_rows.dtype == np.int32


def test_a_changed_plan_is_derived_anew():
    lens = np.array([6, 4, 2, 2], dtype=np.int32)
    final = np.array([True, True, False, False])

    plan = replace(a_mixed_plan(), query_lens=lens, final_chunk=final)

    assert plan.scheduled_tokens == 14
    assert plan.lengths.tolist() == [6, 7, 9, 11]
    assert plan.longest_tokens == 11
    assert plan.sampled_rows.tolist() == [0, 1, 2, 3]


def test_an_empty_plan_has_no_rows():
    plan = StepPlan.empty(3)

    assert (plan.scheduled_requests, plan.scheduled_tokens, plan.longest_tokens) == (0, 0, 0)
    assert plan.lengths.tolist() == plan.sampled_rows.tolist() == []
