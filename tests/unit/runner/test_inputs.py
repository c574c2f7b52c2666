"""Are a step's ids, positions and cache slots what the plan says, with padding that touches nothing?"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.factory import a_request, a_result, a_scheduler, cache_groups
from tests.support.steps import a_build
from tokamak.core.plan import Mode, StepPlan, StepShape
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.inputs import InputArena

BLOCK = 4


def an_arena(max_requests: int = 8, max_tokens: int = 64) -> InputArena:
    return InputArena(
        a_build(),
        cache_groups(),
        max_requests=max_requests,
        max_tokens=max_tokens,
        block_tokens=BLOCK,
    )


def a_shape(plan: StepPlan, padding: int = 0) -> StepShape:
    return StepShape(
        mode=Mode.EAGER,
        dummy=False,
        scheduled_requests=plan.scheduled_requests,
        scheduled_tokens=plan.scheduled_tokens,
        running_requests=plan.scheduled_requests,
        running_tokens=plan.scheduled_tokens + padding,
        q_width=0,
        cut=None,
        uniform_rows=True,
        why="test",
    )


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_token_row_is_the_one_the_plan_means(seed: int):
    chance = random.Random(seed)
    scheduler = a_scheduler(step_tokens=chance.randint(8, 24), blocks=40, block_tokens=BLOCK)
    arena = an_arena()
    requests = [
        a_request(f"r{at}", prompt=[chance.randint(3, 90) for _ in range(chance.randint(1, 20))])
        for at in range(6)
    ]
    for request in requests:
        scheduler.add(request)
    by_name = {request.request_id: request for request in requests}
    tables: dict[int, dict[int, int]] = {}
    while scheduler.unfinished_requests:
        plan = scheduler.plan()
        for admission in plan.admissions:
            tables[admission.slot] = {}
            arena.admit(admission)
        for grant in plan.grants:
            tables[grant.slot].update(enumerate(grant.block_ids, grant.start))
        padding = chance.randint(0, 5)

        step = arena.fill(plan, a_shape(plan, padding))

        ids, positions, slots = [], [], []
        for name, slot, before, length in zip(
            plan.request_ids,
            plan.slots.tolist(),
            plan.computed_before.tolist(),
            plan.query_lens.tolist(),
            strict=True,
        ):
            ids += by_name[name].token_ids(before, before + length)
            positions += range(before, before + length)
            slots += [
                tables[slot][p // BLOCK] * BLOCK + p % BLOCK for p in range(before, before + length)
            ]
        rows = step.rows["keys"]
        assert step.token_ids.tolist() == ids + [0] * padding
        assert step.positions.tolist() == positions + [0] * padding
        assert rows.write_slots.tolist() == slots + [-1] * padding
        assert rows.lengths.tolist() == (plan.computed_before + plan.query_lens).tolist()
        starts = np.concatenate([[0], np.cumsum(plan.query_lens)])
        assert step.query_starts.tolist() == starts.tolist()
        assert step.logit_rows.tolist() == [int(starts[row + 1]) - 1 for row in plan.sampled_rows]
        assert step.prefill_tokens == int(plan.query_lens[: plan.prefill_rows].sum())
        result = a_result(plan, chance.randint(3, 90))
        sampled = plan.sampled_rows
        arena.remember(
            torch.from_numpy(plan.slots[sampled]),
            torch.from_numpy((plan.computed_before + plan.query_lens)[sampled]),
            torch.tensor([result.rows[row].token_ids[0] for row in sampled], dtype=torch.int32),
        )
        scheduler.commit(result)


def test_addresses_stay_the_same_from_step_to_step():
    arena = an_arena()
    plan = dummy_plan(prefill_tokens=5, decode_rows=2)

    first = arena.fill(plan, a_shape(plan))
    addresses = (first.token_ids.data_ptr(), first.positions.data_ptr())
    second = arena.fill(plan, a_shape(plan))

    assert (second.token_ids.data_ptr(), second.positions.data_ptr()) == addresses


@pytest.mark.parametrize(("prefill", "decode"), [(7, 0), (0, 3), (9, 2)])
def test_dummy_rows_write_to_the_null_block_alone(prefill: int, decode: int):
    plan = dummy_plan(prefill_tokens=prefill, decode_rows=decode)

    step = an_arena().fill(plan, a_shape(plan))

    rows = step.rows["keys"]
    assert set(rows.block_table.flatten().tolist()) == {0}
    assert all(0 <= slot < BLOCK for slot in rows.write_slots.tolist())
