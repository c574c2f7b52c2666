"""Do the fills write what their specification in plain loops says, on any step, without reading to the host?"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokamak.device.facts import cpu_facts
from tokamak.ops.case import Case, difference
from tokamak.ops.load import load_backends
from tokamak.ops.step_prep import fill_indptrs, fill_step, fill_unit_tiles
from tokamak.ops.step_prep.cases import (
    STEP_CHANGED,
    fill_indptrs_cases,
    fill_step_cases,
    fill_unit_tiles_cases,
    make_step,
    random_sizes,
)
from tokamak.ops.step_prep.derived import tile_room
from tokamak.ops.step_prep.host import fill_reference, indptrs_reference, unit_tiles_reference
from tokamak.ops.walk_plan import fill_walk_plan
from tokamak.ops.walk_plan.cases import fill_walk_plan_cases

load_backends()

OPS = (
    (fill_step, fill_step_cases),
    (fill_indptrs, fill_indptrs_cases),
    (fill_unit_tiles, fill_unit_tiles_cases),
    (fill_walk_plan, fill_walk_plan_cases),
)
RANDOM_STEPS = 600


def every_call(op):
    return [op.reference, *(b.call for b in op.backends if b.fits(cpu_facts()))]


def specified(arguments):
    """What the plain loops leave in the arguments."""
    arrays = [
        each.clone().numpy() if isinstance(each, torch.Tensor) else each for each in arguments
    ]
    fill_reference(*arrays)
    return arrays


def same(found: Case, call, expected) -> bool:
    return difference(found.outcome(call), expected) == 0.0


@pytest.mark.parametrize("op", [op for op, _ in OPS], ids=lambda op: op.name)
def test_backends_agree_with_the_reference(op):
    cases = dict(OPS)[op]

    for call in every_call(op):
        for case in cases:
            assert same(case, call, case.outcome(op.reference)), (call, str(case))


def test_a_filled_step_is_what_the_plain_loops_say_on_random_steps():
    chance = random.Random(5)
    steps = [(f"step {at}", random_sizes(chance)) for at in range(RANDOM_STEPS)]
    kinds = {
        (bool(s.prefill), bool(s.decode), s.q_width, s.groups, bool(s.padding_requests))
        for _, s in steps
    }
    assert len(kinds) >= 16

    for seed, sizes in steps:
        expected = specified(make_step(seed, sizes))
        for call in every_call(fill_step):
            arguments = make_step(seed, sizes)
            call(*arguments)
            for at in STEP_CHANGED:
                assert np.array_equal(arguments[at].numpy(), expected[at]), (seed, sizes, at)


@pytest.mark.parametrize("case", fill_step_cases, ids=str)
def test_a_filled_step_is_what_the_plain_loops_say(case):
    expected = specified(case.make())

    outcome = case.outcome(fill_step)

    for found, at in zip(outcome, STEP_CHANGED, strict=True):
        assert np.array_equal(found.numpy(), expected[at])


def without_padding(arguments):
    """The fault that padding rows keep what an earlier, larger step left in them."""
    before = arguments[12].clone()
    fill_step(*arguments)
    scheduled = arguments[7]
    arguments[12][:, scheduled:] = before[:, scheduled:]


def test_the_comparison_finds_padding_that_keeps_stale_write_slots():
    chance = random.Random(5)
    steps = [(f"step {at}", random_sizes(chance)) for at in range(50)]
    wrong = 0

    for seed, sizes in steps:
        arguments = make_step(seed, sizes)
        without_padding(arguments)
        expected = specified(make_step(seed, sizes))
        wrong += not np.array_equal(arguments[12].numpy(), expected[12])

    padded = sum(bool(s.padding_tokens or s.padding_requests) for _, s in steps)
    assert wrong == padded > 0


def test_indptrs_are_running_sums_of_blocks():
    chance = random.Random(6)

    for _ in range(500):
        lengths = np.array([chance.randint(0, 70) for _ in range(chance.randint(0, 9))], np.int32)
        block_tokens = chance.choice([1, 4, 16])
        expected = indptrs_reference(lengths, block_tokens)
        for call in every_call(fill_indptrs):
            found = torch.full((len(lengths) + 1,), 77, dtype=torch.int32)
            call(torch.from_numpy(lengths), block_tokens, found)
            assert np.array_equal(found.numpy(), expected)


def test_unit_tiles_cover_every_query_row_once():
    chance = random.Random(7)

    for _ in range(500):
        lens = [chance.choice([0, 1, 1, 4, 30]) for _ in range(chance.randint(1, 7))]
        width, padding = chance.choice([1, 4, 16]), chance.randint(0, 5)
        starts = np.cumsum([0, *lens]).astype(np.int32)
        room = tile_room(len(lens), sum(lens) + padding, width)
        expected = unit_tiles_reference(starts, width, room)
        for call in every_call(fill_unit_tiles):
            found = torch.full((room, 2), 77, dtype=torch.int32)
            call(torch.from_numpy(starts), width, found)
            assert np.array_equal(found.numpy(), expected), (lens, width)
        rows = [
            (request, row)
            for request, first in expected.tolist()
            if request >= 0
            for row in range(first, min(first + width, int(starts[request + 1])))
        ]
        assert rows == [(r, at) for r in range(len(lens)) for at in range(starts[r], starts[r + 1])]


class HostReads(TorchDispatchMode):
    """Notes operations that read a number to the host, or whose result's shape depends on numbers."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        fixed = func is torch.ops.aten.repeat_interleave.Tensor and (kwargs or {}).get(
            "output_size"
        )
        if (tags and not fixed) or "local_scalar_dense" in func.name():
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", [op for op, _ in OPS], ids=lambda op: op.name)
def test_a_fill_reads_nothing_to_the_host(op):
    for case in dict(OPS)[op]:
        with HostReads() as reads:
            op.reference(*case.make())

        assert reads.found == []


def test_the_search_for_host_reads_finds_one():
    numbers = torch.tensor([2, 3])

    with HostReads() as reads:
        numbers.sum().item()
        torch.arange(2).repeat_interleave(numbers)

    assert len(reads.found) == 2
