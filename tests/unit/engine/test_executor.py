"""Is a step launched on a GPU taken with one wait, and does a failed GPU end the engine?"""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from tests.support.preparation import a_decode_plan
from tokamak.device.streams import CallerStream
from tokamak.device.waits import HostWaits
from tokamak.engine.executor import _LaunchedStep
from tokamak.errors import FatalError
from tokamak.runner.results import InFlightResult
from tokamak.sampling.sampler import Sampled

PLAN = a_decode_plan([4, 9], seq=12)


def launched(arrival, waits: HostWaits) -> Future:
    """A step whose tokens are on their way."""
    token_ids = torch.tensor([5, 6], dtype=torch.int32)
    sampled = Sampled(token_ids=token_ids, logprobs=(None, None), errors={}, finished=frozenset())
    return CallerStream().submit(
        lambda: InFlightResult(PLAN, sampled, {}, token_ids=token_ids, arrival=arrival, waits=waits)
    )


def test_the_one_wait_is_that_for_the_tokens():
    waits, arrived = HostWaits(), []
    step = _LaunchedStep(PLAN, launched(lambda: arrived.append(1), waits))

    assert waits.host_waits == 0
    result = step.take()

    assert [row.token_ids for row in result.rows] == [(5,), (6,)]
    assert (len(arrived), waits.host_waits) == (1, 1)


def test_what_the_host_raised_while_launching_is_raised_by_taking():
    def failing():
        raise ValueError("a bad step")

    step = _LaunchedStep(PLAN, CallerStream().submit(failing))

    with pytest.raises(ValueError, match="a bad step"):
        step.take()


def gpu_fault() -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore lines")


@pytest.mark.parametrize("when", ["launching", "waiting"])
def test_a_failed_gpu_ends_the_engine(when):
    if when == "launching":
        future = CallerStream().submit(gpu_fault)
    else:
        future = launched(gpu_fault, HostWaits())

    with pytest.raises(FatalError) as caught:
        _LaunchedStep(PLAN, future).take()

    assert "the GPU failed in step 12" in caught.value.message
    assert "illegal memory access" in caught.value.message
    assert "\n" not in str(caught.value)


def test_a_lack_of_memory_fails_the_step_alone():
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        _LaunchedStep(PLAN, CallerStream().submit(full)).take()
