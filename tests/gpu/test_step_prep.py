"""Are a step's inputs prepared on a device without waiting for it, without allocating, and as on the CPU?"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.device import no_host_wait
from tests.support.preparation import a_decode_plan, an_arena, prepared, shape_of
from tokamak.device.waits import HostWaits
from tokamak.ops.step_prep import fill_indptrs, fill_step, fill_unit_tiles
from tokamak.ops.step_prep.cases import (
    STEP_CHANGED,
    fill_indptrs_cases,
    fill_unit_tiles_cases,
    make_step,
    random_sizes,
)
from tokamak.ops.walk_plan import fill_walk_plan
from tokamak.ops.walk_plan.cases import random_steps, specified_plans
from tokamak.runner.results import InFlightResult
from tokamak.sampling.sampler import Sampled

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]
BUSY_CYCLES = 200_000_000
"""About a tenth of a second of a device's clock."""


def on_device(arguments):
    return [each.cuda() if isinstance(each, torch.Tensor) else each for each in arguments]


def test_a_step_filled_on_the_device_is_the_one_filled_on_the_cpu():
    chance = random.Random(8)

    for at in range(500):
        sizes = random_sizes(chance)
        expected = make_step(f"step {at}", sizes)
        fill_step(*expected)
        found = on_device(make_step(f"step {at}", sizes))
        with no_host_wait():
            fill_step(*found)
        for place in STEP_CHANGED:
            assert torch.equal(found[place].cpu(), expected[place]), (sizes, place)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, one element after an address that is a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.vendor("triton")
def test_the_triton_fill_launched_again_fills_what_it_is_given_now():
    from tokamak.ops.step_prep.triton import triton_fill_step

    chance = random.Random(9)

    for at in range(300):
        sizes = random_sizes(chance)
        expected = make_step(f"step {at}", sizes)
        fill_step(*expected)
        found = on_device(make_step(f"step {at}", sizes))
        if at % 3 == 2:
            found = [shifted(each) if isinstance(each, torch.Tensor) else each for each in found]
        with no_host_wait():
            triton_fill_step(*found)
        for place in STEP_CHANGED:
            assert torch.equal(found[place].cpu(), expected[place]), (at, sizes, place)


@pytest.mark.parametrize(
    ("op", "cases"),
    [(fill_indptrs, fill_indptrs_cases), (fill_unit_tiles, fill_unit_tiles_cases)],
    ids=["indptrs", "unit_tiles"],
)
def test_derived_tables_on_the_device_are_those_on_the_cpu(op, cases):
    for case in cases:
        expected = case.make()
        op(*expected)
        found = on_device(case.make())
        with no_host_wait():
            op(*found)
        assert torch.equal(found[2].cpu(), expected[2]), str(case)


def test_walk_plans_on_the_device_are_those_of_the_specification():
    """Integer for integer, on 2,000 steps and those a plan can go wrong at."""
    for at, step in enumerate(random_steps(2_000)):
        found = on_device(step.make())
        with no_host_wait():
            fill_walk_plan(*found)
        assert np.array_equal(found[6].cpu().numpy(), specified_plans(step)), (at, step)


@pytest.mark.vendor("triton")
def test_triton_s_walk_plans_are_those_of_the_specification():
    from tokamak.ops.walk_plan.triton import triton_fill_walk_plan

    for at, step in enumerate(random_steps(2_000)):
        found = on_device(step.make())
        with no_host_wait():
            triton_fill_walk_plan(*found)
        assert np.array_equal(found[6].cpu().numpy(), specified_plans(step)), (at, step)


def test_a_preparation_waits_for_nothing():
    waits = HostWaits()
    arena = an_arena(device="cuda", waits=waits)
    plans = [a_decode_plan([20 + at] * 4, seq=at) for at in range(20)]

    with torch.inference_mode(), no_host_wait():
        for plan in plans:
            step = prepared(arena, plan, shape_of(plan, running_requests=6))
            arena.remember(*arena.sampled, step.token_ids[:4])

    assert step.positions.tolist() == [39] * 4 + [0, 0]


@torch.inference_mode()
def test_a_host_half_is_not_written_before_the_device_has_read_it():
    waits = HostWaits()
    arena = an_arena(device="cuda", waits=waits)
    plans = [a_decode_plan([10 * at], seq=at) for at in range(1, 5)]
    prepared(arena, plans[0], shape_of(plans[0]))
    torch.cuda.synchronize()
    published = []

    torch.cuda._sleep(BUSY_CYCLES)
    for plan in plans:
        step = prepared(arena, plan, shape_of(plan))
        published.append(step.positions.clone())

    assert [positions.tolist() for positions in published] == [[10], [20], [30], [40]]
    assert waits.host_waits >= 1


@torch.inference_mode()
def test_steady_decode_allocates_nothing_on_the_device():
    """PREP-9."""
    arena = an_arena(max_requests=16, max_model_len=512, device="cuda")
    plans = [a_decode_plan([100 + at] * 16, seq=at) for at in range(164)]
    for plan in plans[:64]:
        prepared(arena, plan, shape_of(plan))
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    for plan in plans[64:]:
        prepared(arena, plan, shape_of(plan))

    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.parametrize("order", [("status", "take"), ("take", "status")])
def test_tokens_arrive_with_one_wait_whoever_asks_first(order):
    waits, plan = HostWaits(), a_decode_plan([3, 4])
    torch.cuda._sleep(BUSY_CYCLES)
    token_ids = torch.arange(7, 9, dtype=torch.int32, device="cuda")
    sampled = Sampled(token_ids=token_ids, logprobs=(None, None), errors={}, finished=frozenset())

    with no_host_wait():
        result = InFlightResult.launch(plan, sampled, {}, waits)
    token_ids.fill_(99)

    assert waits.host_waits == 0
    for read in order:
        getattr(result, read)()
    assert waits.host_waits == 1
    assert [row.token_ids for row in result.take().rows] == [(7,), (8,)]
    assert np.array_equal(result.status().next_token, [7, 8])
