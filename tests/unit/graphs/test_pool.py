"""Is pool memory reused when tensors die, never before, and poisoned only where it is free?"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamak.graphs.pool import ALIGNMENT, BytePool


def a_tensor(pool, *shape, dtype=torch.float32):
    stride = torch.empty(shape, device="meta").stride()
    return pool.tensor(shape, stride, dtype)


def test_memory_serves_again_when_a_tensor_and_its_views_are_gone():
    pool = BytePool(4096)
    first = a_tensor(pool, 4, 4)
    view, address = first[2:], first.data_ptr()

    del first
    beside = a_tensor(pool, 4, 4)
    del view
    again = a_tensor(pool, 4, 4)

    assert beside.data_ptr() != address
    assert again.data_ptr() == address
    assert pool.reserved_bytes == 4096


def test_an_alias_shares_numbers_and_holds_no_memory():
    pool = BytePool(4096)
    made = a_tensor(pool, 6, 4, dtype=torch.bfloat16)
    part = made[1::2, 1:3]
    part.fill_(3)

    alias = pool.alias(part)
    address = made.data_ptr()
    del made, part
    again = a_tensor(pool, 6, 4, dtype=torch.bfloat16)

    assert alias.shape == (3, 2)
    assert alias.dtype == torch.bfloat16
    assert torch.equal(alias, torch.full((3, 2), 3.0, dtype=torch.bfloat16))
    assert again.data_ptr() == address


def test_tensors_of_other_memory_have_no_alias():
    assert BytePool(4096).alias(torch.zeros(3)) is None


def test_poison_reaches_free_memory_alone():
    pool = BytePool(4096)
    kept, gone = a_tensor(pool, 8).zero_(), a_tensor(pool, 8).zero_()
    alias = pool.alias(gone)
    del gone

    pool.poison()

    assert torch.equal(kept, torch.zeros(8))
    assert alias.isnan().all()


def test_a_tensor_larger_than_a_chunk_gets_one_of_its_own():
    pool = BytePool(4096)

    a_tensor(pool, 10_000)

    assert pool.reserved_bytes >= 40_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 9)), max_size=40))
def test_living_tensors_never_overlap_and_all_memory_comes_back(work):
    pool = BytePool(2048)
    alive = {}

    for number, (count, drop) in enumerate(work):
        alive[number] = a_tensor(pool, count).fill_(number)
        alive.pop(drop, None)

    for number, tensor in alive.items():
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert (tensor == number).all()
    reserved = pool.reserved_bytes
    alive.clear()
    tensor = None
    pool.poison()
    assert tensor is None
    assert sum(end - begin for c in pool._chunks for begin, end in c.spans) == reserved
    assert all(len(chunk.spans) == 1 for chunk in pool._chunks)
