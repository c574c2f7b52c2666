"""How large a step is, how it runs, and why: a StepPlan becomes a StepShape.

`decide` is the exchange followed by `settle`; `settle` is a pure function of the gathered rows, so every
rank can compute every other rank's shape (runner requirements SH-1 to SH-9, SH-18).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tokamak.core.plan import Int32s, LateShape, Mode, StepPlan, StepShape
from tokamak.errors import ShapeInvariant
from tokamak.graphs.ladder import Ladder
from tokamak.runner.exchange import (
    Demand,
    Exchange,
    RankRow,
    Rows,
    demand_names,
    rank_row,
)


class TokenBuckets(Protocol):
    """Answers which token bucket a step can replay."""

    @property
    def ladder(self) -> Ladder:
        """Sizes that may be recorded; none when the graph is off."""
        ...

    def bucket(self, tokens: int, /) -> int | None:
        """The recorded bucket that holds so many token rows, or None."""
        ...


class RequestBuckets(Protocol):
    """Answers which request bucket a uniform decode step can replay."""

    @property
    def ladder(self) -> Ladder:
        """Sizes that may be recorded; none when the graph is off."""
        ...

    def bucket(self, requests: int, /, *, q_width: int, split: bool = False) -> int | None:
        """The recorded bucket that holds so many request rows of this width, or None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What was decided at start-up about every step, equal on all ranks."""

    drafts: bool
    """Whether tokens are drafted after a step."""


class RunningTable:
    """How many token rows each data-parallel rank runs; overwritten in place every step."""

    def __init__(self, ranks: int) -> None:
        self._tokens = np.zeros(ranks, dtype=np.int32)
        self.view: Int32s = self._tokens.view()
        """What everybody else gets: the same read-only array in all steps. int32 [ranks]."""
        self.view.flags.writeable = False

    def fill(self, tokens: Sequence[int]) -> None:
        """Overwrite the table; only `ForwardMode.settle` calls this."""
        self._tokens[:] = tokens


class ForwardMode:
    """The decision point for the size and mode of a step."""

    @classmethod
    def decide(
        cls,
        plan: StepPlan,
        *,
        exchange: Exchange,
        table: RunningTable,
        late_table: RunningTable,
        req_graph: RequestBuckets,
        token_graph: TokenBuckets,
        late_graph: TokenBuckets,
        policy: Policy,
        eager_demand: Demand,
        tail_rows: int,
    ) -> StepShape:
        """Settle this rank's shape after hearing from all ranks; one exchange, nothing else.

        Raises:
            GroupError: ranks are at different steps, were started differently, or one is gone.
            ShapeInvariant: the plan or the shape contradicts itself.
        """
        _check_plan(plan)
        return cls.settle(
            exchange.gather_rows(rank_row(plan, eager_demand, tail_rows)),
            rank=exchange.rank,
            table=table,
            late_table=late_table,
            req_graph=req_graph,
            token_graph=token_graph,
            late_graph=late_graph,
            policy=policy,
        )

    @classmethod
    def settle(
        cls,
        rows: Rows,
        *,
        rank: int,
        table: RunningTable,
        late_table: RunningTable,
        req_graph: RequestBuckets,
        token_graph: TokenBuckets,
        late_graph: TokenBuckets,
        policy: Policy,
    ) -> StepShape:
        """The shape of `rank`, from the same rows on every rank; fills the tables, else pure.

        Raises:
            ShapeInvariant: the shape contradicts itself, as when a graph offers a bucket that is too small.
        """
        group = [RankRow(*row) for row in rows.tolist()]
        if not any(row.has_work for row in group):
            verdict = _nobody(len(group))
        elif any(row.prefill_rows for row in group):
            verdict = _prefill(group, token_graph, late_graph)
        else:
            verdict = _decode(group, req_graph)
        own, late = group[rank], verdict.late
        table.fill(verdict.tokens)
        late_table.fill([0] * len(group) if late is None else late.tokens)
        shape = StepShape(
            mode=verdict.mode,
            dummy=not own.has_work,
            scheduled_requests=own.scheduled_requests,
            scheduled_tokens=own.scheduled_tokens,
            running_requests=verdict.requests[rank],
            running_tokens=verdict.tokens[rank],
            q_width=verdict.q_width,
            cut=None,
            uniform_rows=len(set(verdict.tokens)) == 1,
            draft_requests=_draft_requests(group, req_graph, policy),
            why=verdict.why,
            wanted=verdict.wanted,
            late=None
            if late is None
            else LateShape(
                mode=late.mode,
                scheduled_tokens=own.tail_rows,
                running_tokens=late.tokens[rank],
                wanted=late.wanted,
            ),
        )
        check_shape(shape, req_graph=req_graph, token_graph=token_graph, late_graph=late_graph)
        return shape


def lone_shape(
    mode: Mode,
    *,
    scheduled: tuple[int, int],
    running: tuple[int, int],
    q_width: int,
    dummy: bool,
    why: str,
    late: LateShape | None = None,
) -> StepShape:
    """The shape of a step that no peer takes part in and nobody settles: recordings, their checks, compiling ahead.

    scheduled, running: request rows and token rows. late: how late layers run, if they do on their own.
    """
    return StepShape(
        mode=mode,
        dummy=dummy,
        scheduled_requests=scheduled[0],
        scheduled_tokens=scheduled[1],
        running_requests=running[0],
        running_tokens=running[1],
        q_width=q_width,
        cut=None,
        uniform_rows=True,
        draft_requests=0,
        wanted=None,
        why=why,
        late=late,
    )


def lone_late(mode: Mode, scheduled: int, running: int) -> LateShape:
    """How late layers run in such a step, over so many tail rows."""
    return LateShape(mode=mode, scheduled_tokens=scheduled, running_tokens=running, wanted=None)


def check_shape(
    shape: StepShape,
    *,
    req_graph: RequestBuckets,
    token_graph: TokenBuckets,
    late_graph: TokenBuckets,
) -> None:
    """Hold a shape against what every step must satisfy.

    Raises:
        ShapeInvariant: it runs less than was scheduled, its decode rows are not `q_width` wide, or it replays a
            bucket that is not recorded.
    """
    if shape.running_requests < shape.scheduled_requests:
        raise _broken(
            f"running_requests is {shape.running_requests}, and {shape.scheduled_requests} are scheduled"
        )
    if shape.running_tokens < shape.scheduled_tokens:
        raise _broken(
            f"running_tokens is {shape.running_tokens}, and {shape.scheduled_tokens} are scheduled"
        )
    if shape.q_width and shape.running_tokens != shape.running_requests * shape.q_width:
        raise _broken(
            f"running_tokens is {shape.running_tokens}; {shape.running_requests} decode rows of "
            f"{shape.q_width} tokens have {shape.running_requests * shape.q_width}"
        )
    if shape.mode is Mode.TOKEN_GRAPH:
        size = shape.running_tokens
        if token_graph.bucket(size) != size:
            raise _broken(f"running_tokens is {size}, a token bucket that is not recorded")
    if shape.mode is Mode.REQUEST_GRAPH:
        size = shape.running_requests
        if req_graph.bucket(size, q_width=shape.q_width) != size:
            raise _broken(
                f"running_requests is {size}, a request bucket of width {shape.q_width} that is not recorded"
            )
    if shape.late is not None:
        _check_late(shape.late, late_graph)


def _check_late(late: LateShape, graph: TokenBuckets) -> None:
    size = late.running_tokens
    if size < late.scheduled_tokens:
        raise _broken(f"late layers run {size} rows, and {late.scheduled_tokens} are scheduled")
    if late.mode is Mode.TOKEN_GRAPH and graph.bucket(size) != size:
        raise _broken(f"late layers run {size} rows, a bucket that is not recorded")


class _Late(NamedTuple):
    """What the group's late layers run, with one entry per rank."""

    mode: Mode
    tokens: list[int]
    wanted: int | None


