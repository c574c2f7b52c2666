"""Are a step's ids, positions and cache slots what the plan says, with padding that touches nothing?"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.factory import a_request, a_result, a_scheduler
from tests.support.preparation import a_decode_plan, an_arena, prepared, shape_of, two_groups
from tokamak.core.plan import Grants, StepPlan
from tokamak.errors import ArenaOverflow, ShapeInvariant
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.inputs import GRANTS_A_COPY, InputArena

BLOCK = 4


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
        grants = plan.grants
        for slot, at, block_id in zip(
            grants.slots.tolist(), grants.entries.tolist(), grants.block_ids.tolist(), strict=True
        ):
            tables[slot][at] = block_id
        padding = chance.randint(0, 5)

        step = prepared(arena, plan, shape_of(plan, token_padding=padding))

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
        for row, (slot, length) in enumerate(
            zip(plan.slots.tolist(), rows.lengths.tolist(), strict=True)
        ):
            held = [tables[slot][at] for at in sorted(tables[slot])]
            reached = -(-length // BLOCK)
            entries = rows.block_table[row].tolist()
            assert entries[:reached] == held[:reached]
            assert set(entries[reached:]) <= {0, *held}
        starts = np.concatenate([[0], np.cumsum(plan.query_lens)])
        assert step.query_starts.tolist() == starts.tolist()
        assert step.logit_rows.tolist() == [int(starts[row + 1]) - 1 for row in plan.sampled_rows]
        result = a_result(plan, chance.randint(3, 90))
        sampled = plan.sampled_rows
        arena.remember(
            *arena.sampled,
            torch.tensor([result.rows[row].token_ids[0] for row in sampled], dtype=torch.int32),
        )
        scheduler.commit(result)


def test_logit_rows_are_last_rows_of_final_chunks_then_every_decode_row():
    plan = a_decode_plan([3, 7], q_width=2)
    plan = StepPlan(
        seq=0,
        request_ids=("a", "b", *plan.request_ids),
        slots=np.array([3, 4, *plan.slots], dtype=np.int32),
        query_lens=np.array([5, 4, 2, 2], dtype=np.int32),
        computed_before=np.array([0, 0, 3, 7], dtype=np.int32),
        prefill_rows=2,
        final_chunk=np.array([False, True, False, False]),
        admissions=(),
        grants=Grants.none(),
    )

    step = prepared(an_arena(), plan, shape_of(plan))

    assert step.logit_rows.tolist() == [8, 9, 10, 11, 12]
    assert step.logit_rows.dtype == torch.int32


def test_addresses_stay_the_same_from_step_to_step_whatever_its_size():
    arena = an_arena()
    plans = [
        dummy_plan(prefill_tokens=5, decode_rows=2),
        a_decode_plan([3, 4, 5]),
        dummy_plan(prefill_tokens=9, decode_rows=0),
        a_decode_plan([3]),
    ]

    steps = [prepared(arena, plan, shape_of(plan)) for plan in plans]

    addresses = {
        tuple(
            tensor.data_ptr()
            for tensor in (
                step.token_ids,
                step.positions,
                step.query_starts,
                step.logit_rows,
                step.rows["keys"].block_table,
                step.rows["keys"].lengths,
                step.rows["keys"].write_slots,
            )
        )
        for step in steps
    }
    assert len(addresses) == 1


def test_a_step_leaves_the_host_half_alone_that_the_step_before_was_copied_from():
    arena = an_arena()
    first, second, third = (a_decode_plan([n]) for n in (3, 5, 7))
    arena.stage(first, shape_of(first))
    staged = [half.array.copy() for half in arena._halves]

    arena.stage(second, shape_of(second))

    changed = [
        not np.array_equal(half.array, before)
        for half, before in zip(arena._halves, staged, strict=True)
    ]
    assert changed == [False, True]
    arena.stage(third, shape_of(third))
    assert arena._halves[0].member["lengths"][0] == 8


def test_a_padded_decode_step_has_inert_rows_after_the_real_ones():
    arena = an_arena()
    full = a_decode_plan([9, 9, 9, 9], grants=[(1, 4), (2, 5), (3, 6), (4, 7)])
    prepared(arena, full, shape_of(full))
    plan = a_decode_plan([5, 6])

    step = prepared(arena, plan, shape_of(plan, running_requests=4))

    rows = step.rows["keys"]
    assert step.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert rows.lengths.tolist() == [6, 7, 1, 1]
    assert not rows.block_table[2:].any()
    assert rows.write_slots[2:].tolist() == [-1, -1]
    assert step.token_ids[2:].tolist() == [0, 0]
    assert step.logit_rows.tolist() == [0, 1]


def test_padding_rows_of_wide_decode_steps_are_as_wide_and_see_their_own_width():
    plan = a_decode_plan([5], q_width=4)

    step = prepared(an_arena(), plan, shape_of(plan, running_requests=3))

    assert step.query_starts.tolist() == [0, 4, 8, 12]
    assert step.rows["keys"].lengths.tolist() == [9, 4, 4]
    assert step.positions.tolist() == [5, 6, 7, 8] + [0] * 8


def test_an_idle_rank_publishes_its_padding_into_the_buffers_a_recording_reads():
    """SH-16: a replay on the idle rank must not find the last real step's block table."""
    arena = an_arena()
    real = a_decode_plan([9, 9], grants=[(1, 4), (2, 5)])
    before = prepared(arena, real, shape_of(real))
    assert before.rows["keys"].block_table.any()
    idle = dummy_plan(prefill_tokens=0, decode_rows=1)

    step = prepared(arena, idle, shape_of(idle, running_requests=2))

    assert step.rows["keys"].block_table.data_ptr() == before.rows["keys"].block_table.data_ptr()
    assert not before.rows["keys"].block_table.any()
    assert before.rows["keys"].write_slots.tolist()[1] == -1


