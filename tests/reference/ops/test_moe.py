"""Are rows routed and sent through their experts as the formulas say, each by itself?"""

import pytest
import torch

from tests.reference.ops import formulas
from tokamak.ops.case import difference
from tokamak.ops.moe_experts import moe_experts
from tokamak.ops.moe_experts.cases import moe_experts_cases
from tokamak.ops.moe_route import moe_route
from tokamak.ops.moe_route.cases import moe_route_cases


@pytest.mark.parametrize("case", moe_route_cases, ids=str)
def test_the_likeliest_experts_are_chosen_in_order_with_their_shares(case):
    expected_ids, expected = formulas.moe_route(*case.make())

    ids, weights = moe_route(*case.make())

    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.tolist() == expected_ids.tolist()
    assert difference([weights], [torch.from_numpy(expected)]) <= case.tolerance


def test_a_row_that_is_no_number_is_routed_to_experts_there_are_and_stays_alone():
    scores = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    others = moe_route(scores, 4, True)
    scores[1] = float("nan")

    ids, weights = moe_route(scores, 4, True)

    assert ((ids >= 0) & (ids < 16)).all()
    assert weights[1].isnan().all()
    assert torch.equal(ids[::2], others[0][::2])
    assert torch.equal(weights[::2], others[1][::2])


@pytest.mark.parametrize("case", moe_experts_cases, ids=str)
def test_the_weighted_sum_over_experts_is_that_of_float64(case):
    x, *others = case.make()
    expected = torch.from_numpy(formulas.moe_experts(x, *others))

    found = moe_experts(x, *others)

    assert found.dtype == x.dtype
    assert difference([found], [expected]) <= case.tolerance


@pytest.mark.parametrize("rows", [5, 40])
def test_a_row_that_is_no_number_leaves_the_others_as_they_are(rows):
    x, ids, weights, gate_up, down = _inputs(rows)
    expected = moe_experts(x, ids, weights, gate_up, down)
    x[2], weights[2] = float("nan"), float("nan")

    found = moe_experts(x, ids, weights, gate_up, down)

    others = torch.arange(rows) != 2
    assert found[2].isnan().all()
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("rows", [5, 40])
def test_experts_that_are_no_numbers_leave_rows_that_did_not_choose_them(rows):
    x, ids, weights, gate_up, down = _inputs(rows)
    expected = moe_experts(x, ids, weights, gate_up, down)
    gate_up[3], down[3] = float("nan"), float("inf")

    found = moe_experts(x, ids, weights, gate_up, down)

    spared = (ids != 3).all(dim=1)
    assert spared.any()
    assert found[~spared].isnan().all()
    assert torch.equal(found[spared], expected[spared])


def _inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 32, generator=generator)
    gate_up = torch.randn(6, 48, 32, generator=generator)
    down = torch.randn(6, 32, 24, generator=generator)
    ids, weights = moe_route(torch.randn(rows, 6, generator=generator), 2, True)
    return x, ids, weights, gate_up, down
