"""Do experts with limits keep the bits of their weights where an op for those was asked for, and say nearly the same?"""

from types import SimpleNamespace

import pytest
import torch

from tests.support.steps import a_build
from tokamak.core.context import installed
from tokamak.core.weight import DenseWeight
from tokamak.graphs.streams import SideStreams
from tokamak.layers.moe_rooted import RootedExperts
from tokamak.quant.weights import fp8_weight, mxfp4_weight

WIDTH, INNER, EXPERTS = 64, 32, 4
PACKED = {"packed_experts_limited": "reference"}
SCALED = {"scaled_experts_limited": "reference"}


def in_fp8(values):
    return fp8_weight(values, (32, 32))


def experts(prefer, of_gate_up, of_down):
    """A layer whose experts are stored so, all of the same numbers."""
    build = a_build(torch.float32, prefer=prefer)
    layer = RootedExperts(
        build, width=WIDTH, inner_width=INNER, experts=EXPERTS, chosen=2, scale=1.5, limit=1.0
    )
    generator = torch.Generator().manual_seed(5)
    for name in ("router", "bias", "shared_gate_up", "shared_down"):
        parameter = getattr(layer, name)
        parameter.load(parameter.draw(generator))
    for stack, stored in ((layer.gate_up, of_gate_up), (layer.down, of_down)):
        parts = [
            torch.randn(shape, generator=generator) * shape[1] ** -0.5
            for shape in stack.part_shapes
        ]
        stack.load([stored(part) for part in parts])
    return layer


def said(layer):
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(6))
    with installed(SimpleNamespace(streams=SideStreams(torch.device("cpu")))):
        return sum(layer(rows, torch.zeros(5, dtype=torch.int32)))


@pytest.mark.parametrize(
    ("prefer", "stored", "kept"),
    [
        pytest.param(PACKED, mxfp4_weight, "packed", id="4 bits"),
        pytest.param(SCALED, in_fp8, "scaled", id="8 bits"),
    ],
)
def test_experts_stay_in_the_bits_they_are_stored_in(prefer, stored, kept):
    layer, widened = experts(prefer, stored, stored), experts({}, stored, stored)

    assert getattr(layer.gate_up, kept) is not None
    assert getattr(layer.down, kept) is not None
    assert getattr(widened.gate_up, kept) is None
    expected = said(widened)
    # Rows are rounded to 8 bits before they meet such weights, and to nothing before wide ones.
    gap = (said(layer) - expected).abs().max() / expected.abs().max()
    assert 0 < gap < 0.1


def test_matrices_of_two_formats_are_multiplied_as_plain_numbers():
    mixed = experts(PACKED | SCALED, mxfp4_weight, in_fp8)
    plain = experts(
        {},
        lambda values: DenseWeight(mxfp4_weight(values).dense(torch.float32)),
        lambda values: DenseWeight(in_fp8(values).dense(torch.float32)),
    )
    assert mixed.gate_up.packed is not None

    assert torch.equal(said(mixed), said(plain))


def test_matrices_that_groups_of_columns_do_not_divide_are_widened():
    build = a_build(prefer=PACKED)
    layer = RootedExperts(
        build, width=WIDTH, inner_width=INNER, experts=EXPERTS, chosen=2, scale=1.5, limit=1.0,
        rounded=128,
    )  # fmt: skip
    parts = [mxfp4_weight(torch.ones(shape)) for shape in layer.down.part_shapes]

    layer.down.load(parts)

    assert layer.down.packed is None
    assert layer.down.values.shape == (EXPERTS, WIDTH, INNER)
