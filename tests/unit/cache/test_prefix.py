"""Do equal prefixes get equal keys, and different ones different keys?"""

from __future__ import annotations

import pytest

from tests.support.factory import a_request, cache_groups, some_holdings
from tokamak.cache.groups import group_sub_caches
from tokamak.cache.layout import bytes_per_block, lay_out
from tokamak.cache.prefix import KeyChain
from tokamak.cache.sub_cache import SubCache


def keys(token_ids: list[int], salt: str = "", block_tokens: int = 4) -> list[bytes]:
    chain = KeyChain(salt, block_tokens)
    chain.extend(len(token_ids), lambda start, stop: token_ids[start:stop])
    return chain.keys


def test_only_full_blocks_have_keys():
    assert [len(keys(list(range(length)))) for length in (3, 4, 7, 8, 9)] == [0, 1, 1, 2, 2]


def test_a_key_depends_on_everything_before_it():
    first, second = keys([1, 2, 3, 4, 9, 9, 9, 9]), keys([1, 2, 3, 5, 9, 9, 9, 9])

    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_key_depends_on_the_salt():
    assert keys([1, 2, 3, 4], salt="a") != keys([1, 2, 3, 4], salt="b")


def test_extending_in_pieces_gives_the_keys_of_the_whole():
    token_ids = list(range(30))
    chain = KeyChain("", 4)
    for known in (1, 5, 9, 30):
        chain.extend(known, lambda start, stop: token_ids[start:stop])

    assert chain.keys == keys(token_ids)


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9])
def test_a_match_always_leaves_a_token_to_compute(prompt: int):
    holdings = some_holdings(block_tokens=4)
    first, second = a_request("first", prompt=prompt), a_request("second", prompt=prompt)
    first.slot = 1
    holdings.admit(first, holdings.match(first), prompt)
    holdings.publish(first, prompt)

    match = holdings.match(second)

    assert match.cached_tokens == (prompt - 1) // 4 * 4
    assert match.cached_tokens < prompt


def test_tokens_the_host_has_not_seen_are_not_published():
    holdings = some_holdings(block_tokens=4)
    request = a_request("r", prompt=7)
    request.slot = 1
    holdings.admit(request, holdings.match(request), 9)

    holdings.publish(request, 9)

    assert holdings.match(a_request("other", prompt=9)).cached_tokens == 4


def test_sub_caches_that_cover_tokens_alike_share_a_group():
    window = SubCache("window", (0,), 1, 4, "float32", keep_tokens=8)
    keys_cache = SubCache("keys", (0,), 1, 4, "float32")
    values = SubCache("values", (0,), 1, 4, "bfloat16")

    groups = group_sub_caches([keys_cache, window, values])

    assert [group.name for group in groups] == ["keys", "window"]
    assert groups[0].sub_caches == (keys_cache, values)


def test_regions_do_not_overlap_and_block_bytes_add_up():
    groups = cache_groups()

    layout = lay_out(groups, block_tokens=4, blocks=[10])

    assert bytes_per_block(groups, 4) == 2 * 2 * (4 * 2 * 8 * 4)
    ends = [0]
    for region in layout.regions:
        assert region.start_bytes >= ends[-1]
        ends.append(region.start_bytes + 10 * 4 * 2 * 8 * 4)
    assert ends[-1] <= layout.arena_bytes
