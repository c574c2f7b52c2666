"""Are random numbers keyed by seed, sibling and position, and do they look random?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamak.sampling.noise import request_key, seed_of, uniforms

seeds = st.integers(-(2**63), 2**63 - 1)


def numbers(seed, sibling=0, positions=range(1000)):
    at = np.array(positions, np.int32)
    return uniforms(np.full(at.size, request_key(seed, sibling), np.uint64), at)


@given(seeds, st.integers(0, 127), st.integers(0, 2**31 - 1))
def test_a_number_is_in_the_unit_interval_and_is_the_same_again(seed, sibling, position):
    first = numbers(seed, sibling, [position])
    again = numbers(seed, sibling, [5, position])

    assert 0.0 <= first[0] < 1.0
    assert first[0] == again[1]


@pytest.mark.parametrize("seed", [0, 1, -1, 7, 2**63 - 1, -(2**63)])
def test_a_stream_is_uniform(seed):
    drawn = numbers(seed, positions=range(20_000))

    counts = np.histogram(drawn, bins=100, range=(0, 1))[0]

    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 160  # 99 degrees of freedom: p about 1e-4


def test_neighbouring_seeds_and_siblings_and_positions_are_unrelated():
    base = numbers(7)

    others = [numbers(8), numbers(-7), numbers(7, 1), numbers(7, positions=range(1, 1001))]

    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.12


def test_keys_of_many_seeds_and_siblings_differ():
    keys = {request_key(seed, sibling) for seed in range(-500, 500) for sibling in range(16)}

    assert len(keys) == 16_000


def test_a_request_without_a_seed_gets_one_from_its_id_and_the_entropy():
    assert seed_of("a", b"x") == seed_of("a", b"x")
    assert len({seed_of("a", b"x"), seed_of("b", b"x"), seed_of("a", b"y")}) == 3
    assert -(2**63) <= seed_of("a", b"x") < 2**63
