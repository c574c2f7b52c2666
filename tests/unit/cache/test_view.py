"""Are derived tables filled by their first reader, once a forward, at addresses that stay?"""

from __future__ import annotations

import pytest
import torch

from tokamak.cache.launch import LaunchStorage
from tokamak.cache.view import PagedBuffers, PagedView
from tokamak.errors import FillSite


class Place:
    """Where the forward is, set by the test."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self) -> str:
        return self.where


def some_buffers(site: Place | None = None) -> PagedBuffers:
    """Three requests with 5, 1 and 9 tokens, of which this step's queries are 5, 1 and 1."""
    return PagedBuffers(
        block_table=torch.zeros((4, 6), dtype=torch.int32),
        lengths=torch.tensor([5, 1, 9, 0], dtype=torch.int32),
        write_slots=torch.zeros(16, dtype=torch.int64),
        query_starts=torch.tensor([0, 5, 6, 7, 7], dtype=torch.int32),
        block_tokens=4,
        site=site,
    )


def test_the_first_reader_fills_and_later_ones_get_the_same_tensor():
    view = some_buffers().view(3, 7)

    first, second = view.indptrs(), view.indptrs()

    assert first is second
    assert first.tolist() == [0, 2, 3, 6]
    assert view.fills == 1


def test_tiles_of_different_widths_are_different_tables():
    view = some_buffers().view(3, 7)

    narrow, wide = view.unit_tiles(2), view.unit_tiles(4)

    assert narrow.tolist() == [[0, 0], [0, 2], [0, 4], [1, 5], [2, 6]]
    assert wide.tolist() == [[0, 0], [0, 4], [1, 5], [2, 6]]
    assert view.fills == 2


def test_a_table_nobody_reads_is_never_filled():
    view = some_buffers().view(3, 7)

    view.drop()

    assert view.fills == 0


def test_a_new_forward_fills_anew_at_the_same_address():
    buffers = some_buffers()
    view = buffers.view(3, 7)
    before = view.indptrs()
    buffers.lengths[0] = 13

    view.drop()
    after = view.indptrs()

    assert after.tolist() == [0, 4, 5, 8]
    assert after.data_ptr() == before.data_ptr()
    assert view.fills == 2


def test_without_dropping_a_forward_reads_the_step_before():
    """The fault that dropping prevents (GR-18): a recording would not hold the fill."""
    buffers = some_buffers()
    view = buffers.view(3, 7)
    view.indptrs()
    buffers.lengths[0] = 13

    stale = view.indptrs()

    assert stale.tolist() == [0, 2, 3, 6]
    assert view.fills == 1


def test_tables_of_any_size_of_step_lie_at_the_same_address():
    buffers = some_buffers()

    small, large = buffers.view(2, 6), buffers.view(4, 16)

    assert small.indptrs().data_ptr() == large.indptrs().data_ptr()
    assert small.unit_tiles(4).data_ptr() == large.unit_tiles(4).data_ptr()
    assert small.unit_tiles(4).shape[0] <= large.unit_tiles(4).shape[0]
    assert small.block_table.data_ptr() == large.block_table.data_ptr()


@pytest.mark.parametrize(("filled", "read"), [("segment", "region"), ("region", "segment")])
def test_a_table_filled_in_a_segment_is_not_read_in_a_region_nor_the_reverse(filled, read):
    place = Place(filled)
    view = some_buffers(place).view(3, 7)
    view.unit_tiles(4)
    place.where = read

    with pytest.raises(FillSite, match=rf"unit_tiles\(4\) was filled in a {filled}"):
        view.unit_tiles(4)


@pytest.mark.parametrize("read", ["segment", "region"])
def test_a_table_filled_where_the_forward_begins_is_read_everywhere(read):
    place = Place("begin")
    view = some_buffers(place).view(3, 7)
    table = view.indptrs()
    place.where = read

    assert view.indptrs() is table


