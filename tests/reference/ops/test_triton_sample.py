"""Do the Triton backends of the sampling ops compute what the reference does? Kernels are interpreted on the CPU."""

import importlib.util

import pytest

from tests.support.interpreted import cases_at, interpreted_gaps

CASES = {
    "token_weights": "tokamak.ops.sample.cases:token_weights_cases",
    "argmax_rows": "tokamak.ops.sample.cases:argmax_rows_cases",
    "draw_rows": "tokamak.ops.sample.cases:draw_rows_cases",
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
