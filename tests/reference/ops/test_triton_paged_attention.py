"""Does paged attention in Triton compute what the reference says, in every form, when it is interpreted?"""

import importlib.util

import pytest

from tests.support.interpreted_attention import FORMS, interpreted_forms
from tokamak.ops.paged_attention.cases import paged_attention_cases

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]


@pytest.fixture(scope="module")
def gaps():
    return interpreted_forms()


def test_the_backend_agrees_with_the_reference_on_every_case(gaps):
    found = gaps["chosen"]

    assert len(found) == len(paged_attention_cases)
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("form", FORMS[1:])
def test_splits_and_loops_of_other_sizes_agree_with_the_reference(gaps, form):
    found = gaps[form]

    assert len(found) >= 12
    assert all(gap <= 1 for gap in found.values()), found


def test_counters_of_splits_are_zero_again_after_all_calls(gaps):
    assert gaps["counters"] == {"raised": 0}


def test_splits_fill_the_device_and_get_fewer_as_requests_get_more():
    from tokamak.ops.paged_attention.triton_decode import MOST_SPLITS, splits_of

    splits = [splits_of(requests, 8, 132) for requests in (1, 2, 8, 12, 13, 33, 256)]

    assert splits == [MOST_SPLITS, MOST_SPLITS, 8, 4, 1, 1, 1]


def test_a_step_without_requests_has_one_split_at_least():
    from tokamak.ops.paged_attention.triton_decode import splits_of

    assert splits_of(4096, 8, 132) == 1
    assert splits_of(0, 8, 132) >= 1
