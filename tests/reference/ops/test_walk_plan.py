"""Does a walk plan give every program its slice of keys, evenly, and the same one however it is laid out?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokamak.errors import WalkPlanOverflow
from tokamak.ops.walk_plan import fill_walk_plan
from tokamak.ops.walk_plan.cases import SPECIAL, random_steps, specified_plans, uniform
from tokamak.ops.walk_plan.host import cdiv, walk_plan_reference
from tokamak.ops.walk_plan.sizes import CHUNK, PIECE_ROWS

STEPS = random_steps(2_000)


def test_the_plan_laid_out_on_the_device_is_the_specified_one_on_2000_steps():
    walked = 0

    for at, step in enumerate(STEPS):
        arguments = step.make()
        fill_walk_plan(*arguments)
        expected = specified_plans(step)
        assert np.array_equal(arguments[6].numpy(), expected), (at, step)
        walked += bool(expected.any())

    assert walked > 1_500


def needs(step):
    """By row, the chunks it needs."""
    return [cdiv(int(bound), CHUNK) if bound > step.keep else 0 for bound in step.bounds]


def test_tasks_cover_what_is_needed_once_and_no_program_walks_further_than_it_must():
    for step in STEPS[:400]:
        plan = walk_plan_reference(step.requests, step.bounds, step.programs, step.keep)
        tasks = plan[plan[:, 1] > 0].tolist()
        assert not plan[len(tasks) :].any(), "tasks come first"
        need = needs(step)
        walked = [[0] * chunks for chunks in need]
        pieces = {}
        for first, rows, begin, end in tasks:
            assert 0 < rows <= PIECE_ROWS
            assert begin < end, "a task is never empty"
            assert len(set(step.requests[first : first + rows])) == 1, "a piece is of one request"
            pieces[first, rows] = max(need[first : first + rows])
            for row in range(first, first + rows):
                for chunk in range(begin, min(end, need[row])):
                    walked[row][chunk] += 1
        assert all(times == 1 for row in walked for times in row)
        if pieces:
            width = max(end - begin for _, _, begin, end in tasks)
            fewer = (
                sum(cdiv(chunks, width - 1) for chunks in pieces.values()) if width > 1 else None
            )
            assert fewer is None or fewer > step.programs, "a smaller width would not do"


def test_one_long_request_is_walked_by_the_programs_that_short_ones_leave():
    step = SPECIAL["one long among many short"]

    plan = walk_plan_reference(step.requests, step.bounds, step.programs, step.keep)

    of_the_long = plan[plan[:, 0] == 12]
    assert len(of_the_long) == step.programs - 15
    assert np.diff(of_the_long[:, 2:]).max() <= 231
    assert of_the_long[-1, 3] == cdiv(500_000, CHUNK)


@pytest.mark.parametrize("name", ["no rows", "all see what they keep"])
def test_a_step_that_needs_no_scores_has_no_task(name):
    assert not specified_plans(SPECIAL[name]).any()


def test_as_many_pieces_as_programs_are_refused():
    step = uniform([9_000] * 16, 16)

    with pytest.raises(WalkPlanOverflow, match="16 pieces of 6 rows are to be walked by 16"):
        walk_plan_reference(step.requests, step.bounds, step.programs, step.keep)
    with pytest.raises(WalkPlanOverflow, match="16 pieces"):
        fill_walk_plan(*step.make())


def test_a_plan_whose_width_is_one_too_large_is_found(monkeypatch):
    """The fault that the comparison is for: programs that could have ended earlier."""
    from tokamak.ops.walk_plan import reference

    widths = reference._widths
    monkeypatch.setattr(reference, "_widths", lambda need, programs: widths(need, programs) + 1)

    wrong = 0
    for step in STEPS[:60]:
        arguments = step.make()
        fill_walk_plan(*arguments)
        wrong += not torch.equal(arguments[6], torch.from_numpy(specified_plans(step)))

    assert wrong > 20
