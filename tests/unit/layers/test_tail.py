"""Are the rows of late layers the newest of each prompt, padded with what writes nowhere, in buffers that are counted?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.preparation import a_decode_plan, an_arena, shape_of, two_groups
from tests.support.steps import Chunk, a_context
from tokamak.core.plan import LateShape, Mode
from tokamak.errors import TailOverflow
from tokamak.layers.attention.tail import TailBuffers, TailRows, tail_bytes


def int32s(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def a_plan():
    """Chunks of 6 and 4 tokens behind 10 and none, then a decode row."""
    return replace(
        a_decode_plan([10, 0, 30]),
        query_lens=int32s(6, 4, 1),
        prefill_rows=2,
    )


@pytest.mark.parametrize(
    ("first", "rows", "counts"),
    [
        ((0, 0, 0), range(11), (6, 4, 1)),
        ((14, 2, 0), (4, 5, 8, 9, 10), (2, 2, 1)),
        ((16, 9, 30), (10,), (0, 0, 1)),
        ((3, 4, 0), (0, 1, 2, 3, 4, 5, 10), (6, 0, 1)),
    ],
)
def test_rows_at_the_first_position_or_behind_it_are_chosen(first, rows, counts):
    tail = TailRows.of(a_plan(), int32s(*first))

    assert tail.rows.tolist() == list(rows)
    assert tail.counts.tolist() == list(counts)


def test_rows_of_padding_are_the_step_s_first_and_requests_of_padding_have_none():
    tail = TailRows.of(a_plan(), int32s(14, 2, 0))
    rows, starts, first = (np.full(size, 99, dtype=np.int32) for size in (8, 6, 5))

    tail.stage(rows, starts, first)

    assert rows.tolist() == [4, 5, 8, 9, 10, 0, 0, 0]
    assert starts.tolist() == [0, 2, 4, 5, 5, 5]
    assert first.tolist() == [14, 2, 0, 0, 0]


def test_a_tail_is_published_with_the_step_s_other_numbers():
    arena, plan = an_arena(max_tail=16), a_plan()
    tail = TailRows.of(plan, int32s(14, 2, 0))

    arena.stage(plan, shape_of(plan))
    arena.stage_tail(tail, 8)
    arena.publish()

    assert arena.tail_rows[:8].tolist() == [4, 5, 8, 9, 10, 0, 0, 0]
    assert arena.tail_starts[:4].tolist() == [0, 2, 4, 5]
    assert arena.tail_first[:3].tolist() == [14, 2, 0]


def buffers(rows: torch.Tensor, starts: torch.Tensor) -> TailBuffers:
    arena = an_arena(groups=two_groups())
    return TailBuffers(
        rows, starts, window_starts=None, groups=arena.buffers, carried_rows=3, carried_bytes=20
    )


def test_the_bytes_of_the_buffers_are_those_a_plan_counts():
    made = buffers(torch.zeros(16, dtype=torch.int32), torch.zeros(9, dtype=torch.int32))

    own = [made._rows, made._token_ids, made._positions, made._carried]
    own += [of.write_slots for of in made._groups.values()]

    assert sum(tensor.nbytes for tensor in own) == tail_bytes(
        16, groups=2, carried_rows=3, carried_bytes=20
    )


def test_more_rows_than_the_bucket_are_refused():
    made = buffers(torch.zeros(16, dtype=torch.int32), torch.zeros(9, dtype=torch.int32))
    context = a_context([Chunk(range(6), 0, [1, 2])], block_tokens=4, groups=("keys", "window"))
    tail = TailRows(rows=int32s(0, 1, 2, 3, 4), counts=int32s(5), first=int32s(0))

    late = LateShape(mode=Mode.EAGER, scheduled_tokens=5, running_tokens=4, wanted=None)
    with pytest.raises(TailOverflow, match="5 tail rows were to run as 4"):
        made.prepare(tail, context, late)