class _Verdict(NamedTuple):
    """What the group runs: the same on every rank, with one entry per rank where ranks may differ."""

    mode: Mode
    requests: list[int]
    tokens: list[int]
    q_width: int
    why: str
    wanted: int | None
    late: _Late | None = None


class _Choice(NamedTuple):
    """A recorded bucket, or why there is none."""

    bucket: int | None
    why: str
    wanted: int | None = None


def _nobody(ranks: int) -> _Verdict:
    """No rank has work: no forward anywhere, and all return together."""
    none = [0] * ranks
    return _Verdict(mode=Mode.EAGER, requests=none, tokens=none, q_width=0, why="idle", wanted=None)


def _prefill(group: Sequence[RankRow], graph: TokenBuckets, late_graph: TokenBuckets) -> _Verdict:
    """Some rank has prefill rows: every rank replays one token bucket, or runs its own rows eagerly."""
    requests = [row.scheduled_requests if row.has_work else 1 for row in group]
    tokens = [row.scheduled_tokens if row.has_work else 1 for row in group]
    choice = _choose(graph.ladder, graph.bucket, max(tokens), group)
    return _Verdict(
        mode=Mode.EAGER if choice.bucket is None else Mode.TOKEN_GRAPH,
        requests=requests,
        tokens=tokens if choice.bucket is None else [choice.bucket] * len(group),
        q_width=0,
        why=choice.why,
        wanted=choice.wanted,
        late=_late(group, late_graph),
    )


