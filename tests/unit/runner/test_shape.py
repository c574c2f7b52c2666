"""Do all ranks settle the same shape from the same rows, and is every invariant kept?"""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.factory import a_request, a_scheduler
from tests.support.shapes import DRAFTS, PLAIN, NoGraph, Recorded, a_row, settle
from tokamak.core.context import StepContext
from tokamak.core.plan import Mode, StepShape
from tokamak.errors import ShapeInvariant
from tokamak.runner.dummy import dummy_plan, idle_plan
from tokamak.runner.exchange import NO_DEMAND, Demand, LocalExchange, RankRow, rank_row
from tokamak.runner.shape import ForwardMode, RunningTable, check_shape


def decide(plan, **changes) -> StepShape:
    """What a lone rank without graphs settles on."""
    arguments = {
        "exchange": LocalExchange(),
        "table": RunningTable(1),
        "late_table": RunningTable(1),
        "req_graph": NoGraph(),
        "token_graph": NoGraph(),
        "late_graph": NoGraph(),
        "policy": PLAIN,
        "eager_demand": NO_DEMAND,
        "tail_rows": 0,
    }
    return ForwardMode.decide(plan, **(arguments | changes))


def test_without_graphs_a_lone_rank_runs_what_was_scheduled():
    scheduler = a_scheduler()
    scheduler.add(a_request(prompt=11))
    plan = scheduler.plan()

    shape = decide(plan)

    assert shape.mode is Mode.EAGER
    assert shape.running_tokens == shape.scheduled_tokens == 11
    assert shape.why == "eager:off"


def test_every_prefilling_rank_replays_the_bucket_of_the_largest():
    rows = [a_row(prefill=(5,)), a_row(prefill=(70,)), a_row(decode=3), a_row()]

    settled = [settle(rows, rank, token_graph=Recorded(8, 64, 128)) for rank in range(4)]

    assert {shape.mode for shape, _ in settled} == {Mode.TOKEN_GRAPH}
    assert {shape.running_tokens for shape, _ in settled} == {128}
    assert [shape.running_requests for shape, _ in settled] == [1, 1, 3, 1]
    assert settled[0][1] == [128] * 4
    assert settled[3][0].dummy


def test_decode_ranks_agree_on_requests_and_width():
    rows = [a_row(decode=3, width=2), a_row(decode=5, width=2), a_row()]

    settled = [settle(rows, rank, req_graph=Recorded(4, 8))[0] for rank in range(3)]

    assert {s.running_requests for s in settled} == {8}
    assert {s.running_tokens for s in settled} == {16}
    assert {s.q_width for s in settled} == {2}


def test_eager_decode_is_padded_to_the_largest_batch_of_the_group():
    rows = [a_row(decode=3, width=2), a_row(decode=5, width=2), a_row()]

    settled = [settle(rows, rank) for rank in range(3)]

    assert [shape.running_requests for shape, _ in settled] == [5, 5, 5]
    assert [table for _, table in settled] == [[10, 10, 10]] * 3


def test_nobody_with_work_means_no_forward():
    shape, table = settle([a_row(), a_row()], 0, req_graph=Recorded(1), policy=DRAFTS)

    assert (shape.running_requests, shape.running_tokens, shape.why) == (0, 0, "idle")
    assert shape.draft_requests == 0
    assert table == [0, 0]


@pytest.mark.parametrize(
    ("eager", "buckets", "missing", "why", "wanted"),
    [
        (0, (8, 16), (), "bucket", None),
        (0, (), (), "eager:off", None),
        (0, (2, 4), (), "eager:above-ladder", None),
        (0, (8, 16), (8,), "eager:not-recorded", 8),
        (Demand.IMAGE, (8, 16), (), "eager:image", None),
        (Demand.ADAPTOR | Demand.HOST_READ, (8, 16), (8,), "eager:adaptor+host-read", None),
    ],
)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_every_step_has_its_reason(kind, eager, buckets, missing, why, wanted):
    row = a_row(prefill=(7,)) if kind == "prefill" else a_row(decode=7)
    rows = [row, a_row(decode=1, eager=eager)]
    graph = Recorded(*buckets, missing=missing)

    shapes = [settle(rows, rank, req_graph=graph, token_graph=graph)[0] for rank in (0, 1)]

    assert [shape.why for shape in shapes] == [why, why]
    assert [shape.wanted for shape in shapes] == [wanted, wanted]
    assert all((shape.mode is Mode.EAGER) == (why != "bucket") for shape in shapes)


