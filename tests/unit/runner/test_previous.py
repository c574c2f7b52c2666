"""Is the step before found for every request that was in it, once, and not before the inputs are launched?"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.support.preparation import a_decode_plan, an_arena, prepared, shape_of
from tokamak.core.plan import Admission, StepPlan
from tokamak.core.request import SamplingParams
from tokamak.device.waits import HostWaits
from tokamak.errors import StatusTakenTwice, StatusTooEarly
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.previous import Previous
from tokamak.runner.results import InFlightResult
from tokamak.runner.status import NO_ROW, PrevStatus, of_rows
from tokamak.sampling.sampler import Sampled


def launched(plan: StepPlan, *token_ids: int) -> InFlightResult:
    sampled = Sampled(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        logprobs=(None,) * len(token_ids),
        errors={},
        finished=frozenset(),
    )
    return InFlightResult.launch(plan, sampled, {}, HostWaits())


def after(slots: list[int]) -> Previous:
    """Previous, once a step with these slots is launched; row r sampled token 10 + r."""
    previous = Previous(slots=9)
    plan = a_decode_plan([3] * len(slots), slots=slots)
    previous.put(plan, launched(plan, *range(10, 10 + len(slots))))
    return previous


def an_admission(slot: int) -> Admission:
    return Admission(
        request_id="new",
        slot=slot,
        token_ids=np.array([5, 6], dtype=np.int32),
        prompt_tokens=2,
        params=SamplingParams(temperature=0.0),
        sibling=0,
        max_tokens=3,
        stop_ids=frozenset(),
        scored_tokens=0,
        first_late=0,
    )


@pytest.mark.parametrize(
    ("before", "now", "rows"),
    [
        pytest.param([1, 2, 3], [1, 2, 3], [0, 1, 2], id="same"),
        pytest.param([1, 2, 3], [3, 1, 2], [2, 0, 1], id="permuted"),
        pytest.param([1, 2, 3], [3, 1], [2, 0], id="shrunken"),
        pytest.param([2, 4], [4, 7, 2, 8], [1, -1, 0, -1], id="grown"),
        pytest.param([1], [2, 3], [-1, -1], id="nobody left"),
    ],
)
def test_every_request_finds_its_row_of_the_step_before(before, now, rows):
    previous = after(before)
    previous.launched()

    status, found = previous.take(a_decode_plan([4] * len(now), slots=now))

    assert found.tolist() == rows
    tokens = [int(status.next_token[row]) for row in found if row >= 0]
    assert tokens == [10 + row for row in rows if row >= 0]


def test_a_new_request_in_a_used_slot_has_no_step_before():
    previous = after([1, 2])
    previous.launched()
    plan = dataclasses.replace(
        a_decode_plan([4, 0], slots=[1, 2]), admissions=(an_admission(slot=2),)
    )

    _, rows = previous.take(plan)

    assert rows.tolist() == [0, NO_ROW]


def test_the_first_step_has_none_before():
    previous = Previous(slots=9)
    previous.launched()

    status, rows = previous.take(a_decode_plan([3, 4]))

    assert rows.tolist() == [NO_ROW, NO_ROW]
    assert len(status.next_token) == 0


def test_a_slot_left_out_of_one_step_is_forgotten():
    previous = after([1, 2])
    middle = a_decode_plan([4], slots=[1])
    previous.put(middle, launched(middle, 30))
    previous.launched()

    _, rows = previous.take(a_decode_plan([5, 4], slots=[1, 2]))

    assert rows.tolist() == [0, NO_ROW]


def test_dummy_rows_are_nobodys_step_before():
    previous = Previous(slots=9)
    idle = dummy_plan(prefill_tokens=0, decode_rows=2)
    previous.put(idle, launched(idle, 1, 1))
    previous.launched()

    _, rows = previous.take(idle)

    assert rows.tolist() == [NO_ROW, NO_ROW]


def test_the_status_cannot_be_taken_twice_in_a_step():
    previous = after([1])
    previous.launched()
    plan = a_decode_plan([4], seq=7)
    previous.take(plan)

    with pytest.raises(StatusTakenTwice, match="step 7"):
        previous.take(plan)


def test_the_status_can_be_taken_once_in_every_step():
    previous = after([1])
    taken = []

    for seq in range(3):
        plan = a_decode_plan([4 + seq], seq=seq)
        previous.launched()
        taken.append(int(previous.take(plan)[0].next_token[0]))
        previous.put(plan, launched(plan, 50 + seq))

    assert taken == [10, 50, 51]


def test_a_step_that_failed_does_not_open_the_status_to_the_next():
    previous = after([1])
    previous.launched()
    later = a_decode_plan([4], seq=2)

    previous.begin()

    with pytest.raises(StatusTooEarly, match="step 2"):
        previous.take(later)
    previous.launched()
    assert previous.take(later)[0].next_token.tolist() == [10]


class Eager:
    """Reads the status while it stages: the fault that the order of a preparation rules out."""

    def __init__(self, previous: Previous) -> None:
        self._previous = previous

    def stage(self, plan: StepPlan) -> None:
        self._previous.take(plan)


def test_reading_the_status_before_the_fill_is_launched_is_an_error():
    previous = after([1])

    with pytest.raises(StatusTooEarly, match="before its inputs are launched"):
        Eager(previous).stage(a_decode_plan([4]))


def test_inputs_are_staged_published_and_filled_without_the_status(monkeypatch):
    """PREP-1: the status is made unavailable until the fill is launched."""
    previous, arena = after([1, 2]), an_arena()
    plan = a_decode_plan([4, 4])

    def unavailable(self):
        raise AssertionError("the status was read")

    with monkeypatch.context() as patch:
        patch.setattr(InFlightResult, "arrive", unavailable)
        patch.setattr(InFlightResult, "status", unavailable)
        step = prepared(arena, plan, shape_of(plan))
        previous.launched()
        with pytest.raises(AssertionError, match="was read"):
            previous.take(plan)

    assert step.positions.tolist() == [4, 4]


def test_requests_without_a_step_before_have_rejected_nothing():
    rejected = np.array([2, 0, 3], dtype=np.int32)

    values = of_rows(rejected, np.array([2, NO_ROW, 0], dtype=np.int32))

    assert values.tolist() == [3, 0, 2]
    assert of_rows(rejected[:0], np.array([NO_ROW], dtype=np.int32)).tolist() == [0]


def test_a_status_cannot_be_changed():
    none = np.zeros(0, dtype=np.int32)
    status = PrevStatus(accepted=none, rejected=none, next_token=none)

    with pytest.raises(dataclasses.FrozenInstanceError):
        status.accepted = none