@pytest.mark.parametrize(("prefill", "decode"), [(7, 0), (0, 3), (9, 2)])
def test_dummy_rows_write_to_the_null_block_alone(prefill: int, decode: int):
    plan = dummy_plan(prefill_tokens=prefill, decode_rows=decode)

    step = prepared(an_arena(), plan, shape_of(plan))

    rows = step.rows["keys"]
    assert set(rows.block_table.flatten().tolist()) == {0}
    assert all(0 <= slot < BLOCK for slot in rows.write_slots.tolist())


def test_a_slot_taken_again_starts_with_an_empty_block_table():
    scheduler = a_scheduler(blocks=40, block_tokens=BLOCK, requests=1)
    arena = an_arena()
    for name, prompt in (("long", 20), ("short", 3)):
        scheduler.add(a_request(name, prompt=prompt, max_tokens=1))
    tables = []

    while scheduler.unfinished_requests:
        plan = scheduler.plan()
        for admission in plan.admissions:
            arena.admit(admission)
        step = prepared(arena, plan, shape_of(plan))
        tables.append(int((step.rows["keys"].block_table != 0).sum()))
        scheduler.commit(a_result(plan))

    assert tables == [5, 1]


def test_more_grants_than_the_arena_holds_all_arrive():
    arena = an_arena(max_requests=2, max_model_len=64)
    room = arena._grant_room
    count = 2 * room + 3
    places = np.arange(count, dtype=np.int32)
    width = arena.tables.tables.shape[2]
    grants = Grants(
        groups=np.zeros(count, dtype=np.int32),
        slots=1 + places // width,
        entries=places % width,
        block_ids=places + 1,
    )
    arena.tables.tables = torch.zeros((1, 2 + count // width, width), dtype=torch.int32)
    plan = a_decode_plan([5], grants=grants)

    prepared(arena, plan, shape_of(plan))

    assert arena.tables.tables.flatten()[width : width + count].tolist() == (places + 1).tolist()


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (a_decode_plan([3] * 9), "9 request rows"),
        (dummy_plan(prefill_tokens=65, decode_rows=0), "65 token rows"),
        (a_decode_plan([256]), "257 tokens in one request"),
    ],
)
def test_a_step_larger_than_the_buffers_is_refused_by_name(plan: StepPlan, name: str):
    arena = an_arena(max_requests=8, max_tokens=64, max_model_len=256)

    with pytest.raises(ArenaOverflow, match=name):
        arena.stage(plan, shape_of(plan))


def test_a_shape_smaller_than_its_plan_is_refused():
    plan = a_decode_plan([3, 4])

    with pytest.raises(ShapeInvariant, match="2 request rows"):
        an_arena().stage(plan, shape_of(plan, running_requests=1))


def test_views_of_decode_steps_are_made_once():
    arena = an_arena()
    plan = a_decode_plan([3, 4])

    first = prepared(arena, plan, shape_of(plan))
    second = prepared(arena, plan, shape_of(plan))

    assert first is second


def test_the_published_prefix_ends_with_the_part_of_the_grants_in_use():
    """One copy carries all members; what lies behind it keeps what it had."""
    arena: InputArena = an_arena()
    arena._packed.fill_(77)
    plan = a_decode_plan([3], grants=[(1, 4)])

    arena.stage(plan, shape_of(plan))
    arena.publish()

    place = arena._layout["grants"]
    assert arena._packed[place.start : place.start + 4].tolist() == [0, 1, 0, 4]
    assert set(arena._packed[place.start + 4 * GRANTS_A_COPY :].tolist()) == {77}


def test_the_groups_of_an_arena_are_told_apart():
    arena = an_arena(groups=two_groups())
    plan = a_decode_plan(
        [5],
        grants=Grants(
            groups=np.array([0, 1, 1], dtype=np.int32),
            slots=np.array([1, 1, 1], dtype=np.int32),
            entries=np.array([1, 0, 1], dtype=np.int32),
            block_ids=np.array([6, 8, 9], dtype=np.int32),
        ),
    )

    step = prepared(arena, plan, shape_of(plan))

    keys, window = step.rows.values()
    assert keys.block_table[0, :2].tolist() == [0, 6]
    assert window.block_table[0, :2].tolist() == [8, 9]
    assert (keys.write_slots.tolist(), window.write_slots.tolist()) == ([6 * 4 + 1], [9 * 4 + 1])


def test_a_row_that_sat_out_a_step_keeps_nothing_of_its_longer_table():
    arena = an_arena()
    arena.tables.tables[:, 2] = 9
    long = a_decode_plan([3, 39], seq=0)
    alone, beside = a_decode_plan([3], seq=1), a_decode_plan([3, 3], slots=[1, 3], seq=2)
    for plan in (long, alone):
        prepared(arena, plan, shape_of(plan))

    step = prepared(arena, beside, shape_of(beside))

    assert set(step.rows["keys"].block_table[1].tolist()) == {0}


def test_chunks_of_one_token_are_sampled_only_where_they_are_final():
    arena = an_arena()
    plan = dummy_plan(prefill_tokens=2, decode_rows=1, context_tokens=1)
    slots = np.array([1, 2, 3], dtype=np.int32)
    plan = replace(plan, final_chunk=np.array([False, True, False]), slots=slots)

    step = prepared(arena, plan, shape_of(plan))

    assert plan.query_lens.tolist() == [1, 1, 1]
    assert step.logit_rows.tolist() == [1, 2]
    assert arena.sampled[0].tolist() == [2, 3]
