"""Do row scans agree with sorting, ties included?"""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokamak.sampling import scan

few_values = st.lists(
    st.sampled_from([-float("inf"), -1.5, 0.0, 0.25, 3.0]), min_size=1, max_size=40
)


both_ways = pytest.mark.parametrize("on_host", [True, False], ids=["numpy", "torch"])


def scanned_by(on_host):
    return mock.patch.object(scan, "is_on_host", return_value=on_host)


def order(values):
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@both_ways
@given(few_values, st.data())
def test_scans_agree_with_a_full_sort(on_host, values, data):
    count = data.draw(st.integers(1, len(values)))
    scores = torch.tensor([values])
    expected = order(values)

    with scanned_by(on_host):
        likeliest, ids = scan.argmax(scores), scan.top_ids(scores, count)
        highest = scan.largest(scores, count)

    assert likeliest.tolist() == [expected[0]]
    assert ids[0].tolist() == expected[:count]
    assert highest[0].tolist() == [values[i] for i in expected[:count]]


@both_ways
@given(few_values, st.data())
def test_the_nth_equal_score_is_found_in_id_order(on_host, values, data):
    value = data.draw(st.sampled_from(values))
    equals = [i for i, other in enumerate(values) if other == value]
    nth = data.draw(st.integers(0, len(equals) - 1))
    scores = torch.tensor([values])

    with scanned_by(on_host):
        found = scan.nth_equal(scores, torch.tensor([value]), torch.tensor([nth]))

    assert found.tolist() == [equals[nth]]


@both_ways
@given(few_values, st.data())
def test_scores_that_reach_a_value_are_counted(on_host, values, data):
    value = data.draw(st.sampled_from(values))

    with scanned_by(on_host):
        count = scan.count_at_least(torch.tensor([values]), torch.tensor([value]))

    assert count.tolist() == [sum(other >= value for other in values)]


@pytest.mark.parametrize("size", [1, 7, 300, 5000])
def test_rows_are_scanned_independently(size):
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(5, size)).astype(np.float32))
    count = min(size, 64)

    together = scan.top_ids(scores, count)

    for row in range(5):
        assert torch.equal(together[row], scan.top_ids(scores[row : row + 1], count)[0])
        assert torch.equal(together[row], scores[row].sort(descending=True, stable=True)[1][:count])


@both_ways
def test_a_nan_is_the_highest_score(on_host):
    scores = torch.tensor([[1.0, float("nan"), 3.0]])

    with scanned_by(on_host):
        likeliest = scan.argmax(scores)

    assert likeliest.tolist() == [1]
