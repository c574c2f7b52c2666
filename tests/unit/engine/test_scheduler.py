"""Does the scheduler choose the right requests and tokens, and account for them truly?"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.factory import (
    END_ID,
    a_request,
    a_result,
    a_scheduler,
    run_step,
    scheduled,
)
from tokamak.cache.groups import group_sub_caches
from tokamak.cache.holdings import Holdings
from tokamak.cache.sub_cache import SubCache
from tokamak.core.plan import RowResult, StepResult
from tokamak.core.request import FinishReason, RequestState, SamplingParams


def test_a_long_prompt_fills_the_step_and_leaves_the_rest_for_later():
    scheduler = a_scheduler(step_tokens=64)
    scheduler.add(a_request("long", prompt=100))

    first, second = scheduler.plan(), scheduler.plan()

    assert scheduled(first) == {"long": 64}
    assert scheduled(second) == {"long": 36}
    assert first.sampled_rows.tolist() == []
    assert second.sampled_rows.tolist() == [0]


def test_an_admission_tells_where_late_layers_begin():
    scheduler = a_scheduler()
    scheduler.holdings = Holdings(
        group_sub_caches(
            [
                SubCache("keys", (0,), 1, 8, "float32"),
                SubCache("late", (1,), 1, 8, "float32", keep_tokens=4, late_tokens=10),
            ]
        ),
        block_tokens=4,
        blocks=[65, 65],
        reuse=True,
    )
    scored = SamplingParams(temperature=0.0, prompt_logprobs=0)
    scheduler.add(a_request("long", prompt=30))
    scheduler.add(a_request("short", prompt=10))
    scheduler.add(a_request("scored", prompt=20, params=scored))

    admissions = scheduler.plan().admissions

    assert [admission.first_late for admission in admissions] == [20, 0, 0]


def test_prefill_rows_come_before_decode_rows_and_decodes_are_served_first():
    scheduler = a_scheduler(step_tokens=8)
    scheduler.add(a_request("old", prompt=4))
    run_step(scheduler)
    scheduler.add(a_request("new", prompt=20))

    plan = scheduler.plan()

    assert plan.request_ids == ("new", "old")
    assert plan.query_lens.tolist() == [7, 1]
    assert plan.prefill_rows == 1


def test_the_next_step_is_planned_before_the_first_token_is_seen():
    scheduler = a_scheduler()
    scheduler.add(a_request("r", prompt=4))
    first = scheduler.plan()

    second = scheduler.plan()

    assert second.computed_before.tolist() == [4]
    assert scheduled(second) == {"r": 1}
    progress = scheduler.commit(a_result(first, 9))
    assert progress[0].request.output_ids == [9]


def test_a_ghost_row_of_an_ended_request_is_dropped():
    scheduler = a_scheduler()
    request = a_request("r", prompt=4)
    scheduler.add(request)
    first, second = scheduler.plan(), scheduler.plan()

    ended = scheduler.commit(a_result(first, END_ID))
    ghost = scheduler.commit(a_result(second, 9))

    assert ended[0].stop_id == END_ID
    assert request.finish_reason is FinishReason.STOP
    assert ghost == []
    assert request.output_ids == [END_ID]
    assert scheduler.unfinished_requests == 0


def test_a_request_at_its_limit_is_not_planned_again():
    scheduler = a_scheduler()
    request = a_request("r", prompt=4, max_tokens=1)
    scheduler.add(request)
    first = scheduler.plan()

    assert scheduler.plan() is None
    scheduler.commit(a_result(first, 9))

    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_ids == [9]


def test_a_request_that_wants_no_token_ends_with_its_prompt():
    scheduler = a_scheduler(step_tokens=3)
    request = a_request("r", prompt=5, max_tokens=0)
    scheduler.add(request)

    first, second = scheduler.plan(), scheduler.plan()
    scheduler.commit(a_result(first))
    assert request.finish_reason is None
    scheduler.commit(a_result(second))

    assert second.sampled_rows.tolist() == []
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_ids == []


def test_generation_stops_where_the_context_ends():
    scheduler = a_scheduler(max_model_len=6)
    request = a_request("r", prompt=4, max_tokens=100)
    scheduler.add(request)

    run_step(scheduler)
    run_step(scheduler)

    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.output_ids) == 2


def test_a_second_request_reuses_full_blocks_and_computes_at_least_one_token():
    scheduler = a_scheduler(block_tokens=4)
    scheduler.add(a_request("first", prompt=8, max_tokens=1))
    run_step(scheduler)
    scheduler.add(a_request("second", prompt=8, max_tokens=1))

    plan = scheduler.plan()

    assert scheduled(plan) == {"second": 4}
    assert plan.computed_before.tolist() == [4]


def test_generated_tokens_become_part_of_the_reusable_prefix():
    scheduler = a_scheduler(block_tokens=4)
    scheduler.add(a_request("first", prompt=6, max_tokens=4))
    for token_id in (11, 12, 13, 14):
        run_step(scheduler, token_id)
    scheduler.add(a_request("turn", prompt=[*range(100, 106), 11, 12, 13, 50], max_tokens=1))

    plan = scheduler.plan()

    assert plan.computed_before.tolist() == [8]


def test_requests_with_different_salts_share_nothing():
    scheduler = a_scheduler(block_tokens=4)
    scheduler.add(a_request("first", prompt=9, max_tokens=1, salt="a"))
    run_step(scheduler)
    scheduler.add(a_request("second", prompt=9, max_tokens=1, salt="b"))

    assert scheduled(scheduler.plan()) == {"second": 9}


def test_a_prompt_that_is_scored_is_computed_whole():
    scheduler = a_scheduler(block_tokens=4)
    scheduler.add(a_request("first", prompt=9, max_tokens=1))
    run_step(scheduler)
    params = SamplingParams(prompt_logprobs=1)
    scheduler.add(a_request("scored", prompt=9, max_tokens=1, params=params))

    assert scheduled(scheduler.plan()) == {"scored": 9}


def test_without_blocks_the_newest_request_gives_way_and_comes_back():
    scheduler = a_scheduler(blocks=6, block_tokens=4)
    old = a_request("old", prompt=8, max_tokens=12)
    new = a_request("new", prompt=[*range(50, 58)], max_tokens=12)
    scheduler.add(old)
    scheduler.add(new)
    tokens = 0

    while scheduler.unfinished_requests:
        run_step(scheduler, 7 + tokens % 5)
        tokens += 1
        assert tokens < 100

    assert new.preemptions > 0
    assert old.preemptions == 0
    assert len(old.output_ids) == len(new.output_ids) == 12
    assert scheduler.holdings.free_blocks == 5


def test_a_preempted_request_keeps_the_token_that_was_on_its_way():
    scheduler = a_scheduler(blocks=4, block_tokens=4)
    old, new = a_request("old", prompt=4), a_request("new", prompt=[50, 51, 52, 53])
    scheduler.add(old)
    scheduler.add(new)
    first = scheduler.plan()

    second = scheduler.plan()
    scheduler.commit(a_result(first, old=9, new=8))

    assert scheduled(second) == {"old": 1}
    assert new.state is RequestState.WAITING
    assert new.output_ids == [8]
    assert new.known_tokens == 5


def test_a_preempted_request_waits_for_its_token_before_it_comes_back():
    scheduler = a_scheduler(blocks=4, block_tokens=4)
    old, new = a_request("old", prompt=4, max_tokens=2), a_request("new", prompt=[50, 51, 52, 53])
    scheduler.add(old)
    scheduler.add(new)
    first, second = scheduler.plan(), scheduler.plan()
    scheduler.abort(["old"])

    assert scheduler.plan() is None
    scheduler.commit(a_result(first, new=8))
    back = scheduler.plan()

    assert scheduled(second) == {"old": 1}
    assert back.admissions[0].token_ids.tolist() == [50, 51, 52, 53, 8]


def test_a_prompt_under_way_that_gives_way_to_a_decode_row_is_not_gone_on_with():
    scheduler = a_scheduler(step_tokens=2, blocks=6, block_tokens=4)
    scheduler.add(a_request("old", prompt=7))
    for _ in range(4):
        run_step(scheduler)
    new = a_request("new", prompt=range(50, 58))
    scheduler.add(new)
    for _ in range(5):
        run_step(scheduler)
    under_way = new.computed_tokens

    plan = scheduler.plan()

    assert 0 < under_way < 8
    assert scheduled(plan) == {"old": 1}
    assert (new.state, new.computed_tokens, new.preemptions) == (RequestState.WAITING, 0, 1)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_what_a_request_may_fill_is_what_its_blocks_hold(seed: int):
    chance = random.Random(seed)
    reuse = chance.random() < 0.7
    scheduler = a_scheduler(step_tokens=16, blocks=chance.randint(9, 20), reuse=reuse)
    for at in range(chance.randint(1, 6)):
        prompt = [chance.randint(3, 5) for _ in range(chance.randint(1, 16))]
        scheduler.add(a_request(f"r{at}", prompt=prompt, max_tokens=chance.randint(1, 12)))
    held: dict[int, set[int]] = {}

    while scheduler.unfinished_requests:
        plan = scheduler.plan()
        for admission in plan.admissions:
            held[admission.slot] = set()
        for slot, entry in zip(plan.grants.slots, plan.grants.entries, strict=True):
            held[int(slot)].add(int(entry))
        room = {request.slot: request.room_tokens for request in scheduler.running}

        assert room == {slot: 4 * len(held[slot]) for slot in room}
        assert all(held[slot] == set(range(len(held[slot]))) for slot in room)
        assert all(request.computed_tokens <= request.room_tokens for request in scheduler.running)
        scheduler.commit(a_result(plan))
        for request in scheduler.running:
            written = min(request.computed_tokens, request.known_tokens)
            assert written < request.publish_tokens
            assert not reuse or request.publish_tokens - written <= 4


def test_the_priority_policy_serves_the_lower_number_first():
    scheduler = a_scheduler(requests=1, policy="priority")
    scheduler.add(a_request("late", priority=5))
    scheduler.add(a_request("urgent", priority=1))

    assert scheduled(scheduler.plan()) == {"urgent": 4}


def test_aborting_gives_everything_back_at_once():
    scheduler = a_scheduler(step_tokens=4)
    scheduler.add(a_request("prefilling", prompt=10))
    scheduler.add(a_request("waiting", prompt=4))
    plan = scheduler.plan()

    scheduler.abort(["prefilling", "waiting", "never-heard-of"])

    assert scheduler.holdings.free_blocks == scheduler.holdings.usable_blocks
    assert scheduler.unfinished_requests == 0
    assert scheduler.commit(a_result(plan)) == []
    assert scheduler.plan() is None


def test_a_failed_row_ends_its_request_and_no_other():
    scheduler = a_scheduler()
    good, bad = a_request("good"), a_request("bad", prompt=[50, 51, 52, 53])
    scheduler.add(good)
    scheduler.add(bad)
    plan = scheduler.plan()
    rows = [
        RowResult(
            request_id=name,
            token_ids=(7,),
            logprobs=(),
            prompt_logprobs=(),
            complete=False,
            error="no" if name == "bad" else "",
        )
        for name in plan.request_ids
    ]

    scheduler.commit(StepResult(seq=plan.seq, rows=tuple(rows)))

    assert bad.finish_reason is FinishReason.ERROR
    assert good.finish_reason is None


def test_a_failed_step_ends_its_requests_and_later_ones_run():
    scheduler = a_scheduler()
    scheduler.add(a_request("doomed"))
    first, second = scheduler.plan(), scheduler.plan()

    failed = scheduler.fail(first.seq)
    scheduler.commit(a_result(second))
    scheduler.add(a_request("next"))

    assert [request.request_id for request in failed] == ["doomed"]
    assert scheduled(scheduler.plan()) == {"next": 4}


def test_the_queue_counts_tokens_of_waiting_requests():
    scheduler = a_scheduler(requests=1)
    scheduler.add(a_request("a", prompt=5))
    scheduler.add(a_request("b", prompt=7))

    scheduler.plan()

    assert scheduler.waiting_tokens == 7


@pytest.mark.parametrize("ahead", [False, True], ids=["in-step", "one-ahead"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_blocks_are_conserved_and_every_request_ends(ahead: bool, seed: int):
    chance = random.Random(seed)
    step_tokens = chance.randint(4, 24)
    scheduler = a_scheduler(
        step_tokens=step_tokens,
        requests=4,
        blocks=chance.randint(9, 20),
        block_tokens=4,
        reuse=chance.random() < 0.7,
    )
    requests = [
        a_request(
            f"r{at}",
            prompt=[chance.randint(3, 5) for _ in range(chance.randint(1, 16))],
            max_tokens=chance.randint(0, 12),
        )
        for at in range(chance.randint(1, 8))
    ]
    coming, launched = list(requests), deque()
    for _ in range(1000):
        if coming and chance.random() < 0.5:
            scheduler.add(coming.pop())
        if chance.random() < 0.05:
            scheduler.abort([chance.choice(requests).request_id])
        plan = scheduler.plan()
        if plan is not None:
            launched.append(plan)
            assert plan.scheduled_tokens <= step_tokens
            assert (plan.query_lens > 0).all()
            assert len(set(plan.slots.tolist())) == plan.scheduled_requests
        if launched and (plan is None or not ahead or len(launched) > 1):
            scheduler.commit(a_result(launched.popleft(), chance.choice([7, 8, 9, END_ID])))
        if not coming and not scheduler.unfinished_requests and not launched:
            break

    assert scheduler.unfinished_requests == 0
    assert scheduler.holdings.free_blocks == scheduler.holdings.usable_blocks
    for request in requests:
        assert request.finish_reason is not None
        assert len(request.output_ids) <= request.max_tokens
        assert request.preemptions <= 10


def test_no_block_is_written_by_two_running_requests():
    scheduler = a_scheduler(blocks=30, block_tokens=4, step_tokens=16)
    for at in range(6):
        scheduler.add(a_request(f"r{at}", prompt=[at + 50] * 7, max_tokens=9))
    owners: dict[int, dict[int, int]] = {}

    while scheduler.unfinished_requests:
        plan = scheduler.plan()
        for admission in plan.admissions:
            owners[admission.slot] = {}
        grants = plan.grants
        for slot, at, block_id in zip(grants.slots, grants.entries, grants.block_ids, strict=True):
            owners[int(slot)][int(at)] = int(block_id)
        written = [
            owners[slot][position // 4]
            for slot, before, length in zip(
                plan.slots.tolist(),
                plan.computed_before.tolist(),
                plan.query_lens.tolist(),
                strict=True,
            )
            for position in np.unique(np.arange(before, before + length) // 4 * 4).tolist()
        ]
        assert len(set(written)) == len(written)
        scheduler.commit(a_result(plan))
