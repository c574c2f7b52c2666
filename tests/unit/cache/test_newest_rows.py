"""Does a group that keeps the newest tokens give back the others, and count in a prefix hit only with what is read?"""

from __future__ import annotations

import pytest

from tests.support.factory import a_request
from tokamak.cache.groups import CacheGroup, group_sub_caches, grows_by_chunk, window_blocks
from tokamak.cache.holdings import Holdings
from tokamak.cache.sub_cache import SubCache
from tokamak.core.request import Request

BLOCK = 4
ALL, NEWEST = 0, 1
"""Groups by number: one that keeps every token, and one that keeps the newest six."""


def some_groups() -> tuple[CacheGroup, ...]:
    return group_sub_caches(
        [
            SubCache("entries", (0,), 1, 8, "float32", stride_tokens=2),
            SubCache("window", (0, 1), 1, 8, "float32", keep_tokens=6),
        ]
    )


def some_holdings(*, blocks: int = 33, reuse: bool = True) -> Holdings:
    return Holdings(some_groups(), block_tokens=BLOCK, blocks=[blocks] * 2, reuse=reuse)


def admitted(holdings: Holdings, name: str, prompt: int, *, slot: int = 1) -> Request:
    request = a_request(name, prompt=prompt)
    request.slot = slot
    holdings.admit(request, holdings.match(request), prompt)
    holdings.reach(request, prompt)
    return request


def held(holdings: Holdings) -> list[int]:
    """Blocks that requests hold, by group."""
    return [pool.usable_blocks - pool.free_blocks for pool in holdings.pools]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(
    ("written", "kept"),
    # A token at 8 reads positions 3 to 8, one at 9 reads 4 to 9; blocks are full every four tokens.
    [(7, 5), (8, 5), (12, 4), (16, 3), (19, 3)],
)
def test_blocks_out_of_sight_are_given_back(reuse: bool, written: int, kept: int):
    holdings = some_holdings(reuse=reuse)
    request = admitted(holdings, "r", 20)

    for tokens in range(1, written + 1):
        if tokens >= request.publish_tokens:
            holdings.publish(request, tokens)

    assert held(holdings) == [5, kept]


def test_what_is_given_back_can_be_held_by_another():
    holdings = some_holdings(blocks=6, reuse=False)
    request = admitted(holdings, "r", 20)
    holdings.publish(request, 20)

    assert [pool.free_blocks for pool in holdings.pools] == [0, 3]


def test_a_request_that_ends_gives_back_each_block_once():
    holdings = some_holdings()
    request = admitted(holdings, "r", 20)
    holdings.publish(request, 20)

    holdings.release(request)

    assert held(holdings) == [0, 0]


def test_a_hit_brings_the_newest_blocks_alone():
    holdings = some_holdings()
    first = admitted(holdings, "first", 21)
    holdings.publish(first, 20)

    match = holdings.match(a_request("second", prompt=21))

    assert match.cached_tokens == 20
    assert all(match.blocks[ALL])
    # The token at 20 reads positions 15 to 20: block 3 and those behind it.
    assert [block > 0 for block in match.blocks[NEWEST]] == [False, False, False, True, True]


def test_grants_of_a_hit_leave_out_what_is_not_there():
    holdings = some_holdings()
    first = admitted(holdings, "first", 21)
    holdings.publish(first, 20)
    second = a_request("second", prompt=21)
    second.slot = 2

    grants = holdings.admit(second, holdings.match(second), 21)
    grants += holdings.reach(second, 21)

    assert [(grant.group, grant.start, len(grant.block_ids)) for grant in grants] == [
        (ALL, 0, 5),
        (NEWEST, 3, 2),
        (ALL, 5, 1),
        (NEWEST, 5, 1),
    ]
    holdings.release(first)
    holdings.release(second)
    assert held(holdings) == [0, 0]


def test_a_prefix_whose_newest_rows_are_gone_counts_as_far_as_they_are_there():
    holdings = some_holdings()
    first = admitted(holdings, "first", 21)
    holdings.publish(first, 20)
    holdings.release(first)
    window = holdings.pools[NEWEST]
    # Whoever takes all blocks makes the pool forget; then only tokens 0 to 8 are written again.
    window.release(window.take(window.free_blocks))
    short = admitted(holdings, "short", 9, slot=2)
    holdings.publish(short, 8)

    match = holdings.match(a_request("second", prompt=21))

    assert match.cached_tokens == 8


def test_no_window_no_hit():
    holdings = some_holdings()
    first = admitted(holdings, "first", 21)
    holdings.publish(first, 20)
    holdings.release(first)
    window = holdings.pools[NEWEST]
    window.release(window.take(window.free_blocks))

    match = holdings.match(a_request("second", prompt=21))

    assert match.cached_tokens == 0
    assert match.blocks == ((), ())


def test_blocks_of_newest_rows_come_with_each_chunk():
    holdings = some_holdings()
    request = a_request("r", prompt=40)
    request.slot = 1

    holdings.admit(request, holdings.match(request), 40)
    at_first = held(holdings)
    grants = holdings.reach(request, 9)

    assert at_first == [10, 0]
    assert held(holdings) == [10, 3]
    assert [(grant.group, grant.start, len(grant.block_ids)) for grant in grants] == [
        (NEWEST, 0, 3)
    ]
    assert holdings.reach(request, 12) == []


def test_few_blocks_of_newest_rows_carry_long_requests():
    longest, requests, step = 400, 3, 10
    blocks = window_blocks(
        6, block_tokens=BLOCK, longest_tokens=longest, requests=requests, step_tokens=step
    )
    groups = some_groups()
    holdings = Holdings(groups, block_tokens=BLOCK, blocks=[400, blocks], reuse=True)
    running = []
    for slot in range(requests):
        request = a_request(f"r{slot}", prompt=range(slot, slot + longest))
        request.slot = slot
        holdings.admit(request, holdings.match(request), longest)
        running.append(request)
    written = [[0, 0] for _ in running]

    # One request takes all of a step's tokens; commits are two steps late.
    for turn in range(3 * longest // step):
        which = turn % requests
        reached = written[which][-1] + step
        if reached <= longest:
            holdings.reach(running[which], reached)
            written[which].append(reached)
            holdings.publish(running[which], written[which][-3])

    assert blocks < longest // BLOCK
    assert all(done[-1] == longest for done in written)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [((0, 6), (False, True)), ((6, 2), (False, False)), ((0, 0), (False, False))],
)
def test_groups_grow_by_chunk_beside_one_that_keeps_all(kept, expected):
    groups = group_sub_caches(
        [
            SubCache(f"c{at}", (0,), 1, 8, "float32", stride_tokens=1 + at, keep_tokens=keep)
            for at, keep in enumerate(kept)
        ]
    )

    assert grows_by_chunk(groups) == expected


def test_short_contexts_need_no_more_blocks_than_they_have():
    sizes = {"block_tokens": 16, "requests": 4, "step_tokens": 8192}

    assert window_blocks(128, longest_tokens=64, **sizes) == 1 + 4 * 4
    assert window_blocks(128, longest_tokens=1 << 20, **sizes) == 1 + 4 * 12 + 3 * 512
