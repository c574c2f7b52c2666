"""Do the Triton backends of routing and experts compute what the reference does, in every form and bit by bit again?

Without a device the same checks run in Triton's interpreter, where TRITON_INTERPRET is set before it is imported.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import pytest
import torch

from tests.support.device import no_host_wait
from tests.support.interpreted import mend_interpreter
from tokamak.ops.case import difference
from tokamak.ops.load import load_backends
from tokamak.ops.moe_experts import moe_experts, scaled_experts
from tokamak.ops.moe_experts.cases import moe_experts_cases, scaled_experts_cases
from tokamak.ops.moe_route import moe_route
from tokamak.ops.moe_route.cases import moe_route_cases

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (HAS_GPU or INTERPRETED), reason="no CUDA, and TRITON_INTERPRET is not 1"
    ),
]
DEVICE = "cuda" if HAS_GPU and not INTERPRETED else "cpu"
if INTERPRETED:
    mend_interpreter()
watched = no_host_wait if DEVICE == "cuda" else contextlib.nullcontext


def backend(op):
    load_backends()
    return next(each.call for each in op.backends if each.name == "triton")


def on_device(arguments):
    return [each.to(DEVICE) if isinstance(each, torch.Tensor) else each for each in arguments]


def as_matrices(x, ids, weights, *others):
    """What the forms take, from the arguments of either op."""
    from tokamak.ops.moe_experts.matrix import ExpertMatrix

    if len(others) == 2:
        gate_up, down = (ExpertMatrix(each) for each in others)
    else:
        *tensors, blocks = others
        gate_up, down = (ExpertMatrix(*tensors[at : at + 2], blocks) for at in (0, 2))
    return x, ids, weights, gate_up, down


def chosen(*arguments):
    return backend(moe_experts if len(arguments) == 5 else scaled_experts)(*arguments)


def few(*arguments):
    from tokamak.ops.moe_experts.triton_few import experts_of_few

    return experts_of_few(*as_matrices(*arguments))


def few_in_small_tiles(*arguments):
    from tokamak.ops.moe_experts.triton_few import FewTiles, experts_of_few

    tiles = FewTiles(gate_up_features=8, gate_up_inputs=32, down_features=16, down_inputs=16)
    return experts_of_few(*as_matrices(*arguments), tiles)


def grouped(*arguments):
    from tokamak.ops.moe_experts.triton_grouped import grouped_experts

    return grouped_experts(*as_matrices(*arguments))


def grouped_by(pairs, turned):
    from tokamak.ops.moe_experts.triton_grouped import GroupedTiles, Tile, grouped_experts

    features = 64 if turned else 16
    tile = Tile(features, 32, 4, 2, turned)
    # 8-bit numbers are multiplied 32 at a time at least.
    halves = GroupedTiles(pairs, tile, replace(tile, inputs=16))
    whole = GroupedTiles(pairs, tile, tile)
    return lambda *arguments: grouped_experts(
        *as_matrices(*arguments), halves if len(arguments) == 5 else whole
    )


FORMS = {
    "chosen": chosen,
    "few": few,
    "few in small tiles": few_in_small_tiles,
    "grouped": grouped,
    "grouped by 16": lambda *arguments: grouped_by(16, turned=False)(*arguments),
    "grouped by 64": lambda *arguments: grouped_by(64, turned=False)(*arguments),
    "grouped by 16, turned": lambda *arguments: grouped_by(16, turned=True)(*arguments),
}
SCALED_FORMS = ("chosen",)
"""The form that the slow interpreter multiplies 8-bit numbers in."""
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def suits(name, case):
    """Whether to run a case in a form: not without rows, few pairs only where the interpreter is slow.

    The interpreter multiplies matrices of bfloat16 as if their bits were whole numbers.
    """
    x, ids = case.make()[:2]
    if name == "chosen" and not ids.numel():
        return True
    if not INTERPRETED:
        return ids.numel() > 0
    if case in scaled_experts_cases and name not in SCALED_FORMS:
        return False
    takes_few = name.startswith("few") or (name == "chosen" and ids.numel() <= 16)
    known = x.dtype == torch.float32 or case in scaled_experts_cases
    return 0 < ids.numel() <= 16 if takes_few else ids.numel() > 0 and known


every_form_and_case = pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, case, id=f"{name}: {case}")
        for name, form in FORMS.items()
        for case in [*moe_experts_cases, *scaled_experts_cases]
        if suits(name, case)
    ],
)


def small_inputs():
    """Five rows, two of eight experts each."""
    generator = torch.Generator().manual_seed(4)
    x, gate_up = (
        torch.randn(5, 32, generator=generator),
        torch.randn(8, 32, 32, generator=generator),
    )
    ids, weights = moe_route(torch.randn(5, 8, generator=generator), 2, True)
    down = torch.randn(8, 32, 16, generator=generator) / 4
    return on_device([x, ids, weights, gate_up / 6, down])


def test_routing_chooses_and_weighs_as_the_reference_does():
    for case in moe_route_cases:
        expected_ids, expected = moe_route(*case.make())
        arguments = on_device(case.make())
        with watched():
            ids, weights = backend(moe_route)(*arguments)
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32), str(case)
        assert torch.equal(ids.cpu(), expected_ids), str(case)
        assert difference([weights.cpu()], [expected]) <= case.tolerance, str(case)


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_row_that_is_no_number_is_routed_to_experts_there_are(renormalise):
    scores = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
    expected_ids, expected = moe_route(scores, 4, renormalise)
    scores[1], scores[2] = float("nan"), -torch.tensor(float("nan"))
    scores = scores.to(DEVICE)

    ids, weights = backend(moe_route)(scores, 4, renormalise)

    assert ((ids >= 0) & (ids < 24)).all()
    assert weights[1:3].isnan().all()
    assert torch.equal(ids[::3].cpu(), expected_ids[::3])
    torch.testing.assert_close(weights[::3].cpu(), expected[::3])


def test_a_zero_below_zero_is_equal_to_one_above():
    scores = torch.tensor([[-1.0, -0.0, 0.0, -0.0]], device=DEVICE)

    ids, _ = backend(moe_route)(scores, 3, True)

    assert ids.tolist() == [[1, 2, 3]]


@every_form_and_case
def test_every_form_computes_what_the_reference_does(form, case):
    inputs = case.make()
    expected = (moe_experts if case in moe_experts_cases else scaled_experts)(*inputs)
    arguments = on_device(inputs)

    with watched():
        found = form(*arguments)

    assert found.dtype == expected.dtype
    assert difference([found.cpu()], [expected]) <= case.tolerance


@every_form
def test_the_same_inputs_give_the_same_bits(form):
    arguments = small_inputs()

    first = form(*arguments)

    assert all(torch.equal(first, form(*arguments)) for _ in range(3))


@every_form
def test_a_row_or_an_expert_that_is_no_number_stays_with_those_it_meets(form):
    x, ids, weights, gate_up, down = small_inputs()
    expected = form(x, ids, weights, gate_up, down)
    # The last row, which tiles repeat beyond their end, and an expert that some rows chose.
    x[-1] = float("nan")
    gate_up[ids[0, 0]] = float("nan")

    found = form(x, ids, weights, gate_up, down)

    spared = (ids != ids[0, 0]).all(dim=1)
    spared[-1] = False
    assert spared.any()
    assert found[~spared].isnan().all()
    assert torch.equal(found[spared], expected[spared])


@every_form
def test_rows_with_a_gap_between_them_are_read_where_they_lie(form):
    x, ids, weights, gate_up, down = small_inputs()
    expected = form(x, ids, weights, gate_up, down)
    spaced = torch.full((x.shape[0], x.shape[1] + 7), float("nan"), device=DEVICE, dtype=x.dtype)
    spaced[:, : x.shape[1]] = x

    found = form(spaced[:, : x.shape[1]], ids, weights, gate_up, down)

    assert torch.equal(found, expected)


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("pairs", [1, 15, 16, 17, 100, 300])
def test_groups_hold_every_pair_once_under_its_expert_in_tiles_that_start_where_the_last_ended(
    pairs, tile
):
    from tokamak.ops.moe_experts.triton_pairs import _group_kernel
    from tokamak.ops.triton_order import IN_ORDER

    experts = 12
    ids = torch.randint(0, experts, (pairs,), generator=torch.Generator().manual_seed(pairs))
    ids[ids == 4] = 5
    ids = ids.int().to(DEVICE)
    slots = pairs // tile + experts
    order = torch.full((pairs,), -7, dtype=torch.int32, device=DEVICE)
    table = torch.full((slots, 3), -7, dtype=torch.int32, device=DEVICE)

    _group_kernel[(experts,)](
        ids, order, table, pairs, PAIRS=64, TILE_PAIRS=tile, SLOTS=4, **IN_ORDER
    )

    assert torch.equal(order.cpu().long(), ids.cpu().sort(stable=True).indices)
    covered = []
    for expert, first, last in table.tolist():
        if expert == -1:
            continue
        places = range(first, min(first + tile, last))
        assert all(ids[order[place]].item() == expert for place in places)
        covered += places
    assert covered == list(range(pairs))
    assert (table[:, 0] != -7).all()
