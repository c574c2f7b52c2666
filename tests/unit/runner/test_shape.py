"""Do all ranks settle the same shape from the same rows, and is every invariant kept?"""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError, astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.factory import a_request, a_scheduler
from tokamak.core.plan import Mode
from tokamak.graphs.ladder import Ladder
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.exchange import LocalExchange, RankRow, rank_row
from tokamak.runner.shape import ForwardMode, NoGraph, RunningTable


class Recorded:
    """A stand-in for a graph: every bucket of its ladder is recorded."""

    def __init__(self, *buckets: int) -> None:
        self._ladder = Ladder.of(buckets, limit=4096, option="test")

    def bucket(self, size: int, *, q_width: int = 1) -> int | None:
        del q_width
        return self._ladder.ceil(size)


def settle(rows: list[RankRow], rank: int, req_graph=None, token_graph=None):
    table = RunningTable(len(rows))
    shape = ForwardMode.settle(
        np.array([astuple(row) for row in rows], dtype=np.int32),
        rank=rank,
        table=table,
        req_graph=req_graph or NoGraph(),
        token_graph=token_graph or NoGraph(),
    )
    return shape, table.view.tolist()


def a_row(*, prefill: tuple[int, ...] = (), decode: int = 0, width: int = 1, eager: int = 0):
    return RankRow(
        seq=1,
        has_work=int(bool(prefill or decode)),
        scheduled_tokens=sum(prefill) + decode * width,
        scheduled_requests=len(prefill) + decode,
        prefill_rows=len(prefill),
        max_query=width if decode else 1,
        eager_demand=eager,
    )


def test_without_graphs_a_lone_rank_runs_what_was_scheduled():
    scheduler = a_scheduler()
    scheduler.add(a_request(prompt=11))
    plan = scheduler.plan()

    shape = ForwardMode.decide(
        plan,
        exchange=LocalExchange(),
        table=RunningTable(1),
        req_graph=NoGraph(),
        token_graph=NoGraph(),
    )

    assert shape.mode is Mode.EAGER
    assert shape.running_tokens == shape.scheduled_tokens == 11
    assert shape.why == "eager:no-bucket"


def test_every_prefilling_rank_replays_the_bucket_of_the_largest():
    rows = [a_row(prefill=(5,)), a_row(prefill=(70,)), a_row(decode=3), a_row()]

    settled = [settle(rows, rank, token_graph=Recorded(8, 64, 128)) for rank in range(4)]

    assert {shape.mode for shape, _ in settled} == {Mode.TOKEN_GRAPH}
    assert {shape.running_tokens for shape, _ in settled} == {128}
    assert settled[0][1] == [128] * 4
    assert settled[3][0].dummy


def test_one_rank_that_cannot_be_recorded_makes_all_run_eagerly():
    rows = [a_row(prefill=(5,)), a_row(prefill=(7,), eager=2)]

    shape, table = settle(rows, 0, token_graph=Recorded(8))

    assert shape.mode is Mode.EAGER
    assert shape.why == "eager:demand-2"
    assert table == [5, 7]


def test_decode_ranks_agree_on_requests_and_width():
    rows = [a_row(decode=3, width=2), a_row(decode=5, width=2), a_row()]

    settled = [settle(rows, rank, req_graph=Recorded(4, 8))[0] for rank in range(3)]

    assert {s.running_requests for s in settled} == {8}
    assert {s.running_tokens for s in settled} == {16}
    assert {s.q_width for s in settled} == {2}


def test_nobody_with_work_means_no_forward():
    shape, table = settle([a_row(), a_row()], 0, req_graph=Recorded(1))

    assert (shape.running_requests, shape.running_tokens, shape.why) == (0, 0, "idle")
    assert table == [0, 0]


def test_the_running_table_is_one_array_that_readers_cannot_change():
    table = RunningTable(2)
    view = table.view

    table.fill(np.array([3, 4], dtype=np.int32))

    assert table.view is view
    assert view.tolist() == [3, 4]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_stage_types_take_no_new_attributes():
    plan = dummy_plan(prefill_tokens=3, decode_rows=1)
    shape, _ = settle([rank_row(plan)], 0)

    with pytest.raises(FrozenInstanceError):
        plan.seq = 3
    with pytest.raises((FrozenInstanceError, TypeError)):
        shape.extra = 1


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_ranks_agree_and_run_at_least_what_is_scheduled(seed: int):
    chance = random.Random(seed)
    width = chance.choice([1, 1, 4])
    rows = [
        a_row(
            prefill=tuple(chance.randint(1, 90) for _ in range(chance.choice([0, 0, 1, 2]))),
            decode=chance.choice([0, 1, 5, 9]),
            width=width,
            eager=chance.choice([0, 0, 0, 4]),
        )
        for _ in range(chance.choice([1, 2, 3, 4, 8]))
    ]
    graphs = {
        "req_graph": Recorded(*chance.sample([1, 2, 4, 8, 16], 3)),
        "token_graph": Recorded(*chance.sample([16, 64, 128, 256], 2)),
    }

    settled = [settle(rows, rank, **graphs) for rank in range(len(rows))]

    tables = [table for _, table in settled]
    shapes = [shape for shape, _ in settled]
    assert all(table == tables[0] for table in tables)
    assert len({shape.mode for shape in shapes}) == 1
    assert len({shape.q_width for shape in shapes}) == 1
    assert [shape.running_tokens for shape in shapes] == tables[0]
    if shapes[0].mode is Mode.TOKEN_GRAPH:
        assert len({shape.running_tokens for shape in shapes}) == 1
    for shape in shapes:
        assert shape.running_tokens >= shape.scheduled_tokens
        assert shape.running_requests >= shape.scheduled_requests
