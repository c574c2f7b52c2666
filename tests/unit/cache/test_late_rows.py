"""Does a prefix count as found only where late layers have written what is read, and is nothing asked for beyond?"""

from __future__ import annotations

import pytest

from tests.support.factory import a_request
from tokamak.cache.groups import first_late, group_sub_caches
from tokamak.cache.holdings import Holdings
from tokamak.cache.sub_cache import SubCache
from tokamak.core.request import Request, SamplingParams

BLOCK = 4
WINDOW = 6
LATE = 1 + (WINDOW - 1) * 2
"""Rows that two late layers run for."""
NEWEST_LATE = 2
"""The number of the group of late layers' windows."""


def some_holdings(late_tokens: int = LATE, block_tokens: int = BLOCK) -> Holdings:
    groups = group_sub_caches(
        [
            SubCache("entries", (0,), 1, 8, "float32", stride_tokens=2),
            SubCache("window", (0,), 1, 8, "float32", keep_tokens=WINDOW),
            SubCache("late", (1, 2), 1, 8, "float32", keep_tokens=WINDOW, late_tokens=late_tokens),
        ]
    )
    assert [group.name for group in groups] == ["entries", "window", "late"]
    return Holdings(groups, block_tokens=block_tokens, blocks=[33] * 3, reuse=True)


def run(holdings: Holdings, request: Request, slot: int = 1) -> int:
    """Admit a request and write all its known tokens; returns the tokens of its hit."""
    request.slot = slot
    match = holdings.match(request)
    holdings.admit(request, match, request.known_tokens)
    holdings.reach(request, request.known_tokens)
    holdings.publish(request, request.known_tokens)
    return match.cached_tokens


def hit(holdings: Holdings, prompt: int) -> int:
    return holdings.match(a_request("again", prompt=prompt)).cached_tokens


def test_a_prompt_of_the_same_length_finds_all_in_front_of_late_rows():
    holdings = some_holdings()
    run(holdings, a_request("first", prompt=41))

    match = holdings.match(a_request("second", prompt=41))

    # Late layers begin at position 30; in front of it they leave nothing, and nothing is read.
    assert match.cached_tokens == 28
    assert match.blocks[NEWEST_LATE] == (0,) * 7


def test_a_shorter_prompt_finds_what_lies_in_front_of_its_own_late_rows():
    holdings = some_holdings()
    run(holdings, a_request("first", prompt=41))

    # It would read late rows of positions 10 and behind, which the first never wrote.
    assert hit(holdings, 21) == 8


def test_rows_behind_the_prompt_are_found():
    holdings = some_holdings()
    first = a_request("first", prompt=41)
    run(holdings, first)
    first.output_ids.extend(a_request("more", prompt=49).prompt_ids[41:])
    holdings.grow(first, 49)

    holdings.publish(first, 48)

    # The token at 48 reads positions 43 to 48, all written after a whole window that is right.
    assert hit(holdings, 49) == 48


def test_the_first_late_rows_of_a_prompt_are_never_found():
    holdings = some_holdings()
    run(holdings, a_request("first", prompt=41))
    late, keys = holdings.pools[NEWEST_LATE], holdings._chain(a_request("first", prompt=41)).keys

    # Only positions from 35 on are right in both layers.
    assert [late.find(key) is not None for key in keys] == [False] * 9 + [True]


def test_a_prompt_that_is_scored_or_short_is_written_whole():
    scored = a_request("first", prompt=41)
    scored.params = SamplingParams(prompt_logprobs=0)
    whole, short = some_holdings(), some_holdings()

    run(whole, scored)
    run(short, a_request("first", prompt=LATE))

    assert short.first_late(a_request("third", prompt=LATE + 1)) == 1
    assert whole.first_late(scored) == 0
    assert hit(whole, 41) == 40
    assert hit(short, LATE) == 8


def test_a_hit_behind_right_rows_leaves_nothing_out():
    holdings = some_holdings()
    run(holdings, a_request("short", prompt=9))

    # 8 tokens are cached whole; the prompt's late rows begin at 3.
    assert run(holdings, a_request("longer", prompt=14), slot=2) == 8
    assert hit(holdings, 13) == 12


@pytest.mark.parametrize("prompt", [41, WINDOW])
def test_under_bounded_replay_a_hit_ends_in_front_of_late_rows(prompt: int):
    holdings = some_holdings(late_tokens=WINDOW)
    first = a_request("first", prompt=prompt)
    run(holdings, first)
    first.output_ids.extend(a_request("more", prompt=49).prompt_ids[prompt:])
    holdings.grow(first, 49)
    holdings.publish(first, 48)

    match = holdings.match(a_request("again", prompt=41))

    # Late layers begin at 35 and read nothing in front of it. Of an answer's late rows all are its own.
    assert match.cached_tokens == 32
    assert match.blocks[NEWEST_LATE] == (0,) * 8
    assert hit(holdings, 49) == 40
    assert holdings.first_late(a_request("again", prompt=49)) == 43


def test_under_bounded_replay_prompts_of_a_window_share_rows_with_their_like_alone():
    holdings = some_holdings(late_tokens=WINDOW, block_tokens=2)
    # Of the longer prompt, late rows at 2 and 3 do not see the first one.
    run(holdings, a_request("longer", prompt=WINDOW + 1))
    run(holdings, a_request("short", prompt=3), slot=2)

    assert hit(holdings, WINDOW) == 2

    run(holdings, a_request("whole", prompt=WINDOW), slot=3)
    assert hit(holdings, WINDOW) == 4


@pytest.mark.parametrize(("prompt", "first"), [(0, 0), (LATE, 0), (LATE + 1, 1), (41, 30)])
def test_where_late_rows_begin(prompt: int, first: int):
    assert first_late(prompt, LATE) == first
    assert first_late(prompt, 0) == 0
