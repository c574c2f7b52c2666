"""Are blocks conserved, and are reusable ones given away last and oldest first?"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tokamak.cache.blocks import NULL_BLOCK, BlockPool


def test_the_null_block_is_never_given_away():
    pool = BlockPool(5)

    taken = pool.take(4)

    assert sorted(taken) == [1, 2, 3, 4]
    assert NULL_BLOCK not in taken
    assert pool.free_blocks == 0


def test_a_published_block_is_found_after_it_was_released():
    pool = BlockPool(5)
    (block_id,) = pool.take(1)
    pool.publish(block_id, b"key")

    pool.release([block_id])

    assert pool.find(b"key") == block_id
    assert pool.free_blocks == 4


def test_blank_blocks_go_first_and_then_the_reusable_one_untouched_longest():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for name, block_id in zip((b"a", b"b"), blocks, strict=False):
        pool.publish(block_id, name)
    pool.release(blocks)
    pool.hold([blocks[0]])
    pool.release([blocks[0]])

    first, second = pool.take(1), pool.take(1)

    assert first == [blocks[2]]
    assert second == [blocks[1]]
    assert pool.find(b"b") is None
    assert pool.find(b"a") == blocks[0]


def test_the_first_block_published_under_a_key_keeps_it():
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.publish(first, b"same")

    pool.publish(second, b"same")
    pool.release([second])

    assert pool.find(b"same") == first
    assert pool.take(2).count(second) == 1


def test_forgetting_spares_what_requests_hold():
    pool = BlockPool(4)
    held, loose = pool.take(2)
    pool.publish(held, b"held")
    pool.publish(loose, b"loose")
    pool.release([loose])

    pool.forget_reusable()

    assert pool.find(b"held") == held
    assert pool.find(b"loose") is None
    assert pool.free_blocks == 2


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_free_and_held_blocks_add_up_whatever_happens(seed: int):
    chance = random.Random(seed)
    pool = BlockPool(12)
    holdings: list[list[int]] = []
    for _ in range(80):
        move = chance.choice(["take", "share", "release", "publish", "forget"])
        if move == "take":
            holdings.append(pool.take(chance.randint(0, pool.free_blocks)))
        elif move == "share":
            found = pool.find(bytes([chance.randint(0, 5)]))
            if found is not None:
                pool.hold([found])
                holdings.append([found])
        elif move == "release" and holdings:
            pool.release(reversed(holdings.pop(chance.randrange(len(holdings)))))
        elif move == "publish" and holdings:
            for block_id in chance.choice(holdings):
                pool.publish(block_id, bytes([chance.randint(0, 5)]))
        elif move == "forget":
            pool.forget_reusable()
        held = {block_id for ids in holdings for block_id in ids}
        assert NULL_BLOCK not in held
        assert pool.free_blocks + len(held) == pool.usable_blocks