def test_one_rank_that_cannot_be_recorded_makes_all_run_their_own_rows_eagerly():
    rows = [a_row(prefill=(5,)), a_row(prefill=(7,), eager=Demand.IMAGE), a_row()]

    settled = [settle(rows, rank, token_graph=Recorded(8)) for rank in range(3)]

    assert [shape.running_tokens for shape, _ in settled] == [5, 7, 1]
    assert [table for _, table in settled] == [[5, 7, 1]] * 3
    assert not settled[0][0].uniform_rows


def test_a_plan_s_own_demand_reaches_its_shape():
    plan = dummy_plan(prefill_tokens=3, decode_rows=0)

    shape = decide(plan, token_graph=Recorded(8), eager_demand=Demand.ADAPTOR)

    assert shape.why == "eager:adaptor"


@pytest.mark.parametrize(
    ("rows", "policy", "expected"),
    [
        ([a_row(decode=3), a_row(prefill=(9, 9, 9, 9, 9), finals=5), a_row()], DRAFTS, 8),
        ([a_row(decode=3), a_row()], DRAFTS, 4),
        ([a_row(decode=11), a_row()], DRAFTS, 11),
        ([a_row(prefill=(9,)), a_row()], DRAFTS, 0),
        ([a_row(decode=3), a_row()], PLAIN, 0),
    ],
)
def test_if_any_rank_drafts_all_draft_the_bucket_of_the_largest(rows, policy, expected):
    graph = Recorded(1, 2, 4, 8)

    shapes = [settle(rows, r, req_graph=graph, policy=policy)[0] for r in range(len(rows))]

    assert {shape.draft_requests for shape in shapes} == {expected}


def late_shapes(rows, graph):
    """Mode, rows of its own, rows it runs and the bucket that is missing, of every rank's late layers."""
    token_graph = Recorded(16)
    shapes = [
        settle(rows, r, token_graph=token_graph, late_graph=graph)[0] for r in range(len(rows))
    ]
    return [
        late and (late.mode, late.scheduled_tokens, late.running_tokens, late.wanted)
        for late in (shape.late for shape in shapes)
    ]


GRAPH, EAGER = Mode.TOKEN_GRAPH, Mode.EAGER


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (Recorded(4, 8), [(GRAPH, 5, 8, None), (GRAPH, 0, 8, None), (GRAPH, 2, 8, None)]),
        (Recorded(4), [(EAGER, 5, 5, None), (EAGER, 0, 1, None), (EAGER, 2, 2, None)]),
        (Recorded(8, missing=(8,)), [(EAGER, 5, 5, 8), (EAGER, 0, 1, 8), (EAGER, 2, 2, 8)]),
        (NoGraph(), [(EAGER, 5, 5, None), (EAGER, 0, 1, None), (EAGER, 2, 2, None)]),
    ],
)
def test_late_layers_run_the_bucket_of_the_largest_tail_on_every_rank(graph, expected):
    """GR-34. The second rank has no row for them, and the third decodes beside peers that prefill."""
    rows = [a_row(prefill=(9,), tail=5), a_row(prefill=(9,)), a_row(decode=2, tail=2)]

    assert late_shapes(rows, graph) == expected


def test_late_layers_run_on_their_own_beside_prefill_rows_alone():
    assert late_shapes([a_row(prefill=(9,)), a_row()], Recorded(4)) == [None, None]
    assert late_shapes([a_row(decode=2, tail=2)], Recorded(4)) == [None]


