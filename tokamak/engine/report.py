"""What does an engine tell of its graphs and of where its steps went? A rank's own numbers, as messages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from tokamak.config.engine import EngineConfig
from tokamak.engine.messages import (
    EngineReport,
    GraphReport,
    ModeNumbers,
    SpanNumbers,
    VerdictReport,
)
from tokamak.graphs import region_graph
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.request_graph import RequestKey
from tokamak.runner.assemble import Rank
from tokamak.runner.tally import ModeTally
from tokamak.telemetry.phases import RequestPhases
from tokamak.telemetry.spans import SpanTotals


def engine_report(config: EngineConfig, rank: Rank, phases: RequestPhases) -> EngineReport:
    """The report of a rank that serves. May be asked for while a step runs."""
    runner, start, graphs = rank.runner, rank.start, config.graphs
    tally, check = runner.tally, runner.check
    modes = {str(mode): _numbers(numbers) for mode, numbers in tally.modes.items()}
    ladders = {
        "request": start.request_ladder,
        "token": start.token_ladder,
        "decoder": start.late_ladder,
    }
    return EngineReport(
        graphs_when=graphs.when,
        graphs_why=next(line.why for line in config.reasons if line.field == "graphs"),
        graph_backend=graphs.backend,
        graph_reserve_bytes=start.memory.graph_bytes,
        graph_cost=start.cost.source,
        graphs=[
            _graph(
                report,
                ladders[report.kind],
                backend=graphs.backend,
                off=runner.recorder.off.get(report.name, ""),
                replays=report.replays,
            )
            for report in runner.recorder.reports()
        ],
        verdicts=[
            VerdictReport(
                graph=verdict.graph,
                bucket=verdict.bucket,
                size=verdict.size,
                worst=verdict.worst,
                ok=verdict.ok,
            )
            for verdict in rank.verdicts
        ],
        graph_checks=check.checks,
        graph_check_failures=check.failures,
        modes=modes,
        late=_numbers(tally.late),
        reasons=dict(tally.reasons),
        spans=_spans(runner.spans.totals()),
        phases=_spans(phases.totals()),
    )


def _numbers(of: ModeTally) -> ModeNumbers:
    return ModeNumbers(
        steps=of.steps, scheduled_tokens=of.scheduled_tokens, running_tokens=of.running_tokens
    )


def _spans(totals: Mapping[str, SpanTotals]) -> dict[str, SpanNumbers]:
    return {
        name: SpanNumbers(counts=list(of.counts), sum_s=of.sum_s) for name, of in totals.items()
    }


def _graph(
    report: region_graph.GraphReport, ladder: Ladder, *, backend: str, off: str, replays: int
) -> GraphReport:
    recorded = sorted({_size(key) for key in report.buckets})
    return GraphReport(
        name=report.name,
        kind=report.kind,
        backend=backend,
        ladder=list(ladder.buckets),
        recorded=recorded,
        seconds=report.seconds,
        pool_bytes=report.pool_bytes,
        segments=report.segments,
        state=f"off: {off}" if off else _state(ladder, recorded),
        recordings=len(report.buckets),
        replays=replays,
    )


def _size(key: Hashable) -> int:
    """The bucket of a recording's key."""
    if isinstance(key, RequestKey):
        return key.requests
    assert isinstance(key, int), f"a recording has the key {key!r}"
    return key


def _state(ladder: Ladder, recorded: list[int]) -> str:
    if not recorded:
        return "empty"
    return "recorded" if tuple(recorded) == ladder.buckets else "partly recorded"
