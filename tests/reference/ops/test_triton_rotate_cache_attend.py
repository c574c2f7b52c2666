"""Do decode rows in Triton compute what rotation and attention say, in every form, when they are interpreted?"""

import importlib.util

import pytest

from tests.support.interpreted_attention import DECODE_FORMS, interpreted_forms
from tokamak.ops.rotate_cache_attend.cases import rotate_cache_attend_cases

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]


@pytest.fixture(scope="module")
def gaps():
    return interpreted_forms("rotate_cache_attend")


def test_the_backend_agrees_with_the_reference_on_every_case(gaps):
    found = gaps["chosen"]

    assert len(found) == len(rotate_cache_attend_cases)
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("form", DECODE_FORMS[1:])
def test_splits_of_other_sizes_agree_with_the_reference(gaps, form):
    found = gaps[form]

    assert len(found) >= 12
    assert max(found.values()) <= 1, found


def test_counters_of_splits_are_zero_again_after_all_calls(gaps):
    assert gaps["counters"] == {"raised": 0}
