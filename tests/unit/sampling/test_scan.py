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
        likeliest = scan.argmax(scores)
        highest, ids = scan.largest(scores, count)

    assert likeliest.tolist() == [expected[0]]
    assert ids[0].tolist() == expected[:count]
    assert highest[0].tolist() == [values[i] for i in expected[:count]]


@both_ways
@given(few_values, st.data())
def test_scores_that_reach_a_value_are_counted(on_host, values, data):
    value = data.draw(st.sampled_from(values))

    with scanned_by(on_host):
        count = scan.count_at_least(torch.tensor([values]), torch.tensor([value]))

    assert count.tolist() == [sum(other >= value for other in values)]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("count", [1, 20, 64])
@pytest.mark.parametrize("size", [64, 300, 5000, 8200])
def test_rows_are_scanned_independently(size, count, coarse):
    numbers = np.random.default_rng(0).normal(size=(5, size)).astype(np.float32)
    scores = torch.from_numpy(numbers.round() if coarse else numbers)

    together = scan.largest(scores, count)[1]

    for row in range(5):
        assert torch.equal(together[row], scan.largest(scores[row : row + 1], count)[1][0])
        assert torch.equal(together[row], scores[row].sort(descending=True, stable=True)[1][:count])


@both_ways
def test_a_nan_is_the_highest_score(on_host):
    scores = torch.tensor([[1.0, float("nan"), 3.0]])

    with scanned_by(on_host):
        likeliest = scan.argmax(scores)

    assert likeliest.tolist() == [1]
