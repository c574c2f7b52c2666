"""Do experts with limits compute what their references do, with numbers of 16, 8 and 4 bits and in every form?

Without a device the same checks run in Triton's interpreter, where TRITON_INTERPRET is set before it is imported.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_moe import INTERPRETED, backend, on_device, pytestmark, watched  # noqa: F401
from tokamak.ops.case import difference
from tokamak.ops.moe_experts import (
    moe_experts_limited,
    packed_experts_limited,
    scaled_experts_limited,
)
from tokamak.ops.moe_experts.limited_cases import (
    moe_experts_limited_cases,
    packed_experts_limited_cases,
    scaled_experts_limited_cases,
)

CASES = {
    moe_experts_limited: moe_experts_limited_cases,
    scaled_experts_limited: scaled_experts_limited_cases,
    packed_experts_limited: packed_experts_limited_cases,
}
FEW_PAIRS = 16
INTERPRETED_CASES = {moe_experts_limited: 1, scaled_experts_limited: 1, packed_experts_limited: 3}
"""How many cases of an op in a form, of few pairs first, the slow interpreter runs."""


def matrices(op, others):
    """Both matrices as the kernels take them."""
    from tokamak.ops.moe_experts.matrix import ExpertMatrix

    if op is moe_experts_limited:
        return [ExpertMatrix(each) for each in others]
    *tensors, last = others
    if op is scaled_experts_limited:
        return [ExpertMatrix(*tensors[at : at + 2], last) for at in (0, 2)]
    return [
        ExpertMatrix(tensors[at], tensors[at + 1].view(torch.uint8), None, last) for at in (0, 2)
    ]


def chosen(op, *arguments):
    return backend(op)(*arguments)


def few_in_other_tiles(op, x, ids, weights, *others):
    from tokamak.ops.moe_experts.triton_few import FewTiles, experts_of_few

    *others, limit = others
    tiles = FewTiles(gate_up_features=32, gate_up_inputs=64, down_features=64, down_inputs=32)
    return experts_of_few(x, ids, weights, *matrices(op, others), tiles, limit=limit)


def grouped_by(pairs, features, *, turned):
    from tokamak.ops.moe_experts.triton_grouped import GroupedTiles, Tile, grouped_experts

    tile = Tile(features, 32, 4, 2, turned)

    def run(op, x, ids, weights, *others):
        *others, limit = others
        tiles = GroupedTiles(pairs, tile, tile)
        return grouped_experts(x, ids, weights, *matrices(op, others), tiles, limit=limit)

    return run


FORMS = {
    "chosen": chosen,
    "few in other tiles": few_in_other_tiles,
    "grouped by 64": lambda *arguments: grouped_by(64, 64, turned=False)(*arguments),
    "grouped by 16, turned": lambda *arguments: grouped_by(16, 64, turned=True)(*arguments),
}


def suits(op, form, case):
    """Whether to run a case in a form: see `tests/gpu/test_moe.py`."""
    x, ids = case.make()[:2]
    pairs = ids.numel()
    if form == "chosen" and not pairs:
        return True
    if not INTERPRETED:
        return pairs > 0
    if form.startswith("few"):
        return 0 < pairs <= FEW_PAIRS
    known = x.dtype == torch.float32 or op is scaled_experts_limited
    return form.startswith("grouped") and 0 < pairs <= 2 * FEW_PAIRS and known


def cases_for(op, form):
    """Those of an op in a form."""
    found = [case for case in CASES[op] if suits(op, form, case)]
    if INTERPRETED:
        return sorted(found, key=lambda case: case.make()[1].numel())[: INTERPRETED_CASES[op]]
    return found


@pytest.mark.parametrize(
    ("op", "form", "case"),
    [
        pytest.param(op, form, case, id=f"{op.name}, {name}: {case}")
        for op in CASES
        for name, form in FORMS.items()
        for case in cases_for(op, name)
    ],
)
def test_every_form_computes_what_the_reference_does(op, form, case):
    inputs = case.make()
    expected = op(*inputs)
    arguments = on_device(inputs)

    with watched():
        found = form(op, *arguments)

    assert found.dtype == expected.dtype
    assert difference([found.cpu()], [expected]) <= case.tolerance


@pytest.mark.parametrize("name", ["few in other tiles", "grouped by 16, turned"])
def test_a_row_that_is_no_number_stays_alone_and_bits_repeat(name):
    form, case = FORMS[name], packed_experts_limited_cases[3]
    x, ids, *others = case.make()
    x, ids, others = x[:3], ids[:3], [others[0][:3], *others[1:]]
    arguments = on_device([x, ids, *others])
    expected = form(packed_experts_limited, *arguments)
    arguments[0] = arguments[0].clone()
    arguments[0][2] = float("nan")

    found = form(packed_experts_limited, *arguments)

    others = torch.arange(3) != 2
    assert found.cpu()[2].isnan().all()
    assert torch.equal(found.cpu()[others], expected.cpu()[others])


def test_scales_far_from_one_are_exact_and_no_number_stays_none():
    # bfloat16 only on a device: there two numbers are widened at a time, by factors of a range of their own.
    case = packed_experts_limited_cases[3 if INTERPRETED else 8]
    *rest, scales, rounded, limit = case.make()
    width = scales.shape[1]
    far = torch.linspace(60, 190, width).to(torch.uint8)[None, :, None].expand(scales.shape).clone()
    far[:, -1] = 255
    inputs = [*rest, far.view(torch.float8_e8m0fnu), rounded, limit]
    expected = packed_experts_limited.reference(*inputs).float()

    found = FORMS["grouped by 16, turned"](packed_experts_limited, *on_device(inputs))

    each = torch.exp2(far[0, :-1, 0].float() - 127)
    gaps = (found.cpu().float() - expected)[:, :-1] / each
    assert gaps.abs().max() <= case.tolerance * (expected[:, :-1] / each).abs().max()
    assert expected[:, -1].isnan().all()
    assert found.cpu()[:, -1].isnan().all()
