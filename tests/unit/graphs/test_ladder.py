"""Which buckets are there, and which one holds a size?"""

from __future__ import annotations

import pytest

from tokamak.errors import OptionError
from tokamak.graphs.ladder import Ladder


def test_the_default_request_ladder_steps_by_8_16_and_32():
    ladder = Ladder.requests(max_num_seqs=300, q_width=1, max_num_batched_tokens=4096)

    assert ladder.buckets[:5] == (1, 2, 4, 8, 16)
    assert {56, 64, 80, 240, 256, 288, 300} <= set(ladder.buckets)
    assert ladder.buckets[-1] == 300


def test_request_buckets_fit_in_a_step_of_wide_rows():
    ladder = Ladder.requests(max_num_seqs=64, q_width=6, max_num_batched_tokens=100)

    assert ladder.buckets == (1, 2, 4, 8, 16)


def test_the_default_token_ladder_has_sixteen_buckets_up_to_2048():
    ladder = Ladder.tokens(max_num_batched_tokens=8192)

    assert len(ladder.buckets) == 16
    assert ladder.buckets[0] == 64
    assert ladder.buckets[-1] == 2048


def test_a_size_gets_the_smallest_bucket_that_holds_it():
    ladder = Ladder.of([8, 2, 4, 4], limit=16, option="sizes")

    assert [ladder.ceil(size) for size in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]


def test_an_empty_list_switches_a_graph_off():
    assert Ladder.of([], limit=16, option="sizes").ceil(1) is None


def test_a_bucket_no_step_can_have_is_refused_by_name():
    with pytest.raises(OptionError, match=r"req_graph.sizes holds 32; a step has 1 to 16"):
        Ladder.of([8, 32], limit=16, option="req_graph.sizes")