def test_the_running_table_is_one_array_over_all_steps_that_readers_cannot_change():
    table = RunningTable(1)
    view, address = table.view, table.view.ctypes.data

    seen = []
    for tokens in (3, 9, 1):
        decide(dummy_plan(prefill_tokens=tokens, decode_rows=0), table=table)
        seen.append(table.view.tolist())

    assert seen == [[3], [9], [1]]
    assert table.view is view
    assert table.view.ctypes.data == address
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_the_running_table_holds_the_counts_and_nothing_else():
    table = RunningTable(3)

    kept = list(vars(table).values())

    assert all(np.shares_memory(array, table.view) for array in kept)
    assert all(len(array) == 3 for array in kept)


def test_a_context_has_no_ladder():
    kinds = " ".join(str(field.type) for field in fields(StepContext))

    assert "running_table" in {field.name for field in fields(StepContext)}
    assert "Ladder" not in kinds
    assert "Buckets" not in kinds


def test_a_context_needs_the_table_and_a_shape_every_field():
    shape, _ = settle([a_row(decode=1)], 0)
    values = {field.name: getattr(shape, field.name) for field in fields(StepShape)}
    rest = {field.name: None for field in fields(StepContext) if field.name != "running_table"}

    with pytest.raises(TypeError, match="running_table"):
        StepContext(**rest)
    for name in values:
        with pytest.raises(TypeError, match=name):
            StepShape(**{other: values[other] for other in values if other != name})


def test_stage_types_take_no_new_attributes():
    plan = dummy_plan(prefill_tokens=3, decode_rows=1)
    shape, _ = settle([rank_row(plan)], 0)

    with pytest.raises(FrozenInstanceError):
        plan.seq = 3
    with pytest.raises((FrozenInstanceError, TypeError)):
        shape.extra = 1


class TooSmall(Recorded):
    """A graph that offers its smallest bucket for every size."""

    def bucket(self, size: int, /, *, q_width: int = 1, split: bool = False) -> int | None:
        del size, q_width, split
        return self.ladder.buckets[0]


def test_a_bucket_that_is_too_small_is_refused():
    with pytest.raises(ShapeInvariant, match="running_tokens is 8, and 9 are scheduled"):
        settle([a_row(prefill=(9,))], 0, token_graph=TooSmall(8, 16))
    with pytest.raises(ShapeInvariant, match="running_requests is 8, and 9 are scheduled"):
        settle([a_row(decode=9)], 0, req_graph=TooSmall(8, 16))


def test_a_shape_that_contradicts_itself_is_refused_by_field_and_value():
    graphs = {"req_graph": Recorded(4), "token_graph": Recorded(16), "late_graph": Recorded(8)}
    decode, _ = settle([a_row(decode=3, width=2)], 0, **graphs)
    prefill, _ = settle([a_row(prefill=(9,), tail=3)], 0, **graphs)

    with pytest.raises(ShapeInvariant, match="running_tokens is 9; 4 decode rows of 2 tokens"):
        check_shape(replace(decode, running_tokens=9), **graphs)
    with pytest.raises(ShapeInvariant, match="running_requests is 3, a request bucket of width 2"):
        check_shape(replace(decode, running_requests=3, running_tokens=6), **graphs)
    with pytest.raises(ShapeInvariant, match="running_tokens is 15, a token bucket"):
        check_shape(replace(prefill, running_tokens=15), **graphs)
    for rows, what in ((2, "2 rows, and 3 are scheduled"), (7, "7 rows, a bucket")):
        with pytest.raises(ShapeInvariant, match=f"late layers run {what}"):
            check_shape(replace(prefill, late=replace(prefill.late, running_tokens=rows)), **graphs)
    check_shape(decode, **graphs)
    check_shape(prefill, **graphs)


