"""Do the Triton products of few rows, interpreted on the CPU, compute what their references say?"""

import importlib.util

import pytest

from tests.support.interpreted_products import FORMS, NAMES, product_gaps

pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs an optional library: triton"
    ),
]


@pytest.fixture(scope="module", params=FORMS)
def gaps(request):
    return product_gaps(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernels_agree_with_the_reference(gaps, name):
    assert len(gaps[name]) >= 18
    for case, (gap, tolerance) in gaps[name].items():
        assert gap <= tolerance, f"{name}: {case}"


def test_float32_scores_come_from_the_sums_and_were_never_rounded(gaps):
    exact = {
        name: gap for name, (gap, _) in gaps["few_rows_linear"].items() if "to float32" in name
    }

    assert exact
    assert max(exact.values()) < 1e-4