def _late(group: Sequence[RankRow], graph: TokenBuckets) -> _Late | None:
    """Some rank has rows for late layers: every rank replays one bucket, or runs its own, and one if it has none."""
    largest = max(row.tail_rows for row in group)
    if not largest:
        return None
    choice = _choose(graph.ladder, graph.bucket, largest, group)
    own = [max(row.tail_rows, 1) for row in group]
    return _Late(
        mode=Mode.EAGER if choice.bucket is None else Mode.TOKEN_GRAPH,
        tokens=own if choice.bucket is None else [choice.bucket] * len(group),
        wanted=choice.wanted,
    )


def _decode(group: Sequence[RankRow], graph: RequestBuckets) -> _Verdict:
    """Decode rows alone: every rank runs as many as the largest, padded to a bucket if one is recorded."""
    q_width = max(row.max_query for row in group)
    largest = max(row.scheduled_requests for row in group)

    def bucket(requests: int) -> int | None:
        return graph.bucket(requests, q_width=q_width)

    choice = _choose(graph.ladder, bucket, largest, group)
    running = largest if choice.bucket is None else choice.bucket
    return _Verdict(
        mode=Mode.EAGER if choice.bucket is None else Mode.REQUEST_GRAPH,
        requests=[running] * len(group),
        tokens=[running * q_width] * len(group),
        q_width=q_width,
        why=choice.why,
        wanted=choice.wanted,
    )


def _choose(
    ladder: Ladder,
    bucket: Callable[[int], int | None],
    size: int,
    group: Sequence[RankRow],
) -> _Choice:
    """The bucket of the group's largest size; one reason code for every step without one."""
    if not ladder.buckets:
        return _Choice(None, "eager:off")
    demand = 0
    for row in group:
        demand |= row.eager_demand
    if demand:
        return _Choice(None, f"eager:{demand_names(Demand(demand))}")
    wanted = ladder.ceil(size)
    if wanted is None:
        return _Choice(None, "eager:above-ladder")
    found = bucket(size)
    return (
        _Choice(None, "eager:not-recorded", wanted) if found is None else _Choice(found, "bucket")
    )


def _draft_requests(group: Sequence[RankRow], graph: RequestBuckets, policy: Policy) -> int:
    """Rows of every rank's draft: the request bucket of the largest, or that many above the ladder (SH-18)."""
    if not policy.drafts:
        return 0
    largest = max(row.draft_rows for row in group)
    if not largest:
        return 0
    bucket = graph.ladder.ceil(largest)
    return largest if bucket is None else bucket


def _check_plan(plan: StepPlan) -> None:
    """Prefill rows come first (MIX-1): behind them are rows of one width after which no chunk ends."""
    decode = plan.query_lens[plan.prefill_rows :]
    if not 0 <= plan.prefill_rows <= plan.scheduled_requests:
        raise _broken(
            f"prefill_rows is {plan.prefill_rows} in a plan of {plan.scheduled_requests} request rows"
        )
    if np.count_nonzero(decode != decode[:1]):
        raise _broken(f"decode rows have {decode.tolist()} tokens; all must have the same number")
    late = plan.final_chunk[plan.prefill_rows :]
    if np.count_nonzero(late):
        raise _broken(
            f"final_chunk is set in row {int(late.argmax()) + plan.prefill_rows}, behind the "
            f"{plan.prefill_rows} prefill rows"
        )


def _broken(message: str) -> ShapeInvariant:
    return ShapeInvariant(
        message, hint="no rank may run this step; report it with the log of every rank"
    )
