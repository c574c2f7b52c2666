"""A report has every graph with its state, and the numbers of a rank as they are."""

from __future__ import annotations

from types import SimpleNamespace

from tests.support.configs import a_config
from tests.support.factory import cache_groups
from tokamak.core.plan import Mode
from tokamak.engine.report import engine_report
from tokamak.graphs.region_graph import GraphReport
from tokamak.graphs.request_graph import RequestKey
from tokamak.runner.graph_cost import GraphCost
from tokamak.runner.memory import plan_start
from tokamak.runner.tally import StepTally
from tokamak.runner.verify import Verdict
from tokamak.telemetry.phases import RequestPhases
from tokamak.telemetry.spans import BOUNDS_S, Spans

COST = GraphCost(bytes_per_bucket=1000, bytes_per_row=10, source="saved")


def a_graph(kind: str, name: str, *buckets: object) -> GraphReport:
    return GraphReport(
        kind=kind,
        name=name,
        buckets=tuple(buckets),
        seconds=0.5,
        pool_bytes=100 * len(buckets),
        segments=2,
        native=True,
        replays=3,
    )


def a_rank(config, *graphs: GraphReport, off: dict[str, str] | None = None):
    """The numbers of a rank that has replayed 3 of 4 steps."""
    tally, spans = StepTally(), Spans()
    tally.modes[Mode.REQUEST_GRAPH].steps = 3
    tally.modes[Mode.REQUEST_GRAPH].scheduled_tokens = 5
    tally.modes[Mode.REQUEST_GRAPH].running_tokens = 6
    tally.reasons["bucket"] = 3
    tally.late.add(2, 4)
    with spans.span("launch"):
        pass
    runner = SimpleNamespace(
        tally=tally,
        spans=spans,
        check=SimpleNamespace(checks=2, failures=1),
        recorder=SimpleNamespace(reports=lambda: list(graphs), off=off or {}),
    )
    verdicts = (Verdict(graph="request", bucket=4, size=3, worst=0.25, ok=False),)
    start = plan_start(config, cache_groups(), COST)
    return SimpleNamespace(runner=runner, start=start, verdicts=verdicts)


def test_a_graph_tells_its_ladder_and_what_of_it_is_recorded() -> None:
    config = a_config(req_graph_sizes="1,4", token_graph_sizes="64")
    rank = a_rank(
        config,
        a_graph("token", "prefill", 64),
        a_graph("request", "decode", RequestKey(4, 1)),
    )

    prefill, decode = engine_report(config, rank, RequestPhases()).graphs

    assert (prefill.ladder, prefill.recorded, prefill.state) == ([64], [64], "recorded")
    assert (decode.ladder, decode.recorded, decode.state) == ([1, 4], [4], "partly recorded")
    assert (decode.replays, prefill.replays) == (3, 3)
    assert (decode.pool_bytes, decode.backend) == (100, "sim")


def test_a_graph_that_is_off_says_why() -> None:
    config = a_config(req_graph_sizes="1,4")
    rank = a_rank(
        config,
        a_graph("token", "prefill"),
        a_graph("request", "decode"),
        off={"prefill": "no size is asked for"},
    )

    prefill, decode = engine_report(config, rank, RequestPhases()).graphs

    assert prefill.state == "off: no size is asked for"
    assert decode.state == "empty"


def test_a_report_says_when_and_why_graphs_are_recorded() -> None:
    config = a_config(graphs="off")

    report = engine_report(config, a_rank(config), RequestPhases())

    assert (report.graphs_when, report.graphs_why) == ("off", "asked for")
    assert (report.graph_reserve_bytes, report.graph_cost) == (0, "saved")


def test_a_report_has_the_sums_of_steps_checks_and_verification() -> None:
    config = a_config(req_graph_sizes="1,4")

    report = engine_report(config, a_rank(config), RequestPhases())

    assert report.modes["request_graph"].running_tokens == 6
    assert report.reasons == {"bucket": 3}
    assert (report.late.steps, report.late.scheduled_tokens, report.late.running_tokens) == (
        1,
        2,
        4,
    )
    assert (report.graph_checks, report.graph_check_failures) == (2, 1)
    assert [(verdict.size, verdict.ok) for verdict in report.verdicts] == [(3, False)]
    assert len(report.spans["launch"].counts) == len(BOUNDS_S) + 1
    assert report.spans["launch"].counts[-1] == 1
    assert report.spans["stage"].counts[-1] == 0