def test_prefill_rows_come_first():
    plan = dummy_plan(prefill_tokens=5, decode_rows=3)

    with pytest.raises(ShapeInvariant, match=r"final_chunk is set in row 2, behind the 1 prefill"):
        decide(replace(plan, final_chunk=np.array([False, False, True, False])))
    with pytest.raises(ShapeInvariant, match=r"decode rows have \[1, 1, 5\] tokens"):
        decide(replace(plan, query_lens=plan.query_lens[::-1].copy()))
    with pytest.raises(ShapeInvariant, match="prefill_rows is 5 in a plan of 4 request rows"):
        decide(replace(plan, prefill_rows=5))


def random_rows(chance: random.Random, ranks: int) -> list[RankRow]:
    width = chance.choice([1, 1, 4])
    rows = []
    for _ in range(ranks):
        prefill = tuple(chance.randint(1, 90) for _ in range(chance.choice([0, 0, 0, 1, 2])))
        rows.append(
            a_row(
                prefill=prefill,
                finals=chance.randint(0, len(prefill)),
                decode=chance.choice([0, 1, 5, 9]),
                width=width,
                eager=chance.choice([0, 0, 0, 0, 0, 4]),
            )
        )
    return rows


def a_graph(chance: random.Random, sizes: list[int]) -> Recorded:
    buckets = chance.sample(sizes, chance.randint(0, len(sizes)))
    missing = tuple(size for size in buckets if chance.random() < 0.2)
    return Recorded(*buckets, missing=missing)


@given(seed=st.integers(0, 2**32), ranks=st.sampled_from([1, 2, 3, 4, 8]))
@settings(max_examples=300, deadline=None)
def test_ranks_agree_and_run_at_least_what_is_scheduled(seed: int, ranks: int):
    chance = random.Random(seed)
    rows = random_rows(chance, ranks)
    graphs = {
        "req_graph": a_graph(chance, [1, 2, 4, 8, 16]),
        "token_graph": a_graph(chance, [16, 64, 128, 256]),
        "policy": chance.choice([PLAIN, DRAFTS]),
    }
    order = chance.sample(range(ranks), ranks)

    settled = [settle(rows, rank, **graphs) for rank in range(ranks)]
    permuted = [settle([rows[at] for at in order], rank, **graphs) for rank in range(ranks)]

    tables = [table for _, table in settled]
    shapes = [shape for shape, _ in settled]
    group = {(s.mode, s.q_width, s.cut, s.uniform_rows, s.draft_requests) for s in shapes}
    assert len(group) == 1
    assert len({(s.why, s.wanted) for s in shapes}) == 1
    assert all(table == tables[0] for table in tables)
    assert [shape.running_tokens for shape in shapes] == tables[0]
    assert [shape for shape, _ in permuted] == [shapes[at] for at in order]
    assert permuted[0][1] == [tables[0][at] for at in order]
    if shapes[0].mode is Mode.TOKEN_GRAPH:
        assert len({shape.running_tokens for shape in shapes}) == 1
        assert shapes[0].running_tokens in graphs["token_graph"].ladder.buckets
    if shapes[0].q_width:
        assert len({shape.running_requests for shape in shapes}) == 1
    if shapes[0].mode is Mode.REQUEST_GRAPH:
        assert shapes[0].running_requests in graphs["req_graph"].ladder.buckets
    for shape, row in zip(shapes, rows, strict=True):
        assert shape.running_tokens >= shape.scheduled_tokens
        assert shape.running_requests >= shape.scheduled_requests
        assert shape.draft_requests == 0 or shape.draft_requests >= row.draft_rows
        assert shape.dummy == (not row.has_work)
    if any(row.has_work for row in rows):
        any_prefill = any(row.prefill_rows for row in rows)
        for shape in (shape for shape in shapes if shape.dummy):
            assert bool(idle_plan(shape, 1).prefill_rows) == any_prefill
            assert idle_plan(shape, 1).scheduled_tokens <= shape.running_tokens
