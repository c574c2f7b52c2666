"""What does a step without a request of its own run, and what may it touch?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.preparation import BLOCK_TOKENS, a_decode_plan, an_arena, prepared, shape_of
from tests.support.shapes import Recorded, a_row, settle
from tokamak.core.plan import Mode, StepPlan, StepShape
from tokamak.runner.dummy import NULL_SLOT, dummy_plan, full_plan, idle_plan


def a_shape(*, mode: Mode, requests: int, tokens: int, q_width: int) -> StepShape:
    """What an idle rank settles beside busy ones."""
    return StepShape(
        mode=mode,
        dummy=True,
        scheduled_requests=0,
        scheduled_tokens=0,
        running_requests=requests,
        running_tokens=tokens,
        q_width=q_width,
        cut=None,
        uniform_rows=True,
        draft_requests=0,
        why="bucket",
        wanted=None,
        late=None,
    )


TOKEN_BUCKET = a_shape(mode=Mode.TOKEN_GRAPH, requests=1, tokens=4096, q_width=0)
REQUEST_BUCKET = a_shape(mode=Mode.REQUEST_GRAPH, requests=8, tokens=32, q_width=4)


def lengths(plan: StepPlan) -> list[int]:
    """Tokens each row's request has after the step."""
    return (plan.computed_before + plan.query_lens).tolist()


def test_sizes_become_rows_of_the_null_slot_without_blocks():
    plan = dummy_plan(prefill_tokens=9, decode_rows=2, q_width=3, seq=7)

    assert plan.query_lens.tolist() == [9, 3, 3]
    assert plan.prefill_rows == 1
    assert plan.final_chunk.tolist() == [True, False, False]
    assert plan.computed_before.tolist() == [0, 0, 0]
    assert plan.seq == 7
    assert set(plan.slots.tolist()) == {NULL_SLOT}
    assert not plan.admissions
    assert len(plan.grants) == 0


def test_long_contexts_are_asked_for_by_their_length():
    plan = dummy_plan(prefill_tokens=64, decode_rows=2, q_width=4, context_tokens=1000)

    assert plan.computed_before.tolist() == [936, 996, 996]
    assert lengths(plan) == [1000, 1000, 1000]


def test_prefill_that_no_context_holds_is_spread_over_requests():
    plan = dummy_plan(prefill_tokens=250, decode_rows=0, context_tokens=100)

    assert plan.query_lens.tolist() == [100, 100, 50]
    assert lengths(plan) == [100, 100, 100]
    assert plan.prefill_rows == 3


@pytest.mark.parametrize("shape", [TOKEN_BUCKET, REQUEST_BUCKET], ids=lambda shape: shape.mode)
def test_the_worst_plan_of_a_shape_has_no_padding_and_long_contexts(shape: StepShape):
    plan = full_plan(shape, context_tokens=512)

    assert plan.scheduled_tokens == shape.running_tokens
    assert set(lengths(plan)) == {512}
    assert bool(plan.prefill_rows) == (shape.q_width == 0)
    assert set(plan.slots.tolist()) == {NULL_SLOT}


def test_an_idle_rank_prefills_beside_prefilling_peers():
    plan = idle_plan(TOKEN_BUCKET, 41)

    assert plan.seq == 41
    assert (plan.prefill_rows, plan.scheduled_requests, plan.scheduled_tokens) == (1, 1, 1)
    assert plan.slots.tolist() == [NULL_SLOT]


def test_an_idle_rank_decodes_rows_of_the_group_s_width_beside_decoding_peers():
    plan = idle_plan(REQUEST_BUCKET, 41)

    assert (plan.prefill_rows, plan.scheduled_requests) == (0, 1)
    assert plan.query_lens.tolist() == [4]
    assert plan.slots.tolist() == [NULL_SLOT]


def test_a_rank_with_work_or_a_group_without_any_has_no_idle_plan():
    with pytest.raises(AssertionError, match="3 requests of its own is not idle"):
        idle_plan(replace(REQUEST_BUCKET, dummy=False, scheduled_requests=3), 0)
    with pytest.raises(AssertionError, match="no rank has work"):
        idle_plan(replace(REQUEST_BUCKET, running_requests=0), 0)


SETTLED = {
    "token bucket": ([a_row(prefill=(20,)), a_row()], {"token_graph": Recorded(32)}),
    "eager prefill": ([a_row(prefill=(20,)), a_row()], {}),
    "request bucket": ([a_row(decode=5, width=2), a_row()], {"req_graph": Recorded(8)}),
    "eager decode": ([a_row(decode=5, width=2), a_row()], {}),
}


@pytest.mark.parametrize("case", SETTLED)
def test_an_idle_rank_s_inputs_touch_the_null_block_alone_whatever_ran_before(case: str):
    rows, graphs = SETTLED[case]
    shape, _ = settle(rows, 1, **graphs)
    arena = an_arena()
    busy = a_decode_plan([3] * 8, grants=[(slot, 10 + slot) for slot in range(1, 9)])
    prepared(arena, busy, shape_of(busy))

    step = prepared(arena, idle_plan(shape, 5), shape)

    cache = step.rows["keys"]
    assert len(step.token_ids) == len(cache.write_slots) == shape.running_tokens
    assert len(cache.block_table) == shape.running_requests
    assert not cache.block_table.any()
    assert int(cache.write_slots.max()) < BLOCK_TOKENS
    own = 1 if shape.q_width == 0 else shape.q_width
    assert set(cache.write_slots[own:].tolist()) <= {-1}


@pytest.mark.parametrize("case", ["token bucket", "request bucket"])
def test_the_worst_plan_of_a_shape_reads_long_contexts_of_the_null_block(case: str):
    rows, graphs = SETTLED[case]
    shape, _ = settle(rows, 0, **graphs)

    step = prepared(an_arena(), full_plan(shape, context_tokens=200), shape)

    cache = step.rows["keys"]
    assert set(cache.lengths.tolist()) == {200}
    assert not cache.block_table.any()
    assert 0 <= int(cache.write_slots.min()) <= int(cache.write_slots.max()) < BLOCK_TOKENS