def test_a_dropped_table_may_be_filled_elsewhere_in_the_next_forward():
    place = Place("segment")
    view = some_buffers(place).view(3, 7)
    view.indptrs()
    view.drop()
    place.where = "region"

    view.indptrs()

    assert view.fills == 2


def walking_buffers(programs: int, site: Place | None = None) -> PagedBuffers:
    """Four requests of decode rows, two rows each, over up to 1,536 keys, and so many programs to score them."""
    return PagedBuffers(
        block_table=torch.zeros((4, 24), dtype=torch.int32),
        lengths=torch.tensor([1_400, 9, 300, 700], dtype=torch.int32),
        write_slots=torch.zeros(8, dtype=torch.int64),
        query_starts=torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32),
        block_tokens=64,
        launch=LaunchStorage(programs=programs),
        site=site,
    )


POSITIONS = torch.tensor([1_398, 1_399, 7, 8, 298, 299, 698, 699], dtype=torch.int32)


def walk(view: PagedView, *, ratio: int = 1, keep: int = 512) -> torch.Tensor | None:
    return view.walk_plans(POSITIONS, 2, ratio=ratio, keep=keep, columns=24 * 64 // ratio)


def test_layers_that_walk_alike_read_one_plan():
    view = walking_buffers(9).view(4, 8)

    first, second = walk(view), walk(view)

    assert first is second
    assert first[0].tolist() == [
        [0, 2, 0, 1], [0, 2, 1, 3], [0, 2, 3, 5], [0, 2, 5, 7], [0, 2, 7, 9], [0, 2, 9, 11],
        [6, 2, 0, 2], [6, 2, 2, 4], [6, 2, 4, 6],
    ]  # fmt: skip
    assert view.fills == 1


def test_keys_of_other_tokens_and_other_lists_are_walked_by_other_plans_of_one_storage():
    view = walking_buffers(9).view(4, 8)

    plans = [walk(view), walk(view, ratio=4, keep=100), walk(view, keep=100)]

    assert len({plan.data_ptr() for plan in plans}) == 3
    assert all(walk(view) is plans[0] for _ in range(2))
    assert view.fills == 3


def test_rows_chosen_among_a_step_s_are_walked_by_no_plan():
    buffers = walking_buffers(9)

    chosen = buffers.of_rows(buffers.write_slots.clone(), buffers.query_starts)

    assert walk(buffers.view(4, 8)) is not None
    assert walk(chosen.view(4, 8)) is None


@pytest.mark.parametrize("programs", [0, 4])
def test_nothing_is_planned_where_nobody_walks_or_more_pieces_are_than_programs(programs):
    view = walking_buffers(programs).view(4, 8)

    assert walk(view) is None
    assert view.fills == 0


def test_plans_of_every_forward_lie_at_one_address_and_are_of_its_own_rows():
    buffers = walking_buffers(9)
    view = buffers.view(4, 8)
    before, address = walk(view).clone(), walk(view).data_ptr()

    view.drop()
    positions = POSITIONS.flip(0).sort().values
    after = view.walk_plans(positions, 2, ratio=1, keep=512, columns=24 * 64)
    smaller = buffers.view(1, 2).walk_plans(POSITIONS[:2], 2, ratio=1, keep=512, columns=24 * 64)

    assert not torch.equal(before, after)
    assert address == after.data_ptr() == smaller.data_ptr()


def test_plans_that_are_not_dropped_are_those_of_the_step_before():
    view = walking_buffers(9).view(4, 8)
    before = walk(view).clone()

    stale = view.walk_plans(POSITIONS - 1, 2, ratio=1, keep=512, columns=24 * 64)

    assert torch.equal(stale, before)


def test_a_plan_filled_in_a_segment_is_not_read_in_a_region():
    place = Place("segment")
    view = walking_buffers(9, place).view(4, 8)
    walk(view)
    place.where = "region"

    with pytest.raises(FillSite, match=r"walk_plans\(ratio=1, keep=512\) was filled in a segment"):
        walk(view)
