"""Do the Triton backends of the fills compute what the reference does? Kernels are interpreted on the CPU."""

import importlib.util

import pytest

from tests.support.interpreted import cases_at, interpreted_gaps

CASES = {
    "fill_step": "tests.support.op_cases:filled_steps",
    "fill_indptrs": "tokamak.ops.step_prep.cases:fill_indptrs_cases",
    "fill_unit_tiles": "tokamak.ops.step_prep.cases:fill_unit_tiles_cases",
}
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def gaps():
    return interpreted_gaps(CASES)


@pytest.mark.parametrize(
    ("op_name", "case"),
    [
        pytest.param(name, case, id=f"{name}: {case}")
        for name, place in CASES.items()
        for case in cases_at(place)
    ],
)
def test_a_backend_agrees_with_the_reference(gaps, op_name, case):
    assert gaps[op_name][str(case)] <= case.tolerance
