"""Who fills the tables derived from a step's lengths, how often, and does a replay read those of its own step?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.preparation import a_decode_plan, an_arena, prepared, shape_of, two_groups
from tokamak.cache.view import PagedView
from tokamak.core.context import StepContext, installed
from tokamak.core.inputs import AttnStep, StepInputs
from tokamak.graphs.buffers import StaticBuffers
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region import Manifest, begin_forward
from tokamak.graphs.request_graph import ReqGraph, RequestKey
from tokamak.graphs.sim import SimBackend
from tokamak.graphs.streams import SideStreams
from tokamak.runner.inputs import InputArena

BUCKET = 4
CPU = torch.device("cpu")


@pytest.fixture
def arena() -> InputArena:
    return an_arena(groups=two_groups())


def context(arena: InputArena, lengths: list[int]) -> StepContext:
    """A decode step in which requests see so many tokens, padded to the bucket."""
    plan = a_decode_plan([length - 1 for length in lengths])
    shape = shape_of(plan, running_requests=BUCKET)
    return StepContext(
        shape=shape,
        inputs=prepared(arena, plan, shape),
        attn=AttnStep(prefill=None, decode=None),
        running_table=np.zeros(1, dtype=np.int32),
        layers=(),
        streams=SideStreams(CPU),
        pad_value=0.0,
        late=None,
    )


def layers_that_read(step: StepInputs) -> Tensor:
    """Two layers read the running sums of one group, and one reads its tiles: float32 [requests, 1]."""
    rows = step.rows["keys"]
    sums = rows.indptrs()[1:] + rows.indptrs()[1:] * 100
    return (sums + rows.unit_tiles(2)[:BUCKET, 0] * 10_000).float()[:, None]


def layers_that_read_nothing(step: StepInputs) -> Tensor:
    """What a step computes that makes its own tables: float32 [requests, 1]."""
    return step.rows["keys"].lengths.float()[:, None]


def expected(lengths: list[int]) -> list[float]:
    padded = np.array(lengths + [1] * (BUCKET - len(lengths)))
    sums = np.cumsum(-(-padded // 4))
    return (sums * 101 + np.arange(BUCKET) * 10_000).tolist()


def fills(ctx: StepContext) -> dict[str, int]:
    views = ctx.inputs.rows
    return {name: view.fills for name, view in views.items() if isinstance(view, PagedView)}


def run(forward, ctx: StepContext) -> Tensor:
    with installed(ctx):
        begin_forward(ctx)
        return forward(ctx.inputs)


def a_graph() -> ReqGraph:
    graph = ReqGraph(
        "test",
        Ladder((BUCKET,)),
        lambda: SimBackend(CPU),
        Manifest(()),
        SideStreams(CPU),
        StaticBuffers(),
    )
    graph.open_outlets(torch.empty(1, 1), BUCKET)
    return graph


def test_an_eager_forward_fills_once_each_table_it_reads(arena):
    ctx = context(arena, [5, 9])

    result = run(layers_that_read, ctx)

    assert result[:, 0].tolist() == expected([5, 9])
    assert fills(ctx) == {"keys": 2, "window": 0}


def test_every_eager_forward_fills_anew(arena):
    ctx = context(arena, [5, 9])
    run(layers_that_read, ctx)

    result = run(layers_that_read, context(arena, [17, 1]))

    assert result[:, 0].tolist() == expected([17, 1])
    assert fills(ctx) == {"keys": 4, "window": 0}


def test_a_forward_that_makes_its_own_tables_fills_none(arena):
    ctx = context(arena, [5, 9])

    run(layers_that_read_nothing, ctx)

    assert fills(ctx) == {"keys": 0, "window": 0}


def test_a_replay_fills_nothing_from_the_host_and_reads_the_tables_of_its_step(arena):
    graph = a_graph()
    ctx = context(arena, [5, 9])
    graph.record(RequestKey(BUCKET, 1), layers_that_read, ctx)
    recorded = fills(ctx)

    results = {}
    for lengths in ([17, 1], [4, 4, 4], [5, 9]):
        step = context(arena, lengths)
        results[tuple(lengths)] = graph.replay(RequestKey(BUCKET, 1), step)[:, 0].tolist()

    assert recorded == {"keys": 4, "window": 0}, "once to warm up, once to record"
    assert fills(ctx) == recorded
    for lengths, found in results.items():
        assert found == expected(list(lengths)), lengths


def test_a_recording_that_kept_the_tables_of_its_warm_up_is_found(arena, monkeypatch):
    """The fault that dropping them prevents: the fill is not recorded, and replays read stale tables."""
    monkeypatch.setattr(PagedView, "drop", lambda self: None)
    graph = a_graph()
    graph.record(RequestKey(BUCKET, 1), layers_that_read, context(arena, [5, 9]))

    found = graph.replay(RequestKey(BUCKET, 1), context(arena, [17, 1]))[:, 0].tolist()

    assert found == expected([5, 9]) != expected([17, 1])
