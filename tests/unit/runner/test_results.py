"""Is a step's outcome waited for once, whoever asks first, and told row by row?"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.support.preparation import a_decode_plan
from tokamak.core.plan import Grants, StepPlan, TokenLogprobs
from tokamak.device.waits import HostWaits
from tokamak.runner.results import InFlightResult
from tokamak.sampling.sampler import Sampled


def a_mixed_plan() -> StepPlan:
    """A chunk that is not final, one that is, and a decode row."""
    return StepPlan(
        seq=4,
        request_ids=("chunk", "final", "decode"),
        slots=np.array([1, 2, 3], dtype=np.int32),
        query_lens=np.array([5, 4, 1], dtype=np.int32),
        computed_before=np.array([0, 0, 7], dtype=np.int32),
        prefill_rows=2,
        final_chunk=np.array([False, True, False]),
        admissions=(),
        grants=Grants.none(),
    )


def some_sampled(*token_ids: int, errors: dict[int, str] | None = None) -> Sampled:
    return Sampled(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        logprobs=(None,) * len(token_ids),
        errors=errors or {},
        finished=frozenset({1}),
    )


class Device:
    """A device that finishes when it is waited for, and notes how often it was."""

    def __init__(self) -> None:
        self.waited = 0

    def arrive(self) -> None:
        self.waited += 1


def in_flight(device: Device, waits: HostWaits, plan: StepPlan, sampled: Sampled) -> InFlightResult:
    return InFlightResult(
        plan, sampled, {}, token_ids=sampled.token_ids, arrival=device.arrive, waits=waits
    )


@pytest.mark.parametrize("order", [("status", "take"), ("take", "status"), ("take", "take")])
def test_there_is_one_wait_whether_the_status_or_the_result_is_read_first(order):
    device, waits = Device(), HostWaits()
    result = in_flight(device, waits, a_decode_plan([3, 4]), some_sampled(8, 9))

    for read in order:
        getattr(result, read)()

    assert (device.waited, waits.host_waits) == (1, 1)


def test_nothing_is_waited_for_before_somebody_asks():
    device, waits = Device(), HostWaits()

    in_flight(device, waits, a_decode_plan([3]), some_sampled(8))

    assert (device.waited, waits.host_waits) == (0, 0)


def test_a_step_that_ran_on_the_host_leaves_nothing_to_wait_for():
    waits = HostWaits()
    plan = a_decode_plan([3])

    result = InFlightResult.launch(plan, some_sampled(8), {}, waits)

    assert result.arrive().tolist() == [8]
    assert waits.host_waits == 0


def test_two_threads_that_ask_at_once_wait_once():
    waits = HostWaits()
    entered, go_on = threading.Event(), threading.Event()
    arrivals = []

    def arrival():
        arrivals.append(1)
        entered.set()
        assert go_on.wait(10)

    result = InFlightResult(
        a_decode_plan([3]),
        some_sampled(8),
        {},
        token_ids=torch.tensor([8], dtype=torch.int32),
        arrival=arrival,
        waits=waits,
    )
    threads = [threading.Thread(target=result.take) for _ in range(2)]

    for thread in threads:
        thread.start()
    assert entered.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)

    assert (len(arrivals), waits.host_waits) == (1, 1)


def test_rows_get_their_tokens_in_the_plans_order():
    logprobs = TokenLogprobs(
        token_ids=np.array([1], dtype=np.int32), logprobs=np.array([-1.0], dtype=np.float32), rank=1
    )
    sampled = some_sampled(8, 9, errors={0: "no token is allowed"})

    result = InFlightResult.launch(a_mixed_plan(), sampled, {0: [logprobs]}, HostWaits()).take()

    chunk, final, decode = result.rows
    assert result.seq == 4
    assert (chunk.token_ids, final.token_ids, decode.token_ids) == ((), (8,), (9,))
    assert (chunk.prompt_logprobs, decode.prompt_logprobs) == ((logprobs,), ())
    assert (chunk.error, final.error, decode.error) == ("", "no token is allowed", "")
    assert (chunk.complete, final.complete, decode.complete) == (False, False, True)


def test_the_status_of_a_step_without_drafts_accepts_and_rejects_nothing():
    status = InFlightResult.launch(a_mixed_plan(), some_sampled(8, 9), {}, HostWaits()).status()

    assert status.next_token.tolist() == [-1, 8, 9]
    assert status.accepted.tolist() == status.rejected.tolist() == [0, 0, 0]


def test_a_plan_that_samples_nothing_has_rows_without_tokens():
    plan = a_mixed_plan()
    plan = StepPlan(
        seq=0,
        request_ids=plan.request_ids[:1],
        slots=plan.slots[:1],
        query_lens=plan.query_lens[:1],
        computed_before=plan.computed_before[:1],
        prefill_rows=1,
        final_chunk=np.array([False]),
        admissions=(),
        grants=Grants.none(),
    )

    result = InFlightResult.launch(plan, some_sampled(), {}, HostWaits()).take()

    assert [row.token_ids for row in result.rows] == [()]


def test_what_the_waiting_raises_comes_through_and_is_raised_again():
    waits = HostWaits()

    def arrival():
        raise RuntimeError("the device is gone")

    result = InFlightResult(
        a_decode_plan([3]),
        some_sampled(8),
        {},
        token_ids=torch.tensor([8], dtype=torch.int32),
        arrival=arrival,
        waits=waits,
    )

    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            result.take()
