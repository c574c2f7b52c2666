"""Which buckets are there, and which one holds a size?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokamak
from tokamak.errors import OptionError
from tokamak.graphs.ladder import Ladder

PACKAGE = Path(tokamak.__file__).parent


def test_the_default_request_ladder_steps_by_8_16_and_32():
    ladder = Ladder.requests(max_num_seqs=300, q_width=1, max_num_batched_tokens=4096)

    small = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    middle = (80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert ladder.buckets == (*small, *middle, 288, 300)


def test_request_buckets_fit_in_a_step_of_wide_rows():
    ladder = Ladder.requests(max_num_seqs=64, q_width=6, max_num_batched_tokens=100)

    assert ladder.buckets == (1, 2, 4, 8, 16)


@given(
    seqs=st.integers(1, 600),
    q_width=st.integers(1, 8),
    batched=st.integers(8, 4096),
)
def test_the_default_request_ladder_keeps_to_its_limits_and_ends_at_the_largest_step(
    seqs: int, q_width: int, batched: int
):
    ladder = Ladder.requests(max_num_seqs=seqs, q_width=q_width, max_num_batched_tokens=batched)

    assert all(size <= seqs and size * q_width <= batched for size in ladder.buckets)
    assert (seqs in ladder.buckets) == (seqs * q_width <= batched)
    assert ladder.ceil(1) == 1


def test_the_default_token_ladder_has_sixteen_buckets_up_to_2048():
    ladder = Ladder.tokens(max_num_batched_tokens=8192)

    by_64, wider = (64, 128, 192, 256, 320, 384, 448, 512), (640, 768, 896, 1024)
    assert ladder.buckets == (*by_64, *wider, 1280, 1536, 1792, 2048)
    assert len(ladder.buckets) == 16


@pytest.mark.parametrize(("token_max", "batched", "end"), [(300, 8192, 300), (2048, 100, 100)])
def test_the_token_ladder_ends_at_its_top_or_at_the_largest_step(
    token_max: int, batched: int, end: int
):
    ladder = Ladder.tokens(token_max=token_max, max_num_batched_tokens=batched)

    assert ladder.buckets[-1] == end
    assert ladder.ceil(end + 1) is None


def test_an_explicit_list_replaces_the_default():
    tokens = Ladder.tokens([256, 3072], token_max=64, max_num_batched_tokens=4096)
    requests = Ladder.requests([3, 1], max_num_seqs=8, q_width=2, max_num_batched_tokens=64)

    assert tokens.buckets == (256, 3072)
    assert requests.buckets == (1, 3)


def test_a_size_gets_the_smallest_bucket_that_holds_it():
    ladder = Ladder.of([8, 2, 4, 4], limit=16, option="sizes")

    assert [ladder.ceil(size) for size in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]


def test_an_empty_list_switches_a_graph_off():
    tokens = Ladder.tokens([], max_num_batched_tokens=64)
    requests = Ladder.requests([], max_num_seqs=8, q_width=1, max_num_batched_tokens=64)

    assert tokens.ceil(1) is requests.ceil(1) is None


def test_a_bucket_no_step_can_have_is_refused_by_name():
    with pytest.raises(OptionError, match=r"token_graph_sizes holds 128; a step has 1 to 64"):
        Ladder.tokens([32, 128], max_num_batched_tokens=64)
    with pytest.raises(OptionError, match=r"req_graph_sizes holds 32; a step has 1 to 16"):
        Ladder.requests([8, 32], max_num_seqs=16, q_width=1, max_num_batched_tokens=64)
    with pytest.raises(OptionError, match=r"token_graph_sizes holds 0"):
        Ladder.tokens([0], max_num_batched_tokens=64)


def test_request_buckets_whose_tokens_do_not_fit_in_a_step_are_refused():
    with pytest.raises(OptionError, match=r"16 rows of 5 tokens.*max_num_batched_tokens to 80"):
        Ladder.requests([4, 16], max_num_seqs=16, q_width=5, max_num_batched_tokens=64)
    with pytest.raises(OptionError, match=r"a decode row has 9 tokens and a step at most 8"):
        Ladder.requests(max_num_seqs=16, q_width=9, max_num_batched_tokens=8)


def test_a_token_ladder_without_a_top_is_refused():
    with pytest.raises(OptionError, match="token_graph_max is 0"):
        Ladder.tokens(token_max=0, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("most", "buckets"),
    [
        (200, (64, 128, 200)),
        (128, (64, 128)),
        (256, (64, 128, 256)),
        (999, (64, 128, 256)),
        (9, (9,)),
    ],
)
def test_a_ladder_up_to_a_size_holds_that_size_or_as_much_as_before(most, buckets):
    assert Ladder((64, 128, 256)).up_to(most).buckets == buckets
    assert Ladder(()).up_to(most).buckets == ()


def test_no_other_module_searches_a_ladder():
    search = re.compile(
        r"\bbisect(_left|_right)?\(|\bsearchsorted|\bbucketize|\bdigitize|\.buckets\b.*\b(min|next)\b"
    )
    stepping = ("core", "graphs", "layers", "speculative", "runner", "engine")

    users = [
        str(path.relative_to(PACKAGE))
        for package in stepping
        for path in sorted((PACKAGE / package).rglob("*.py"))
        if search.search(path.read_text(encoding="utf-8"))
    ]

    assert users == ["graphs/ladder.py"]
